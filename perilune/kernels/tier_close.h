/* Closing one record: what the driver (tier_close.c) hands to the code of a CPU level (tier_record.c, compiled for each). */
#ifndef PERILUNE_TIER_CLOSE_H
#define PERILUNE_TIER_CLOSE_H

#include "kernels.h"

#define CLUSTER_ROUNDS 4 /* tiers.py's */

typedef struct close_item { /* one layer and KV head of a segment */
    const pool *source;
    const int32_t *blocks; /* [SEGMENT_BLOCKS] in prompt order; the first `skip` stay out */
    const record_layout *at;
    uint8_t *summary, *payload, *scratch;
    int32_t layer, head, skip;
} close_item;

/* Every level writes the same bytes: what decides is exact, and no multiplication is fused with an addition. */
typedef void close_record(const close_item *item);
close_record close_record_portable;
#if defined(__x86_64__)
close_record close_record_avx2, close_record_avx512;
#elif defined(__aarch64__)
close_record close_record_neon;
#endif

#endif
