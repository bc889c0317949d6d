/* Linear and attention over GCC's vector types. Compiled twice: as it stands (4 lanes: SSE2, NEON, anything), and with
 * AVX2, FMA and F16C enabled (8 lanes, -DISA_OPS=ops_avx2). Activations and probabilities stay fp32. On Arm also with bf16
 * and dot products (-DISA_OPS=ops_neon), where attention's loops are isa_neon.h's.
 */
#include "rowwise.h"
#include "tier.h"
#include "tier_close.h"

#ifndef ISA_OPS
#define ISA_OPS ops_portable
#define ISA_NAME "portable C"
#define TIER_OPS tier_ops_portable
#define ISA_CLOSE close_record_portable
#endif

#if defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define TILE_VECTORS (ROW_TILE / WIDTH)
#define TOKEN_VECTORS (BLOCK_TOKENS / WIDTH)
#define LINEAR_ROWS 4 /* activation rows that share registers */
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vu load_words(const void *p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf all(float x) { return x - (vf){0}; }

INLINE vf even_bf16(vu words) { return (vf)(words << 16); } /* the first of each pair */

INLINE vf odd_bf16(vu words) { return (vf)(words & 0xffff0000u); }

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* ------------------------------------------------------------------------------------------------ linear */

typedef struct prepared_block {
    float x[BLOCK_TOKENS];
    float sum;
} prepared_block;

static void prepare(int kind, const float *x, int cols, int row, int rows, void *prepared) {
    (void)rows;
    if (kind == KIND_BF16) {
        memcpy((float *)prepared + (int64_t)row * cols, x, sizeof(float) * (size_t)cols);
        return;
    }
    int blocks = cols / BLOCK_TOKENS;
    prepared_block *block = (prepared_block *)prepared + (int64_t)row * blocks;
    for (int b = 0; b < blocks; b++, block++) {
        block->sum = 0.0f;
        for (int i = 0; i < BLOCK_TOKENS; i++) {
            block->x[i] = x[b * BLOCK_TOKENS + i];
            block->sum += block->x[i];
        }
    }
}

/* dot[t] += x[t][column] * quants of 16 rows, for the `count` columns whose bits lie at shift, shift + step, … */
INLINE void add_columns(const int rows, const vu *words, int shift, int step, uint32_t bits, int column, int count,
                        const prepared_block *const *x, vf dot[][TILE_VECTORS]) {
    for (int j = 0; j < count; j++, shift += step)
        for (int i = 0; i < TILE_VECTORS; i++) {
            vf quants = __builtin_convertvector((vi)((words[i] >> shift) & bits), vf);
            for (int t = 0; t < rows; t++) dot[t][i] += x[t]->x[column + j] * quants;
        }
}

INLINE void tile_quantised(const int rows, const int q4, const uint8_t *bytes, const prepared_block *first, int blocks,
                           vf acc[][TILE_VECTORS]) {
    for (int b = 0; b < blocks; b++, bytes += q4 ? 320 : 544) {
        const prepared_block *x[LINEAR_ROWS];
        vf dot[LINEAR_ROWS][TILE_VECTORS] = {{{0}}};
        float d[ROW_TILE], m[ROW_TILE];
        for (int t = 0; t < rows; t++) x[t] = first + (int64_t)t * blocks + b;
        for (int r = 0; r < ROW_TILE; r++) {
            uint16_t halves[2];
            memcpy(halves, bytes + 2 * r, 2);
            if (q4) memcpy(halves + 1, bytes + 32 + 2 * r, 2);
            d[r] = half_to_float(halves[0]);
            m[r] = q4 ? half_to_float(halves[1]) : -128.0f * d[r];
        }
        for (int c = 0; c < (q4 ? 4 : 8); c++) {
            vu words[TILE_VECTORS];
            for (int i = 0; i < TILE_VECTORS; i++) words[i] = load_words(bytes + (q4 ? 64 : 32) + 64 * c + 4 * WIDTH * i);
            if (q4) {
                add_columns(rows, words, 0, 8, 15, 8 * c, 4, x, dot);
                add_columns(rows, words, 4, 8, 15, 8 * c + 4, 4, x, dot);
            } else {
                add_columns(rows, words, 0, 8, 255, 4 * c, 4, x, dot);
            }
        }
        for (int t = 0; t < rows; t++)
            for (int i = 0; i < TILE_VECTORS; i++)
                acc[t][i] += load(d + WIDTH * i) * dot[t][i] + load(m + WIDTH * i) * x[t]->sum;
    }
}

INLINE void tile_bf16(const int rows, const uint8_t *bytes, const float *x, int cols, vf acc[][TILE_VECTORS]) {
    for (int k = 0; k < cols; k += 2, bytes += 64)
        for (int i = 0; i < TILE_VECTORS; i++) {
            vu words = load_words(bytes + 4 * WIDTH * i);
            for (int t = 0; t < rows; t++) {
                const float *row = x + (int64_t)t * cols + k;
                acc[t][i] += row[0] * even_bf16(words) + row[1] * odd_bf16(words);
            }
        }
}

INLINE void tile_any(const int rows, const packed *weight, int tile, const void *prepared, int start,
                     vf acc[][TILE_VECTORS]) {
    int cols = weight->cols, blocks = cols / BLOCK_TOKENS;
    const prepared_block *x = (const prepared_block *)prepared + (int64_t)start * blocks;
    if (weight->kind == KIND_Q4)
        tile_quantised(rows, 1, weight->data + (int64_t)tile * blocks * 320, x, blocks, acc);
    else if (weight->kind == KIND_INT8)
        tile_quantised(rows, 0, weight->data + (int64_t)tile * blocks * 544, x, blocks, acc);
    else
        tile_bf16(rows, weight->data + (int64_t)tile * cols * 32, (const float *)prepared + (int64_t)start * cols, cols,
                  acc);
}

static void linear(const packed *weight, int begin, int end, const void *prepared, int rows, const float *bias,
                   float *out, int64_t stride) {
    for (int tile = begin; tile < end; tile++) {
        int base = tile * ROW_TILE, count = weight->rows - base < ROW_TILE ? weight->rows - base : ROW_TILE;
        for (int start = 0; start < rows; start += LINEAR_ROWS) {
            int chunk = rows - start < LINEAR_ROWS ? rows - start : LINEAR_ROWS;
            vf acc[LINEAR_ROWS][TILE_VECTORS] = {{{0}}};
            switch (chunk) {
            case 1: tile_any(1, weight, tile, prepared, start, acc); break;
            case 2: tile_any(2, weight, tile, prepared, start, acc); break;
            case 3: tile_any(3, weight, tile, prepared, start, acc); break;
            default: tile_any(4, weight, tile, prepared, start, acc); break;
            }
            for (int t = 0; t < chunk; t++) {
                float sums[ROW_TILE];
                memcpy(sums, acc[t], sizeof sums);
                for (int r = 0; r < count; r++)
                    out[(start + t) * stride + base + r] = sums[r] + (bias ? bias[base + r] : 0.0f);
            }
        }
    }
}

/* --------------------------------------------------------------------------------------------- attention */

typedef float tile_scores[TILE_TOKENS];

INLINE vf exp2_lanes(vf x) { /* as exp2_fast */
    x = choose(x < -126.0f, all(-126.0f), x);
    vf shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);
    vf p = all(0x1.5bba14p-10f);
    p = p * f + 0x1.3cea8ap-7f;
    p = p * f + 0x1.c6b752p-5f;
    p = p * f + 0x1.ebf9bcp-3f;
    p = p * f + 0x1.62e42ap-1f;
    p = p * f + 1.0f;
    return p * (vf)(((vi)shifted - 0x4b400000 + 127) << 23);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "isa_neon.h"
#else

/* Scores of `rows` rows over one block: pairs along head_dim, 32 tokens wide. `stride` is the group's rows. */
INLINE void score_block(const int rows, const uint32_t *q, int stride, const uint16_t *k, int pairs, tile_scores *scores,
                        int offset) {
    vf acc[2][TOKEN_VECTORS] = {{{0}}};
    for (int p = 0; p < pairs; p++, q += stride, k += 2 * BLOCK_TOKENS)
        for (int i = 0; i < TOKEN_VECTORS; i++) {
            vu words = load_words(k + 2 * WIDTH * i);
            vf even = even_bf16(words), odd = odd_bf16(words);
            for (int r = 0; r < rows; r++)
                acc[r][i] += bf16_to_float((uint16_t)q[r]) * even + bf16_to_float((uint16_t)(q[r] >> 16)) * odd;
        }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TOKEN_VECTORS; i++) store(&scores[r][offset + WIDTH * i], acc[r][i]);
}

/* acc[r] = acc[r] * shrink[r] + p[r] . V, 16 dims at a time. */
INLINE void add_values(const int rows, const tile_scores *p, const kv_tile *tile, int head_dim, const float *shrink,
                       float *out) {
    for (int dim = 0; dim < head_dim; dim += 16) {
        vf acc[2][16 / WIDTH];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 16 / WIDTH; i++) acc[r][i] = shrink[r] * load(out + r * head_dim + dim + WIDTH * i);
        for (int t = 0; t < TILE_TOKENS; t += 2) {
            const uint16_t *v = tile->v[t / BLOCK_TOKENS] + (t % BLOCK_TOKENS) * head_dim + 2 * dim;
            for (int i = 0; i < 16 / WIDTH; i++) {
                vu words = load_words(v + 2 * WIDTH * i);
                vf even = even_bf16(words), odd = odd_bf16(words);
                for (int r = 0; r < rows; r++) acc[r][i] += p[r][t] * even + p[r][t + 1] * odd;
            }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 16 / WIDTH; i++) store(out + r * head_dim + dim + WIDTH * i, acc[r][i]);
    }
}

#endif

/* Scores to probabilities in place, the row's new maximum and sum; returns by how much old sums shrink. */
static float softmax_row(row_group *group, int r, int start, float scale, float *scores) {
    int low = group->first[r] - start, high = group->last[r] - start;
    float lanes[LANES], *sum = group->sum + r * LANES, top = group->max[r];
    if (low >= TILE_TOKENS || high < 0) { /* nothing to see here: the row stays exactly as it is */
        memset(scores, 0, sizeof(tile_scores));
        return 1.0f;
    }
    for (int t = 0; t < TILE_TOKENS; t++) scores[t] = t < low || t > high ? MASKED : scores[t] * scale;
    for (int j = 0; j < LANES; j++) lanes[j] = top;
    for (int t = 0; t < TILE_TOKENS; t += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] = scores[t + j] > lanes[j] ? scores[t + j] : lanes[j];
    for (int j = 0; j < LANES; j++) top = lanes[j] > top ? lanes[j] : top;
    float by = group->max[r] - top, shrink = group->max[r] <= MASKED ? 0.0f : exp2_fast(by);
    float *moment = group->moment ? group->moment + r * LANES : NULL;
    for (int j = 0; moment && j < LANES; j++) moment[j] = shrink > 0.0f ? shrink * (moment[j] + by * sum[j]) : 0.0f;
    for (int t = 0; moment && t < TILE_TOKENS; t++)
        if (scores[t] > MASKED) moment[t % LANES] += exp2_fast(scores[t] - top) * (scores[t] - top);
    group->max[r] = top;
    for (int t = 0; t < TILE_TOKENS; t += WIDTH) {
        vf s = load(scores + t);
        store(scores + t, choose(s <= MASKED, (vf){0}, exp2_lanes(s - top)));
    }
    for (int j = 0; j < LANES; j++) sum[j] *= shrink;
    for (int t = 0; t < TILE_TOKENS; t += LANES)
        for (int j = 0; j < LANES; j++) sum[j] += scores[t + j];
    return shrink;
}

INLINE void attend_rows(const int rows, row_group *group, int first, const kv_tile *tile, float scale) {
    int dim = group->head_dim;
    tile_scores scores[2];
    float shrink[2];
    for (int b = 0; b < TILE_BLOCKS; b++)
        score_block(rows, group->q + first, group->rows, tile->k[b], dim / 2, scores, b * BLOCK_TOKENS);
    for (int r = 0; r < rows; r++) shrink[r] = softmax_row(group, first + r, tile->start, scale, scores[r]);
    add_values(rows, scores, tile, dim, shrink, group->acc + first * dim);
}

static void attend(row_group *group, const kv_tile *tile, float scale) {
    int row = 0;
    for (; row + 2 <= group->rows; row += 2) attend_rows(2, group, row, tile, scale);
    if (row < group->rows) attend_rows(1, group, row, tile, scale);
}

const kernel_ops ISA_OPS = {.name = ISA_NAME, .tiers = &TIER_OPS, .prepare = prepare, .linear = linear, .attend = attend,
                            .open_unit = row_open_unit, .close_record = ISA_CLOSE, ROWWISE_OPS(row_to_bf16, row_act_mul)};
