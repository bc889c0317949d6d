/* Linear and attention in plain C over 16 explicit lanes. Compiled twice: as it stands (any CPU, Arm too), and with
 * AVX2, FMA and F16C enabled (-DISA_OPS=ops_avx2), where the compiler turns the lanes into vectors.
 */
#include "rowwise.h"

#ifndef ISA_OPS
#define ISA_OPS ops_portable
#define ISA_NAME "portable C"
#endif

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

/* One block of 32 columns as numbers [column][row]. */
static void unpack_block(int kind, const uint8_t *bytes, float quants[BLOCK_TOKENS][ROW_TILE]) {
    uint32_t words[ROW_TILE];
    int columns = kind == KIND_Q4 ? 8 : 4;
    for (int c = 0; c < BLOCK_TOKENS / columns; c++) {
        memcpy(words, bytes + c * 64, sizeof words);
        for (int j = 0; j < 4; j++) {
            float *low = quants[c * columns + j], *high = quants[c * columns + 4 + j];
            if (kind == KIND_Q4) {
                for (int r = 0; r < ROW_TILE; r++) low[r] = (float)(int32_t)((words[r] >> (8 * j)) & 15);
                for (int r = 0; r < ROW_TILE; r++) high[r] = (float)(int32_t)((words[r] >> (8 * j + 4)) & 15);
            } else {
                for (int r = 0; r < ROW_TILE; r++) low[r] = (float)(int32_t)((words[r] >> (8 * j)) & 255);
            }
        }
    }
}

static void tile_quantised(const packed *weight, int tile, const prepared_block *x, int rows, float (*acc)[ROW_TILE]) {
    int blocks = weight->cols / BLOCK_TOKENS, q4 = weight->kind == KIND_Q4;
    int64_t stride = q4 ? 320 : 544;
    const uint8_t *bytes = weight->data + tile * stride * blocks;
    float quants[BLOCK_TOKENS][ROW_TILE], d[ROW_TILE], m[ROW_TILE];
    for (int b = 0; b < blocks; b++, bytes += stride) {
        uint16_t halves[2 * ROW_TILE];
        memcpy(halves, bytes, sizeof halves);
        for (int r = 0; r < ROW_TILE; r++) {
            d[r] = half_to_float(halves[r]);
            m[r] = q4 ? half_to_float(halves[ROW_TILE + r]) : -128.0f * d[r];
        }
        unpack_block(weight->kind, bytes + (q4 ? 64 : 32), quants);
        for (int t = 0; t < rows; t++) {
            const prepared_block *row = x + (int64_t)t * blocks + b;
            float dot[ROW_TILE] = {0};
            for (int k = 0; k < BLOCK_TOKENS; k++)
                for (int r = 0; r < ROW_TILE; r++) dot[r] += row->x[k] * quants[k][r];
            for (int r = 0; r < ROW_TILE; r++) acc[t][r] += d[r] * dot[r] + m[r] * row->sum;
        }
    }
}

static void tile_bf16(const packed *weight, int tile, const float *x, int rows, float (*acc)[ROW_TILE]) {
    const uint8_t *bytes = weight->data + (int64_t)tile * ROW_TILE * 2 * weight->cols;
    for (int k = 0; k < weight->cols; k += 2, bytes += 64) {
        uint32_t words[ROW_TILE];
        float even[ROW_TILE], odd[ROW_TILE];
        memcpy(words, bytes, sizeof words);
        for (int r = 0; r < ROW_TILE; r++) {
            uint32_t low = words[r] << 16, high = words[r] & 0xffff0000;
            memcpy(&even[r], &low, 4);
            memcpy(&odd[r], &high, 4);
        }
        for (int t = 0; t < rows; t++) {
            const float *row = x + (int64_t)t * weight->cols + k;
            for (int r = 0; r < ROW_TILE; r++) acc[t][r] += row[0] * even[r] + row[1] * odd[r];
        }
    }
}

static void linear(const packed *weight, int begin, int end, const void *prepared, int rows, const float *bias,
                   float *out, int64_t stride) {
    for (int tile = begin; tile < end; tile++) {
        int base = tile * ROW_TILE, count = weight->rows - base < ROW_TILE ? weight->rows - base : ROW_TILE;
        for (int start = 0; start < rows; start += ROW_CHUNK) {
            int chunk = rows - start < ROW_CHUNK ? rows - start : ROW_CHUNK;
            float acc[ROW_CHUNK][ROW_TILE] = {{0}};
            if (weight->kind == KIND_BF16)
                tile_bf16(weight, tile, (const float *)prepared + (int64_t)start * weight->cols, chunk, acc);
            else
                tile_quantised(weight, tile,
                               (const prepared_block *)prepared + (int64_t)start * (weight->cols / BLOCK_TOKENS),
                               chunk, acc);
            for (int t = 0; t < chunk; t++)
                for (int r = 0; r < count; r++)
                    out[(start + t) * stride + base + r] = acc[t][r] + (bias ? bias[base + r] : 0.0f);
        }
    }
}

/* Scores of one row over one block: pairs along head_dim, 32 tokens wide. */
static void score_block(const uint32_t *q, int rows, const uint16_t *k, int pairs, float scores[BLOCK_TOKENS]) {
    float acc[BLOCK_TOKENS] = {0};
    for (int p = 0; p < pairs; p++) {
        float q0 = bf16_to_float((uint16_t)q[p * rows]), q1 = bf16_to_float((uint16_t)(q[p * rows] >> 16));
        uint32_t words[BLOCK_TOKENS];
        memcpy(words, k + p * 2 * BLOCK_TOKENS, sizeof words);
        for (int t = 0; t < BLOCK_TOKENS; t++) {
            union { uint32_t u; float f; } even = {words[t] << 16}, odd = {words[t] & 0xffff0000};
            acc[t] += q0 * even.f + q1 * odd.f;
        }
    }
    memcpy(scores, acc, sizeof acc);
}

static void add_values(const float *p, const uint16_t *v, int dim, float *acc) {
    for (int t = 0; t < BLOCK_TOKENS; t += 2, v += 2 * dim) {
        float p0 = p[t], p1 = p[t + 1];
        for (int i = 0; i < dim; i++) acc[i] += p0 * bf16_to_float(v[2 * i]) + p1 * bf16_to_float(v[2 * i + 1]);
    }
}

static void attend(row_group *group, const kv_tile *tile, float scale) {
    int dim = group->head_dim;
    for (int r = 0; r < group->rows; r++) {
        float scores[TILE_TOKENS], lanes[LANES], *acc = group->acc + r * dim, *sum = group->sum + r * LANES;
        for (int b = 0; b < TILE_BLOCKS; b++)
            score_block(group->q + r, group->rows, tile->k[b], dim / 2, scores + b * BLOCK_TOKENS);
        int low = group->first[r] - tile->start, high = group->last[r] - tile->start;
        for (int t = 0; t < TILE_TOKENS; t++) scores[t] = t < low || t > high ? MASKED : scores[t] * scale;
        for (int j = 0; j < LANES; j++) lanes[j] = group->max[r];
        for (int t = 0; t < TILE_TOKENS; t += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] = scores[t + j] > lanes[j] ? scores[t + j] : lanes[j];
        float top = lanes[0];
        for (int j = 1; j < LANES; j++) top = lanes[j] > top ? lanes[j] : top;
        float shrink = group->max[r] <= MASKED ? 0.0f : exp2_fast(group->max[r] - top);
        group->max[r] = top;
        for (int t = 0; t < TILE_TOKENS; t++)
            scores[t] = scores[t] <= MASKED ? 0.0f : exp2_fast(scores[t] - top);
        for (int j = 0; j < LANES; j++) sum[j] *= shrink;
        for (int t = 0; t < TILE_TOKENS; t += LANES)
            for (int j = 0; j < LANES; j++) sum[j] += scores[t + j];
        for (int i = 0; i < dim; i++) acc[i] *= shrink;
        for (int b = 0; b < TILE_BLOCKS; b++) add_values(scores + b * BLOCK_TOKENS, tile->v[b], dim, acc);
    }
}

const kernel_ops ISA_OPS = {.name = ISA_NAME, .prepare = prepare, .linear = linear, .attend = attend, ROWWISE_OPS};
