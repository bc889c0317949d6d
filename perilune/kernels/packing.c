/* Set-up work on weights: GGUF blocks and dense matrices into packed tiles, and packed tiles back into bf16 or fp32. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "kernels.h"

enum { GGUF_Q4_0 = 0, GGUF_Q4_1 = 1, GGUF_Q5_0 = 2, GGUF_Q8_0 = 3 };

static const int gguf_bytes[] = {18, 20, 22, 34};

static int64_t tile_bytes(int kind, int cols) {
    if (kind == KIND_BF16) return (int64_t)cols * 2 * ROW_TILE;
    return (int64_t)(cols / BLOCK_TOKENS) * (kind == KIND_Q4 ? 320 : 544);
}

/* ---------------------------------------------------------------------------------------- into tiles */

static void put_scales(uint8_t *block, int row, uint16_t d) { memcpy(block + 2 * row, &d, 2); }

static void put_int8(uint8_t *block, int row, uint16_t d, const int8_t *quants) {
    put_scales(block, row, d);
    for (int k = 0; k < BLOCK_TOKENS; k++) block[32 + k / 4 * 64 + row * 4 + k % 4] = (uint8_t)(quants[k] + 128);
}

/* GGUF keeps column j in a low and column j + 16 in a high nibble; a tile keeps column 8c+j low and 8c+4+j high. */
static void put_q4(uint8_t *block, int row, uint16_t d, uint16_t m, const uint8_t *nibbles) {
    put_scales(block, row, d);
    memcpy(block + 32 + 2 * row, &m, 2);
    for (int c = 0; c < 4; c++) {
        int shift = c < 2 ? 0 : 4;
        const uint8_t *from = nibbles + c % 2 * 8;
        uint8_t *to = block + 64 + c * 64 + row * 4;
        for (int j = 0; j < 4; j++)
            to[j] = (uint8_t)((from[j] >> shift & 15) | (from[4 + j] >> shift & 15) << 4);
    }
}

static void put_gguf(int gguf, uint8_t *block, int row, const uint8_t *raw) {
    uint16_t d, m;
    int8_t quants[BLOCK_TOKENS];
    memcpy(&d, raw, 2);
    if (gguf == GGUF_Q4_0) {
        put_q4(block, row, d, float_to_half(-8.0f * half_to_float(d)), raw + 2);
    } else if (gguf == GGUF_Q4_1) {
        memcpy(&m, raw + 2, 2);
        put_q4(block, row, d, m, raw + 4);
    } else if (gguf == GGUF_Q8_0) {
        put_int8(block, row, d, (const int8_t *)raw + 2);
    } else {
        uint32_t high;
        memcpy(&high, raw + 2, 4);
        for (int k = 0; k < BLOCK_TOKENS; k++) {
            int low = k < 16 ? raw[6 + k] & 15 : raw[6 + k - 16] >> 4;
            quants[k] = (int8_t)((low | (int)(high >> k & 1) << 4) - 16);
        }
        put_int8(block, row, d, quants);
    }
}

/* `out` is zeroed. */
EXPORT void pk_pack_gguf(const context *ctx, const uint8_t *raw, int rows, int cols, int gguf, uint8_t *out) {
    int blocks = cols / BLOCK_TOKENS, q4 = gguf <= GGUF_Q4_1;
    int64_t stride = q4 ? 320 : 544;
#pragma omp parallel for num_threads(ctx->threads)
    for (int row = 0; row < rows; row++)
        for (int b = 0; b < blocks; b++)
            put_gguf(gguf, out + ((int64_t)(row / ROW_TILE) * blocks + b) * stride, row % ROW_TILE,
                     raw + ((int64_t)row * blocks + b) * gguf_bytes[gguf]);
}

static void quantise(const float *x, uint8_t *block, int row) {
    float top = 0.0f;
    int8_t quants[BLOCK_TOKENS];
    for (int k = 0; k < BLOCK_TOKENS; k++) top = fabsf(x[k]) > top ? fabsf(x[k]) : top;
    uint16_t d = float_to_half(top / 127.0f);
    float scale = half_to_float(d), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int k = 0; k < BLOCK_TOKENS; k++) {
        long q = lrintf(x[k] * inverse);
        quants[k] = (int8_t)(q > 127 ? 127 : (q < -127 ? -127 : q));
    }
    put_int8(block, row, d, quants);
}

EXPORT void pk_pack_int8(const context *ctx, const void *weight, int is_bf16, int rows, int cols, uint8_t *out) {
    int blocks = cols / BLOCK_TOKENS;
#pragma omp parallel for num_threads(ctx->threads)
    for (int row = 0; row < rows; row++)
        for (int b = 0; b < blocks; b++) {
            float x[BLOCK_TOKENS];
            int64_t at = (int64_t)row * cols + b * BLOCK_TOKENS;
            for (int k = 0; k < BLOCK_TOKENS; k++)
                x[k] = is_bf16 ? bf16_to_float(((const uint16_t *)weight)[at + k]) : ((const float *)weight)[at + k];
            quantise(x, out + ((int64_t)(row / ROW_TILE) * blocks + b) * 544, row % ROW_TILE);
        }
}

EXPORT void pk_pack_bf16(const context *ctx, const uint16_t *weight, int rows, int cols, uint8_t *out) {
#pragma omp parallel for num_threads(ctx->threads)
    for (int row = 0; row < rows; row++) {
        uint8_t *tile = out + (int64_t)(row / ROW_TILE) * tile_bytes(KIND_BF16, cols) + row % ROW_TILE * 4;
        for (int k = 0; k < cols; k += 2) memcpy(tile + k / 2 * 64, weight + (int64_t)row * cols + k, 4);
    }
}

/* ---------------------------------------------------------------------------------------- out of tiles */

static void read_row(const packed *weight, int row, float *out) {
    int blocks = weight->cols / BLOCK_TOKENS, lane = row % ROW_TILE;
    const uint8_t *block = weight->data + row / ROW_TILE * tile_bytes(weight->kind, weight->cols);
    if (weight->kind == KIND_BF16) {
        for (int k = 0; k < weight->cols; k += 2, block += 64) {
            uint16_t pair[2];
            memcpy(pair, block + lane * 4, 4);
            out[k] = bf16_to_float(pair[0]);
            out[k + 1] = bf16_to_float(pair[1]);
        }
        return;
    }
    for (int b = 0; b < blocks; b++, block += weight->kind == KIND_Q4 ? 320 : 544, out += BLOCK_TOKENS) {
        uint16_t halves[2];
        memcpy(halves, block + 2 * lane, 2);
        float d = half_to_float(halves[0]);
        if (weight->kind == KIND_INT8) {
            for (int k = 0; k < BLOCK_TOKENS; k++)
                out[k] = d * (float)((int)block[32 + k / 4 * 64 + lane * 4 + k % 4] - 128);
            continue;
        }
        memcpy(halves + 1, block + 32 + 2 * lane, 2);
        float m = half_to_float(halves[1]);
        for (int c = 0; c < 4; c++)
            for (int j = 0; j < 4; j++) {
                uint8_t both = block[64 + c * 64 + lane * 4 + j];
                out[8 * c + j] = d * (float)(both & 15) + m;
                out[8 * c + 4 + j] = d * (float)(both >> 4) + m;
            }
    }
}

EXPORT void pk_dequantize(const context *ctx, const packed *weight, uint16_t *out) {
#pragma omp parallel num_threads(ctx->threads)
    {
        float row[weight->cols];
#pragma omp for
        for (int r = 0; r < weight->rows; r++) {
            read_row(weight, r, row);
            ctx->ops->to_bf16(row, weight->cols, out + (int64_t)r * weight->cols);
        }
    }
}

EXPORT void pk_gather_rows(const packed *weight, const int64_t *ids, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) read_row(weight, (int)ids[i], out + i * weight->cols);
}
