/* Attention over paged KV: which thread computes which rows over which tiles. The arithmetic is `kernel_ops.attend`.
 *
 * Prefill (FlashAttention-2, arXiv 2307.08691): a work item is a run of query tokens of one sequence and KV head, with the
 * heads that share it folded into rows. Decode (Flash-Decoding): an item is a run of KV tiles of one sequence and KV head.
 * KV tiles start at even block numbers, so a row's arithmetic never depends on the rows beside it.
 */
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define PREFILL_ROWS 96 /* rows of an item: K and V tiles are read from L1, sums from L2 */
#define LOG2_E 1.44269504f

/* ------------------------------------------------------------------------------------------- row groups */

typedef struct workspace { /* one thread's */
    row_group *groups;
    uint32_t *q;
    float *acc, *sum;
    uint16_t *tail, *zeros; /* one block of V without stale slots; a block of zeros */
    uint16_t *units;        /* a tile of closed segments as bf16 */
} workspace;

static int prefill_tokens(const heads *shape) {
    int group = shape->num_q_heads / shape->num_kv_heads, step = GROUP_ROWS;
    if (group % 6 == 0) step = 1;
    else if (group % 3 == 0) step = 2;
    else if (group % 2 == 0) step = 3;
    int tokens = PREFILL_ROWS / group / step * step;
    return tokens > 0 ? tokens : 1;
}

static int max_rows(const heads *shape) { return prefill_tokens(shape) * (shape->num_q_heads / shape->num_kv_heads); }

static int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t attention_scratch_bytes(const heads *shape) {
    int64_t rows = max_rows(shape), dim = shape->head_dim;
    return align64(rows * (int64_t)sizeof(row_group)) + align64(rows * dim * 2) + align64(rows * dim * 4) +
           align64(rows * 64) + 2 * align64(dim * BLOCK_TOKENS * 2) + dim * TILE_TOKENS * 4;
}

static workspace open_workspace(uint8_t *memory, const heads *shape) {
    int64_t rows = max_rows(shape), dim = shape->head_dim;
    workspace space;
    space.groups = (row_group *)memory;
    memory += align64(rows * (int64_t)sizeof(row_group));
    space.q = (uint32_t *)memory;
    memory += align64(rows * dim * 2);
    space.acc = (float *)memory;
    memory += align64(rows * dim * 4);
    space.sum = (float *)memory;
    memory += align64(rows * 64);
    space.tail = (uint16_t *)memory;
    space.zeros = (uint16_t *)(memory + align64(dim * BLOCK_TOKENS * 2));
    space.units = (uint16_t *)(memory + 2 * align64(dim * BLOCK_TOKENS * 2));
    memset(space.zeros, 0, (size_t)(dim * BLOCK_TOKENS * 2));
    return space;
}

/* Fold tokens x heads into groups of at most GROUP_ROWS rows; row r is token r / heads, head r % heads.
 * `q` points to the first token's first head. Returns how many groups there are. */
static int fold_rows(workspace *space, const heads *shape, const uint16_t *q, int tokens, int position, int window) {
    int group = shape->num_q_heads / shape->num_kv_heads, dim = shape->head_dim, total = tokens * group;
    int count = (total + GROUP_ROWS - 1) / GROUP_ROWS, done = 0;
    for (int i = 0; i < count; i++) {
        row_group *g = &space->groups[i];
        g->rows = (total - done + count - i - 1) / (count - i);
        g->head_dim = dim;
        g->acc = space->acc + (int64_t)done * dim;
        g->sum = space->sum + (int64_t)done * 16;
        g->moment = NULL;
        uint32_t *pairs = space->q + (int64_t)done * (dim / 2);
        g->q = pairs;
        for (int r = 0; r < g->rows; r++, done++) {
            int token = done / group;
            const uint16_t *row = q + ((int64_t)token * shape->num_q_heads + done % group) * dim;
            for (int p = 0; p < dim / 2; p++) memcpy(&pairs[p * g->rows + r], row + 2 * p, 4);
            g->max[r] = MASKED;
            g->last[r] = position + token;
            g->first[r] = window > 0 && g->last[r] >= window ? g->last[r] - window + 1 : 0;
        }
    }
    memset(space->acc, 0, sizeof(float) * (size_t)total * (size_t)dim);
    memset(space->sum, 0, sizeof(float) * (size_t)total * 16);
    return count;
}

static float add_lanes(const float *lanes) {
    float total = 0.0f;
    for (int i = 0; i < 16; i++) total += lanes[i];
    return total;
}

/* ---------------------------------------------------------------------------------------------- KV tiles */

typedef struct kv_head { /* one head of one sequence in one layer */
    const pool *kv;
    const int32_t *table;
    int32_t layer, head, length;
} kv_head;

/* V of the sequence's last block may hold stale slots past its end; 0 * NaN must not reach a sum, so they are cleared. */
static void copy_tail(const kv_head *at, int block, uint16_t *tail) {
    int dim = at->kv->head_dim, valid = at->length - block * BLOCK_TOKENS;
    const uint16_t *v = (const uint16_t *)kv_half(at->kv, at->layer, 1, at->table[block], at->head);
    memcpy(tail, v, sizeof(uint16_t) * BLOCK_TOKENS * (size_t)dim);
    if (valid % 2)
        for (int i = 0; i < dim; i++) tail[(valid / 2 * dim + i) * 2 + 1] = 0;
    int whole = (valid + 1) / 2;
    memset(tail + whole * 2 * dim, 0, sizeof(uint16_t) * 2 * (size_t)(BLOCK_TOKENS / 2 - whole) * (size_t)dim);
}

static void find_blocks(const kv_head *at, int tile, const uint16_t *zeros, const uint16_t **k, const uint16_t **v) {
    for (int b = 0; b < TILE_BLOCKS; b++) {
        int block = tile * TILE_BLOCKS + b;
        int exists = block * BLOCK_TOKENS < at->length;
        k[b] = exists ? (const uint16_t *)kv_half(at->kv, at->layer, 0, at->table[block], at->head) : zeros;
        v[b] = exists ? (const uint16_t *)kv_half(at->kv, at->layer, 1, at->table[block], at->head) : zeros;
    }
}

static kv_tile open_tile(const kv_head *at, int tile, int last_tile, workspace *space) {
    kv_tile out = {.start = tile * TILE_TOKENS};
    find_blocks(at, tile, space->zeros, out.k, out.v);
    if (tile < last_tile) find_blocks(at, tile + 1, space->zeros, out.ahead_k, out.ahead_v);
    int tail = (at->length - 1) / BLOCK_TOKENS;
    if (tail / TILE_BLOCKS == tile && at->length % BLOCK_TOKENS) {
        copy_tail(at, tail, space->tail);
        out.v[tail % TILE_BLOCKS] = space->tail;
    }
    return out;
}

static void attend_tile(const kernel_ops *ops, workspace *space, int groups, kv_tile *tile, float scale) {
    for (int i = 0; i < groups; i++) {
        row_group *g = &space->groups[i];
        if (g->last[g->rows - 1] < tile->start || g->first[0] >= tile->start + TILE_TOKENS) continue;
        ops->attend(g, tile, scale);
        tile->ahead_k[0] = NULL; /* once is enough */
    }
}

/* --------------------------------------------------------------------------------------------- the batch */

static int segments_fit(const segment_pool *slots, const pool *kv) { /* records of the same layers and heads */
    return slots->num_kv_heads == kv->num_kv_heads && slots->head_dim == kv->head_dim &&
           2 * slots->num_layers * kv->half_bytes == kv->block_bytes;
}

static int segments_are_valid(const batch *rows, int s, int64_t first_position) {
    const segments *closed = rows->closed;
    int64_t count = closed->counts[s];
    if (count < 0 || count > closed->max_segments || count * SEGMENT_TOKENS > first_position) return 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t slot = closed->tables[(int64_t)s * closed->max_segments + i];
        if (slot < 0 || slot >= closed->pool.num_slots || !closed->pool.payloads[slot]) return 0;
    }
    return 1;
}

int batch_is_valid(const batch *rows, const pool *kv, int64_t max_positions) {
    if (rows->closed && !segments_fit(&rows->closed->pool, kv)) return 0;
    for (int s = 0; s < rows->num_sequences; s++) {
        int64_t count = (int64_t)rows->cu_q[s + 1] - rows->cu_q[s], length = rows->kv_lengths[s];
        int64_t blocks = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS, released = 0;
        if (rows->cu_q[s] < 0 || count < 0 || length < count || blocks > rows->max_blocks) return 0;
        if (max_positions && length > max_positions) return 0;
        if (rows->closed) {
            if (!segments_are_valid(rows, s, length - count)) return 0;
            released = (int64_t)rows->closed->counts[s] * SEGMENT_BLOCKS;
        }
        for (int64_t b = 0; b < blocks; b++) {
            int32_t block = rows->block_tables[(int64_t)s * rows->max_blocks + b];
            if (block == -1 && b >= SINK_BLOCKS && b < released) continue;
            if (block < 0 || block >= kv->num_blocks) return 0;
        }
    }
    return 1;
}

int window_is_kept(const batch *rows, int window) {
    for (int s = 0; s < rows->num_sequences && rows->closed && window > 0; s++) {
        int64_t first = (int64_t)rows->kv_lengths[s] - (rows->cu_q[s + 1] - rows->cu_q[s]) - window + 1;
        int64_t begin = first > 0 ? first / TILE_TOKENS * TILE_BLOCKS : 0; /* whole tiles are read */
        for (int64_t b = begin; b * BLOCK_TOKENS < rows->kv_lengths[s]; b++)
            if (rows->block_tables[(int64_t)s * rows->max_blocks + b] < 0) return 0;
    }
    return 1;
}

int decode_batch_is_valid(const batch *rows, const pool *kv, int64_t max_positions) {
    for (int s = 0; s < rows->num_sequences; s++)
        if (rows->cu_q[s] != s || rows->cu_q[s + 1] != s + 1) return 0;
    return batch_is_valid(rows, kv, max_positions);
}

/* ------------------------------------------------------------------------------------------------ prefill */

typedef struct prefill_item {
    int32_t sequence, head, row, tokens, position;
} prefill_item;

typedef struct prefill_job {
    const context *ctx;
    const pool *kv;
    const batch *rows;
    const heads *shape;
    const uint16_t *q;
    uint16_t *out;
    const volatile int32_t *cancel;
    int32_t layer, window;
} prefill_job;

/* Items of all sequences, the longest (latest rows) of each sequence first. */
static int list_items(const batch *rows, const heads *shape, prefill_item *items) {
    int count = 0, step = prefill_tokens(shape);
    for (int s = 0; s < rows->num_sequences; s++) {
        int begin = rows->cu_q[s], end = rows->cu_q[s + 1], offset = rows->kv_lengths[s] - end;
        for (int tile = (end - begin + step - 1) / step - 1; tile >= 0; tile--) {
            int row = begin + tile * step, tokens = end - row < step ? end - row : step;
            for (int h = 0; h < shape->num_kv_heads; h++, count++)
                if (items) items[count] = (prefill_item){s, h, row, tokens, row + offset};
        }
    }
    return count;
}

static void write_rows(const prefill_job *job, const prefill_item *item, workspace *space, int groups) {
    int group = job->shape->num_q_heads / job->shape->num_kv_heads, dim = job->shape->head_dim, row = 0;
    for (int i = 0; i < groups; i++)
        for (int r = 0; r < space->groups[i].rows; r++, row++) {
            float *acc = space->groups[i].acc + r * dim, inverse = 1.0f / add_lanes(space->groups[i].sum + r * 16);
            for (int d = 0; d < dim; d++) acc[d] *= inverse;
            int64_t head = (int64_t)(item->row + row / group) * job->shape->num_q_heads + item->head * group + row % group;
            job->ctx->ops->to_bf16(acc, dim, job->out + head * dim);
        }
}

static void run_item(const prefill_job *job, const prefill_item *item, workspace *space) {
    const heads *shape = job->shape;
    int group = shape->num_q_heads / shape->num_kv_heads;
    const uint16_t *q = job->q + ((int64_t)item->row * shape->num_q_heads + item->head * group) * shape->head_dim;
    int groups = fold_rows(space, shape, q, item->tokens, item->position, job->window);
    kv_head at = {job->kv, job->rows->block_tables + (int64_t)item->sequence * job->rows->max_blocks, job->layer,
                  item->head, job->rows->kv_lengths[item->sequence]};
    int first = space->groups[0].first[0] / TILE_TOKENS, last = (item->position + item->tokens - 1) / TILE_TOKENS;
    int closed = job->window > 0 ? 0 : closed_count(job->rows, item->sequence);
    if (closed > 0) {
        tier_item tiers = {job->ctx->ops, job->kv, job->rows->closed, at.table, space->groups, space->units, job->cancel,
                           shape->scale * LOG2_E, item->sequence, job->layer, item->head, groups};
        if (!attend_segments(&tiers)) return;
        first = closed * (SEGMENT_TOKENS / TILE_TOKENS);
    }
    for (int tile = first; tile <= last; tile++) {
        if (job->cancel && *job->cancel) return;
        kv_tile open = open_tile(&at, tile, last, space);
        attend_tile(job->ctx->ops, space, groups, &open, shape->scale * LOG2_E);
    }
    write_rows(job, item, space, groups);
}

EXPORT int pk_attention(const context *ctx, const pool *kv, int layer, const batch *rows, const heads *shape, int window,
                 const uint16_t *q, uint16_t *out, const volatile int32_t *cancel) {
    if (!batch_is_valid(rows, kv, 0) || !window_is_kept(rows, window)) return STATUS_BAD_BATCH;
    int count = list_items(rows, shape, NULL);
    int64_t bytes = align64(attention_scratch_bytes(shape));
    prefill_item *items = malloc(sizeof *items * (size_t)(count + 1));
    uint8_t *scratch = aligned_alloc(64, (size_t)(bytes * ctx->threads));
    int status = items && scratch ? STATUS_OK : STATUS_NO_MEMORY;
    if (status == STATUS_OK) {
        list_items(rows, shape, items);
        prefill_job job = {ctx, kv, rows, shape, q, out, cancel, layer, window};
        atomic_int next = 0;
#pragma omp parallel num_threads(ctx->threads)
        {
            workspace space = open_workspace(scratch + bytes * omp_get_thread_num(), shape);
            for (int i; (i = atomic_fetch_add(&next, 1)) < count && !(cancel && *cancel);)
                run_item(&job, &items[i], &space);
        }
        if (cancel && *cancel) status = STATUS_CANCELLED;
    }
    free(items);
    free(scratch);
    return status;
}

/* ------------------------------------------------------------------------------------------------- decode */

/* Parts lie at fixed positions, so that a row's sum has the same order in any batch and with any number of threads. */
int decode_parts(const batch *rows) {
    int longest = 1;
    for (int s = 0; s < rows->num_sequences; s++)
        if (rows->kv_lengths[s] > longest) longest = rows->kv_lengths[s];
    return (longest + PART_TILES * TILE_TOKENS - 1) / (PART_TILES * TILE_TOKENS);
}

int64_t decode_scratch_floats(const batch *rows, const heads *shape, int parts) {
    return (int64_t)rows->num_sequences * shape->num_q_heads * parts * (shape->head_dim + 2);
}

typedef struct partial { /* views into decode_job.partial, [q head of the batch][part] */
    float *acc, *max, *sum;
} partial;

static partial partial_of(const decode_job *job, int sequence, int q_head) {
    int64_t all = (int64_t)job->rows->num_sequences * job->shape->num_q_heads * job->parts;
    int64_t index = ((int64_t)sequence * job->shape->num_q_heads + q_head) * job->parts;
    float *max = job->partial + all * job->shape->head_dim;
    return (partial){job->partial + index * job->shape->head_dim, max + index, max + all + index};
}

/* Attend the tiles from … to-1 that a sequence's row sees. */
static void run_tiles(const decode_job *job, int sequence, int head, int from, int to, workspace *space,
                      const partial_rows *out) {
    const heads *shape = job->shape;
    int group = shape->num_q_heads / shape->num_kv_heads, dim = shape->head_dim;
    int length = job->rows->kv_lengths[sequence];
    float moments[out->moment ? group * 16 : 1];
    const uint16_t *q = job->q + ((int64_t)sequence * shape->num_q_heads + head * group) * dim;
    int groups = fold_rows(space, shape, q, 1, length - 1, job->window);
    kv_head at = {job->kv, job->rows->block_tables + (int64_t)sequence * job->rows->max_blocks, job->layer, head, length};
    memset(moments, 0, sizeof moments);
    for (int i = 0, g = 0; out->moment && i < groups; g += space->groups[i++].rows) space->groups[i].moment = moments + g * 16;
    int begin = space->groups[0].first[0] / TILE_TOKENS, end = (length - 1) / TILE_TOKENS + 1;
    from = from > begin ? from : begin;
    to = to < end ? to : end;
    for (int tile = from; tile < to; tile++) {
        kv_tile open = open_tile(&at, tile, to - 1, space);
        attend_tile(job->ctx->ops, space, groups, &open, shape->scale * LOG2_E);
    }
    for (int i = 0, g = 0; i < groups; i++)
        for (int r = 0; r < space->groups[i].rows; r++, g++) {
            memcpy(out->acc + g * out->stride * dim, space->groups[i].acc + r * dim, sizeof(float) * (size_t)dim);
            out->max[g * out->stride] = space->groups[i].max[r];
            out->sum[g * out->stride] = add_lanes(space->groups[i].sum + r * 16);
            if (out->moment) out->moment[g * out->stride] = add_lanes(moments + g * 16);
        }
}

static workspace thread_workspace(const decode_job *job, int thread) {
    return open_workspace(job->scratch + align64(attention_scratch_bytes(job->shape)) * thread, job->shape);
}

void decode_tiles(const decode_job *job, int sequence, int head, int from, int to, int thread, const partial_rows *out) {
    workspace space = thread_workspace(job, thread);
    run_tiles(job, sequence, head, from, to, &space, out);
}

static void run_part(const decode_job *job, int sequence, int head, int part, workspace *space) {
    int group = job->shape->num_q_heads / job->shape->num_kv_heads;
    partial first = partial_of(job, sequence, head * group);
    partial_rows out = {first.acc + (int64_t)part * job->shape->head_dim, first.max + part, first.sum + part, NULL, job->parts};
    run_tiles(job, sequence, head, part * PART_TILES, (part + 1) * PART_TILES, space, &out);
}

/* One phase: returns when all partials are there. */
void decode_partials(const decode_job *job, phase *at, int thread) {
    workspace space = thread_workspace(job, thread);
    int per_sequence = job->shape->num_kv_heads * job->parts, count = job->rows->num_sequences * per_sequence;
    PHASE_ITEMS(at, i, count) run_part(job, i / per_sequence, i % per_sequence / job->parts, i % job->parts, &space);
    phase_wait(at, count);
}

void decode_merge(const decode_job *job, int sequence, int q_head, float *out) {
    partial parts = partial_of(job, sequence, q_head);
    const float *acc[job->parts];
    for (int p = 0; p < job->parts; p++) acc[p] = parts.acc + (int64_t)p * job->shape->head_dim;
    job->ctx->ops->merge(job->parts, acc, parts.max, parts.sum, job->shape->head_dim, out);
}

/* Rows of all sequences merged and rounded; statistics once a sequence's heads are there. */
static void merge_tiers(const decode_job *job, phase *at, uint16_t *out) {
    int heads_of_row = job->shape->num_q_heads, dim = job->shape->head_dim;
    float merged[dim];
    PHASE_ITEMS(at, s, job->rows->num_sequences) {
        for (int h = 0; h < heads_of_row; h++) {
            tier_merge(job, s, h, merged);
            job->ctx->ops->to_bf16(merged, dim, out + ((int64_t)s * heads_of_row + h) * dim);
        }
        tier_stats(job, s);
    }
}

static void merge_parts(const decode_job *job, phase *at, uint16_t *out) {
    int heads_of_row = job->shape->num_q_heads, dim = job->shape->head_dim;
    float merged[dim];
    PHASE_ITEMS(at, i, job->rows->num_sequences * heads_of_row) {
        decode_merge(job, i / heads_of_row, i % heads_of_row, merged);
        job->ctx->ops->to_bf16(merged, dim, out + (int64_t)i * dim);
    }
}

EXPORT int pk_decode_attention(const context *ctx, const pool *kv, int layer, const batch *rows, const heads *shape, int window,
                        const uint16_t *q, uint16_t *out) {
    if (!decode_batch_is_valid(rows, kv, 0) || !window_is_kept(rows, window)) return STATUS_BAD_BATCH;
    int parts = decode_parts(rows);
    int64_t bytes = align64(attention_scratch_bytes(shape));
    int64_t tiers = rows->closed ? tier_bytes(rows, shape, ctx->threads) : 0;
    int64_t floats = tiers ? 0 : align64(4 * decode_scratch_floats(rows, shape, parts));
    uint8_t *memory = aligned_alloc(64, (size_t)(floats + bytes * ctx->threads + tiers));
    if (!memory) return STATUS_NO_MEMORY;
    uint8_t *scratch = memory + floats, *tiers_at = tiers ? scratch + bytes * ctx->threads : NULL;
    decode_job job = {ctx, kv, rows, shape, layer, window, parts, q, (float *)memory, scratch, tiers_at};
    phase phases[TIER_PHASES] = {0}, merge = {0};
    if (tiers) tier_open(rows, shape, ctx->threads, tiers_at);
#pragma omp parallel num_threads(ctx->threads)
    if (tiers) {
        tier_partials(&job, phases, omp_get_thread_num());
        merge_tiers(&job, &merge, out);
    } else {
        decode_partials(&job, phases, omp_get_thread_num());
        merge_parts(&job, &merge, out);
    }
    free(memory);
    return STATUS_OK;
}
