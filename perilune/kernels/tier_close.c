/* Closing segments: which thread makes which record. Records are independent, so their bytes don't depend on threads. */
#include <omp.h>
#include <stdlib.h>

#include "tier_close.h"

#define SCRATCH_PER_DIM ((int64_t)5 * SEGMENT_TOKENS) /* bytes, with room to spare; see open_work of tier_record.c */
#define SCRATCH_FIXED ((int64_t)24 * SEGMENT_TOKENS)

static int blocks_are_valid(const int32_t *blocks, int skip, const pool *source) {
    for (int b = skip; b < SEGMENT_BLOCKS; b++)
        if (blocks[b] < 0 || blocks[b] >= source->num_blocks) return 0;
    return 1;
}

/* blocks: int32 [64]; the first two are negative for a sequence's first segment. */
EXPORT int pk_close_records(const context *ctx, const pool *source, const int32_t *blocks, const segment_pool *slots,
                            int slot, int first, int count) {
    int skip = blocks[0] < 0 && blocks[1] < 0 ? SINK_BLOCKS : 0, records = slots->num_layers * slots->num_kv_heads;
    if (slot < 0 || slot >= slots->num_slots || !slots->payloads[slot] || first < 0 || count < 0 ||
        first + count > records || !blocks_are_valid(blocks, skip, source))
        return STATUS_BAD_BATCH;
    int threads = ctx->threads < count ? ctx->threads : count > 0 ? count : 1;
    int64_t bytes = SCRATCH_PER_DIM * source->head_dim + SCRATCH_FIXED;
    uint8_t *scratch = aligned_alloc(64, (size_t)(bytes * threads));
    if (!scratch) return STATUS_NO_MEMORY;
    atomic_int next = 0;
#pragma omp parallel num_threads(threads)
    for (int i; (i = atomic_fetch_add(&next, 1)) < count;) {
        int layer = (first + i) / slots->num_kv_heads, head = (first + i) % slots->num_kv_heads;
        close_item item = {source, blocks, &slots->at, record_summary(slots, slot, layer, head),
                           record_payload(slots, slot, layer, head), scratch + bytes * omp_get_thread_num(), layer, head, skip};
        ctx->ops->close_record(&item);
    }
    free(scratch);
    return STATUS_OK;
}
