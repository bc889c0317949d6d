/* One record of a closed segment: cluster its keys, sort them, quantise (tiers.py lists the steps, 1 to 7).
 *
 * Plain C that the compiler vectorises for each CPU level, except for the assignment of tokens to clusters, which is nearly
 * all of the work. Compiled without fused multiply-add, so that every level rounds alike; the loops that add floating-point
 * numbers up keep explicit lanes, so that their order is everywhere the same.
 */
#include <math.h>
#include <string.h>

#include "tier_close.h"

#ifndef CLOSE_RECORD
#define CLOSE_RECORD close_record_portable
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define MAX_CLUSTERS (SEGMENT_TOKENS / UNIT_TOKENS)
#define GROUP_UNITS (SEGMENT_UNITS / SEGMENT_GROUPS)
#define QUAD_UNITS (SEGMENT_UNITS / SEGMENT_QUADS)

typedef struct work { /* n tokens, C = n / 16 clusters */
    uint16_t *keys;     /* bf16 [n][D] */
    int8_t *points;     /* [n][D] */
    int8_t *runs;       /* the same as [n / 16][D / 4][16][4] */
    int8_t *centroids;  /* [C][D] */
    uint8_t *raised;    /* the same plus 128 */
    float *wide;        /* the same in fp32 */
    int32_t *sums;      /* [C][D] */
    float *unit;        /* [D][16]: keys or values of a unit */
    int32_t *best, *before; /* [n]: cluster, the last round's */
    float *inverse;     /* [n] */
    uint16_t *order;    /* [n] */
    int32_t tokens, dim, clusters;
} work;

static uint8_t *take(uint8_t **memory, int64_t bytes) {
    uint8_t *at = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return at;
}

static void open_work(work *w, uint8_t *memory, int tokens, int dim) {
    int64_t n = SEGMENT_TOKENS, c = MAX_CLUSTERS;
    w->keys = (uint16_t *)take(&memory, 2 * n * dim);
    w->points = (int8_t *)take(&memory, n * dim);
    w->runs = (int8_t *)take(&memory, n * dim);
    w->centroids = (int8_t *)take(&memory, c * dim);
    w->raised = take(&memory, c * dim);
    w->wide = (float *)take(&memory, 4 * c * dim);
    w->sums = (int32_t *)take(&memory, 4 * c * dim);
    w->unit = (float *)take(&memory, 4 * UNIT_TOKENS * (int64_t)dim);
    w->best = (int32_t *)take(&memory, 4 * n);
    w->before = (int32_t *)take(&memory, 4 * n);
    w->inverse = (float *)take(&memory, 4 * n);
    w->order = (uint16_t *)take(&memory, 2 * n);
    w->tokens = tokens;
    w->dim = dim;
    w->clusters = tokens / UNIT_TOKENS;
}

/* ----------------------------------------------------------------------------------------------- numbers */

INLINE float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; } /* |x| < 2^22 */

INLINE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

static float largest(const float *x, int n) { /* max |x|; n is a multiple of 16 */
    float lanes[LANES] = {0}, top = 0.0f;
    for (int i = 0; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float size = fabsf(x[i + j]);
            lanes[j] = size > lanes[j] ? size : lanes[j];
        }
    for (int j = 0; j < LANES; j++) top = lanes[j] > top ? lanes[j] : top;
    return top;
}

INLINE float reciprocal(uint16_t half) {
    float scale = half_to_float(half);
    return scale > 0.0f ? 1.0f / scale : 0.0f;
}

static void rotate(float *x, int dim, int width) { /* [dim][width], along dim */
    int run = dim & -dim;
    float norm = (float)(1.0 / sqrt((double)run));
    for (int start = 0; start < dim; start += run)
        for (int stride = 1; stride < run; stride *= 2)
            for (int i = start; i < start + run; i += 2 * stride) {
                float *left = x + (int64_t)i * width, *right = left + (int64_t)stride * width;
                for (int j = 0; j < stride * width; j++) {
                    float sum = left[j] + right[j], difference = left[j] - right[j];
                    left[j] = sum;
                    right[j] = difference;
                }
            }
    for (int i = 0; i < dim * width; i++) x[i] *= norm;
}

/* ------------------------------------------------------------------------------------- keys as directions */

static void gather_keys(const close_item *item, work *w) {
    int pairs = w->dim / 2;
    for (int b = item->skip, t = 0; b < SEGMENT_BLOCKS; b++, t += BLOCK_TOKENS) {
        const uint8_t *block = kv_half(item->source, item->layer, 0, item->blocks[b], item->head);
        for (int pair = 0; pair < pairs; pair++)
            for (int i = 0; i < BLOCK_TOKENS; i++)
                memcpy(w->keys + ((int64_t)(t + i) * pairs + pair) * 2, block + (pair * BLOCK_TOKENS + i) * 4, 4);
    }
}

static void mean_key(const work *w, float *mean) {
    double sums[w->dim];
    memset(sums, 0, sizeof sums);
    for (int t = 0; t < w->tokens; t++)
        for (int d = 0; d < w->dim; d++) sums[d] += (double)bf16_to_float(w->keys[(int64_t)t * w->dim + d]);
    for (int d = 0; d < w->dim; d++) mean[d] = (float)(sums[d] / w->tokens);
}

static void measure(work *w, const float *mean, float *peak) { /* inverse length of each centred key, and the peak */
    float tops[LANES] = {0};
    for (int t = 0; t < w->tokens; t++) {
        const uint16_t *key = w->keys + (int64_t)t * w->dim;
        double squares[LANES] = {0}, total = 0.0;
        float sizes[LANES] = {0};
        for (int d = 0; d < w->dim; d += LANES)
            for (int j = 0; j < LANES; j++) {
                float x = bf16_to_float(key[d + j]) - mean[d + j];
                squares[j] += (double)x * (double)x;
                x = fabsf(x);
                sizes[j] = x > sizes[j] ? x : sizes[j];
            }
        for (int j = 0; j < LANES; j++) total += squares[j];
        w->inverse[t] = total > 0.0 ? (float)(1.0 / sqrt(total)) : 0.0f;
        for (int j = 0; j < LANES; j++) { /* rounding keeps order: max |x * w| = max |x| * w */
            float y = sizes[j] * w->inverse[t];
            tops[j] = y > tops[j] ? y : tops[j];
        }
    }
    *peak = largest(tops, LANES);
}

static void make_points(work *w) {
    float mean[w->dim], peak;
    mean_key(w, mean);
    measure(w, mean, &peak);
    float factor = peak > 0.0f ? 127.0f / peak : 0.0f;
    for (int t = 0; t < w->tokens; t++) {
        const uint16_t *key = w->keys + (int64_t)t * w->dim;
        int8_t *point = w->points + (int64_t)t * w->dim;
        for (int d = 0; d < w->dim; d++) {
            float y = (bf16_to_float(key[d]) - mean[d]) * w->inverse[t];
            point[d] = (int8_t)nearest(y * factor);
        }
        for (int d = 0; d < w->dim; d += 4)
            memcpy(w->runs + ((int64_t)t / LANES * w->dim + d) * LANES + t % LANES * 4, point + d, 4);
    }
}

#include "tier_assign.h"

/* ------------------------------------------------------------------------------------------- clustering */

static int move_tokens(work *w, int first_time) { /* keep the clusters' sums; returns how many tokens moved */
    int moved = 0;
    for (int t = 0; t < w->tokens; t++) {
        if (!first_time && w->best[t] == w->before[t]) continue;
        const int8_t *point = w->points + (int64_t)t * w->dim;
        int32_t *to = w->sums + (int64_t)w->best[t] * w->dim;
        for (int d = 0; d < w->dim; d++) to[d] += point[d];
        if (!first_time) {
            int32_t *from = w->sums + (int64_t)w->before[t] * w->dim;
            for (int d = 0; d < w->dim; d++) from[d] -= point[d];
        }
        w->before[t] = w->best[t];
        moved++;
    }
    return moved;
}

static void move_centroids(work *w) {
    double inverse[MAX_CLUSTERS], peak = 0.0;
    for (int c = 0; c < w->clusters; c++) {
        const int32_t *sum = w->sums + (int64_t)c * w->dim;
        int64_t square = 0;
        int32_t top = 0;
        for (int d = 0; d < w->dim; d++) {
            int32_t size = sum[d] < 0 ? -sum[d] : sum[d];
            top = size > top ? size : top;
            square += (int64_t)sum[d] * sum[d];
        }
        inverse[c] = square > 0 ? 1.0 / sqrt((double)square) : 0.0;
        peak = top * inverse[c] > peak ? top * inverse[c] : peak;
    }
    double factor = peak > 0.0 ? 127.0 / peak : 0.0;
    for (int c = 0; c < w->clusters; c++) {
        const int32_t *sum = w->sums + (int64_t)c * w->dim;
        int8_t *centroid = w->centroids + (int64_t)c * w->dim;
        if (inverse[c] == 0.0) continue;
        for (int d = 0; d < w->dim; d++) {
            double y = sum[d] * inverse[c] * factor;
            centroid[d] = (int8_t)(int32_t)((y + 6755399441055744.0) - 6755399441055744.0); /* half to even */
        }
    }
}

static void find_clusters(work *w) {
    for (int c = 0; c < w->clusters; c++)
        memcpy(w->centroids + (int64_t)c * w->dim, w->points + (int64_t)c * UNIT_TOKENS * w->dim, (size_t)w->dim);
    memset(w->sums, 0, sizeof(int32_t) * (size_t)w->clusters * (size_t)w->dim);
    prepare_centroids(w);
    assign(w);
    for (int round = 0; round < CLUSTER_ROUNDS; round++) {
        if (!move_tokens(w, round == 0)) return; /* nothing would change any more */
        move_centroids(w);
        prepare_centroids(w);
        assign(w);
    }
}

static int likeness(const int8_t *a, const int8_t *b, int dim) {
    int sum = 0;
    for (int d = 0; d < dim; d++) sum += a[d] * b[d];
    return sum;
}

static void chain_clusters(const work *w, const int *sizes, int *chain) {
    uint8_t left[MAX_CLUSTERS];
    int count = 0, current = 0;
    for (int c = 0; c < w->clusters; c++) left[c] = sizes[c] > 0;
    while (current < w->clusters && !left[current]) current++;
    while (current >= 0) {
        int next = -1, top = 0;
        chain[count++] = current;
        left[current] = 0;
        for (int c = 0; c < w->clusters; c++) {
            if (!left[c]) continue;
            int score = likeness(w->centroids + current * w->dim, w->centroids + c * w->dim, w->dim);
            if (next < 0 || score > top) {
                next = c;
                top = score;
            }
        }
        current = next;
    }
    while (count < w->clusters) chain[count++] = -1;
}

static void sort_tokens(work *w) {
    int sizes[MAX_CLUSTERS] = {0}, chain[MAX_CLUSTERS], start[MAX_CLUSTERS], next = 0;
    for (int t = 0; t < w->tokens; t++) sizes[w->best[t]]++;
    chain_clusters(w, sizes, chain);
    for (int i = 0; i < w->clusters && chain[i] >= 0; next += sizes[chain[i++]]) start[chain[i]] = next;
    for (int t = 0; t < w->tokens; t++) w->order[start[w->best[t]]++] = (uint16_t)t;
}

/* ------------------------------------------------------------------------------------------------- codec */

static uint16_t quantise(const float *x, int dim, int8_t *out) { /* s8 with a scale, which it returns */
    uint16_t scale = float_to_half(largest(x, dim) / 127.0f);
    float inverse = reciprocal(scale);
    for (int d = 0; d < dim; d++) out[d] = (int8_t)nearest(clamp(x[d] * inverse, -127.0f, 127.0f));
    return scale;
}

static const uint32_t *value_words(const close_item *item, int token) { /* [D] pairs; the token is one of each */
    int block = item->skip + token / BLOCK_TOKENS;
    const uint8_t *v = kv_half(item->source, item->layer, 1, item->blocks[block], item->head);
    return (const uint32_t *)v + token % BLOCK_TOKENS / 2 * item->source->head_dim;
}

INLINE float half_of_pair(uint32_t word, int odd) {
    union { uint32_t u; float f; } bits = {odd ? word & 0xffff0000u : word << 16};
    return bits.f;
}

/* Keys of 32 tokens of the final order: one scale and zero a channel. */
static void write_keys(const close_item *item, const work *w, int first) {
    int dim = w->dim, pair = first / (2 * UNIT_TOKENS), count = 2 * UNIT_TOKENS;
    uint16_t *scales = (uint16_t *)(item->payload + item->at->k_scale) + pair * dim;
    uint16_t *zeros = (uint16_t *)(item->payload + item->at->k_zero) + pair * dim;
    float low[dim], high[dim];
    uint8_t codes[dim];
    for (int i = 0; i < count; i++) {
        const uint16_t *key = w->keys + (int64_t)w->order[first + i] * dim;
        for (int d = 0; d < dim; d++) {
            float x = bf16_to_float(key[d]);
            low[d] = i == 0 || x < low[d] ? x : low[d];
            high[d] = i == 0 || x > high[d] ? x : high[d];
        }
    }
    for (int d = 0; d < dim; d++) {
        scales[d] = float_to_half((high[d] - low[d]) / 255.0f);
        zeros[d] = float_to_half(low[d]);
        high[d] = reciprocal(scales[d]);
        low[d] = half_to_float(zeros[d]);
    }
    for (int i = 0; i < count; i++) {
        const uint16_t *key = w->keys + (int64_t)w->order[first + i] * dim;
        int unit = (first + i) / UNIT_TOKENS, t = (first + i) % UNIT_TOKENS;
        uint8_t *out = item->payload + item->at->k + (int64_t)unit * UNIT_TOKENS * dim + 4 * t;
        for (int d = 0; d < dim; d++)
            codes[d] = (uint8_t)nearest(clamp((bf16_to_float(key[d]) - low[d]) * high[d], 0.0f, 255.0f));
        for (int d = 0; d < dim; d += 4) memcpy(out + d * UNIT_TOKENS, codes + d, 4);
    }
}

static void write_values(const close_item *item, work *w, int unit, double *sums) {
    int dim = w->dim;
    float tops[UNIT_TOKENS] = {0}, inverse[UNIT_TOKENS];
    uint16_t *scales = (uint16_t *)(item->payload + item->at->v_scale) + unit * UNIT_TOKENS;
    int8_t *out = (int8_t *)(item->payload + item->at->v) + (int64_t)unit * UNIT_TOKENS * dim;
    for (int t = 0; t < UNIT_TOKENS; t++) {
        int token = w->order[unit * UNIT_TOKENS + t];
        const uint32_t *words = value_words(item, token);
        for (int d = 0; d < dim; d++) {
            float x = half_of_pair(words[d], token % 2);
            sums[d] += (double)x;
            w->unit[d * UNIT_TOKENS + t] = x;
        }
    }
    rotate(w->unit, dim, UNIT_TOKENS);
    for (int d = 0; d < dim; d++)
        for (int t = 0; t < UNIT_TOKENS; t++) {
            float size = fabsf(w->unit[d * UNIT_TOKENS + t]);
            tops[t] = size > tops[t] ? size : tops[t];
        }
    for (int t = 0; t < UNIT_TOKENS; t++) {
        scales[t] = float_to_half(tops[t] / 127.0f);
        inverse[t] = reciprocal(scales[t]);
    }
    for (int d = 0; d < dim; d++) {
        int8_t codes[UNIT_TOKENS];
        for (int t = 0; t < UNIT_TOKENS; t++)
            codes[t] = (int8_t)nearest(clamp(w->unit[d * UNIT_TOKENS + t] * inverse[t], -127.0f, 127.0f));
        for (int quad = 0; quad < UNIT_TOKENS / 4; quad++) memcpy(out + (quad * dim + d) * 4, codes + 4 * quad, 4);
    }
}

/* The unit's mean key, rotated, as `mean` gets it back from its codes. */
static void write_mean(const close_item *item, const work *w, int unit, float *mean) {
    int dim = w->dim, group = unit / GROUP_UNITS, lane = unit % GROUP_UNITS;
    double sums[dim];
    memset(sums, 0, sizeof sums);
    for (int t = 0; t < UNIT_TOKENS; t++) {
        const uint16_t *key = w->keys + (int64_t)w->order[unit * UNIT_TOKENS + t] * dim;
        for (int d = 0; d < dim; d++) sums[d] += (double)bf16_to_float(key[d]);
    }
    for (int d = 0; d < dim; d++) mean[d] = (float)(sums[d] / UNIT_TOKENS);
    rotate(mean, dim, 1);
    uint8_t *out = item->summary + item->at->mean + (int64_t)group * GROUP_UNITS * dim / 2;
    uint16_t half = float_to_half(largest(mean, dim) / 7.5f);
    float scale = half_to_float(half), inverse = reciprocal(half);
    for (int d = 0; d < dim; d++) {
        float code = round_even(clamp(mean[d] * inverse + 7.5f, 0.0f, 15.0f));
        int high = d >= dim / 2, at = high ? d - dim / 2 : d;
        out[at / 4 * 4 * GROUP_UNITS + 4 * lane + at % 4] |= (uint8_t)((uint8_t)nearest(code) << 4 * high);
        mean[d] = (code - 7.5f) * scale;
    }
    ((uint16_t *)(item->summary + item->at->mean_scale))[unit] = half;
}

/* One bit a channel and the mean size of what each key differs by from `mean`. */
static void write_sketch(const close_item *item, work *w, int unit, const float *mean) {
    int dim = w->dim, group = unit / GROUP_UNITS, lane = unit % GROUP_UNITS;
    double sums[UNIT_TOKENS] = {0};
    float sizes[UNIT_TOKENS];
    for (int t = 0; t < UNIT_TOKENS; t++) {
        const uint16_t *key = w->keys + (int64_t)w->order[unit * UNIT_TOKENS + t] * dim;
        for (int d = 0; d < dim; d++) w->unit[d * UNIT_TOKENS + t] = bf16_to_float(key[d]);
    }
    rotate(w->unit, dim, UNIT_TOKENS);
    uint8_t *signs = item->summary + item->at->signs + (int64_t)group * GROUP_UNITS * UNIT_TOKENS * dim / 8 + lane;
    for (int d = 0; d < dim; d++) {
        int high = d >= dim / 2, word = (high ? d - dim / 2 : d) / 4;
        for (int t = 0; t < UNIT_TOKENS; t++) {
            float rest = w->unit[d * UNIT_TOKENS + t] - mean[d];
            sums[t] += (double)fabsf(rest);
            signs[((t / 4 * dim / 8 + word) * 4 + t % 4) * GROUP_UNITS] |= (uint8_t)((rest >= 0.0f) << (4 * high + d % 4));
        }
    }
    for (int t = 0; t < UNIT_TOKENS; t++) sizes[t] = (float)(sums[t] / dim);
    uint16_t scale = float_to_half(largest(sizes, UNIT_TOKENS) / 16.0f);
    float inverse = reciprocal(scale);
    ((uint16_t *)(item->summary + item->at->spread_scale))[unit] = scale;
    uint8_t *spread = item->summary + item->at->spread + group * UNIT_TOKENS * GROUP_UNITS / 2 + lane;
    for (int t = 0; t < UNIT_TOKENS; t++) {
        int code = (uint8_t)nearest(clamp(round_even(sizes[t] * inverse) - 1.0f, 0.0f, 15.0f));
        spread[(t / 4 * 2 + t % 2) * GROUP_UNITS] |= (uint8_t)(code << t % 4 / 2 * 4);
    }
}

static void write_quad(const close_item *item, int dim, int quad, const double *sums) {
    float mean[dim];
    for (int d = 0; d < dim; d++) mean[d] = (float)(sums[d] / (QUAD_UNITS * UNIT_TOKENS));
    rotate(mean, dim, 1);
    int8_t *out = (int8_t *)(item->summary + item->at->quad_v) + (int64_t)quad * dim;
    ((uint16_t *)(item->summary + item->at->quad_v_scale))[quad] = quantise(mean, dim, out);
}

static void clear_rest(const close_item *item, int dim, int units) { /* absent units and padding of the payload */
    const record_layout *at = item->at;
    int pairs = units / 2, tokens = units * UNIT_TOKENS;
    int32_t used[][2] = {{at->k + tokens * dim, at->k_scale},
                         {at->k_scale + 2 * pairs * dim, at->k_zero},
                         {at->k_zero + 2 * pairs * dim, at->v},
                         {at->v + tokens * dim, at->v_scale},
                         {at->v_scale + 2 * tokens, at->payload_bytes}};
    for (int i = 0; i < 5; i++) memset(item->payload + used[i][0], 0, (size_t)(used[i][1] - used[i][0]));
}

static void write_record(const close_item *item, work *w) {
    int dim = w->dim, units = w->tokens / UNIT_TOKENS;
    uint16_t count = (uint16_t)units;
    double values[dim];
    float mean[dim];
    memset(item->summary, 0, (size_t)item->at->summary_bytes);
    memcpy(item->summary + item->at->units, &count, 2);
    clear_rest(item, dim, units);
    for (int unit = 0; unit < units; unit += 2) write_keys(item, w, unit * UNIT_TOKENS);
    for (int unit = 0; unit < units; unit++) {
        if (unit % QUAD_UNITS == 0) memset(values, 0, sizeof values);
        write_mean(item, w, unit, mean);
        write_sketch(item, w, unit, mean);
        write_values(item, w, unit, values);
        if (unit % QUAD_UNITS == QUAD_UNITS - 1) write_quad(item, dim, unit / QUAD_UNITS, values);
    }
}

void CLOSE_RECORD(const close_item *item) {
    work w;
    open_work(&w, item->scratch, SEGMENT_TOKENS - item->skip * BLOCK_TOKENS, item->source->head_dim);
    gather_keys(item, &w);
    make_points(&w);
    find_clusters(&w);
    sort_tokens(&w);
    write_record(item, &w);
}
