/* What prefill rows read of closed segments: every unit and the sinks. The bf16 blocks after them are
 * attention.c's.
 *
 * Units are taken in the order of the prompt's segments, four to a tile, as if all segments were one row of units. A tile
 * is turned into bf16 in a thread's own memory and attended as any other. V stays rotated: while the units are attended,
 * a row's sum is one of rotated values, and it is rotated back once, before the tokens whose V is not rotated follow.
 * The order depends on the number of segments alone, so a row's arithmetic doesn't depend on the rows beside it.
 */
#include <math.h>
#include <string.h>

#include "kernels.h"

#define TILE_UNITS (TILE_TOKENS / UNIT_TOKENS)

typedef struct record { /* one (layer, KV head) of one segment */
    const uint8_t *payload;
    int32_t units;
} record;

static record open_record(const tier_item *item, int index) {
    const segment_pool *pool = &item->closed->pool;
    int slot = item->closed->tables[(int64_t)item->sequence * item->closed->max_segments + index];
    uint16_t units;
    memcpy(&units, record_summary(pool, slot, item->layer, item->head) + pool->at.units, 2);
    return (record){record_payload(pool, slot, item->layer, item->head), units};
}

static int cancelled(const tier_item *item) { return item->cancel && *item->cancel; }

/* Attend a tile whose first `tokens` slots every row sees; the others hold finite numbers. */
static void attend_seen(const tier_item *item, const kv_tile *tile, int tokens) {
    for (int i = 0; i < item->groups; i++) {
        row_group *group = &item->rows[i];
        int32_t last[GROUP_ROWS];
        memcpy(last, group->last, sizeof last);
        for (int r = 0; r < group->rows; r++) group->last[r] = tokens - 1;
        item->ops->attend(group, tile, item->scale);
        memcpy(group->last, last, sizeof last);
    }
}

static kv_tile scratch_tile(const tier_item *item) { /* K of both blocks, then V of both */
    int64_t block = (int64_t)item->kv->head_dim * BLOCK_TOKENS;
    kv_tile tile = {.start = 0};
    for (int b = 0; b < TILE_BLOCKS; b++) {
        tile.k[b] = item->scratch + b * block;
        tile.v[b] = item->scratch + (TILE_BLOCKS + b) * block;
    }
    return tile;
}

/* Where a run of 16 tokens of the scratch tile starts. */
static uint16_t *slot_k(const tier_item *item, int run) {
    return item->scratch + (int64_t)(run / 2) * item->kv->head_dim * BLOCK_TOKENS + run % 2 * 2 * UNIT_TOKENS;
}

static uint16_t *slot_v(const tier_item *item, int run) {
    return item->scratch + ((int64_t)TILE_TOKENS + run * UNIT_TOKENS) * item->kv->head_dim;
}

static void put_unit(const tier_item *item, const record *from, int unit, int run) {
    const record_layout *at = &item->closed->pool.at;
    int dim = item->kv->head_dim;
    unit_codes codes = {
        .k = from->payload + at->k + (int64_t)unit * UNIT_TOKENS * dim,
        .k_scale = (const uint16_t *)(from->payload + at->k_scale) + unit / 2 * dim,
        .k_zero = (const uint16_t *)(from->payload + at->k_zero) + unit / 2 * dim,
        .v = (const int8_t *)(from->payload + at->v) + (int64_t)unit * UNIT_TOKENS * dim,
        .v_scale = (const uint16_t *)(from->payload + at->v_scale) + unit * UNIT_TOKENS,
    };
    item->ops->open_unit(&codes, dim, slot_k(item, run), slot_v(item, run));
}

/* ------------------------------------------------------------------------------------------------- passes */

static void clear_tile(const tier_item *item) {
    memset(item->scratch, 0, sizeof(uint16_t) * 2 * TILE_TOKENS * (size_t)item->kv->head_dim);
}

static int attend_units(const tier_item *item, int count) {
    kv_tile tile = scratch_tile(item);
    int filled = 0;
    for (int s = 0; s < count; s++) {
        record from = open_record(item, s);
        for (int unit = 0; unit < from.units; unit++) {
            if (filled == 0) {
                if (cancelled(item)) return 0;
                if (s == count - 1 && from.units - unit < TILE_UNITS) clear_tile(item); /* the last one may not fill up */
            }
            put_unit(item, &from, unit, filled++);
            if (filled == TILE_UNITS) {
                attend_seen(item, &tile, TILE_TOKENS);
                filled = 0;
            }
        }
    }
    if (filled) attend_seen(item, &tile, filled * UNIT_TOKENS);
    return 1;
}

/* Walsh-Hadamard in runs of the largest power of two that divides `dim`; its own inverse. */
void rotate_values(float *x, int dim) {
    int run = dim & -dim;
    float norm = 1.0f / sqrtf((float)run);
    for (int start = 0; start < dim; start += run) {
        float *at = x + start;
        for (int stride = 1; stride < run; stride *= 2)
            for (int i = 0; i < run; i += 2 * stride)
                for (int j = i; j < i + stride; j++) {
                    float left = at[j], right = at[j + stride];
                    at[j] = left + right;
                    at[j + stride] = left - right;
                }
        for (int i = 0; i < run; i++) at[i] *= norm;
    }
}

int attend_segments(const tier_item *item) {
    int count = item->closed->counts[item->sequence], dim = item->kv->head_dim;
    if (!attend_units(item, count)) return 0;
    for (int i = 0; i < item->groups; i++)
        for (int r = 0; r < item->rows[i].rows; r++) rotate_values(item->rows[i].acc + (int64_t)r * dim, dim);
    kv_tile sinks = {.start = 0};
    for (int b = 0; b < TILE_BLOCKS; b++) {
        sinks.k[b] = (const uint16_t *)kv_half(item->kv, item->layer, 0, item->blocks[b], item->head);
        sinks.v[b] = (const uint16_t *)kv_half(item->kv, item->layer, 1, item->blocks[b], item->head);
    }
    attend_seen(item, &sinks, TILE_TOKENS);
    return 1;
}
