/* isa_generic.c's two attention loops over Arm's BFDOT: pairs are broadcast, as on AVX-512. Probabilities round to bf16. */
#include <arm_neon.h>

static inline bfloat16x8_t bf16_pairs(const void *four) {
    return vreinterpretq_bf16_u32(vld1q_u32((const uint32_t *)four));
}

static inline bfloat16x8_t broadcast_pair(uint32_t pair) { return vreinterpretq_bf16_u32(vdupq_n_u32(pair)); }

/* Scores of `rows` rows over one block: pairs along head_dim, 32 tokens wide. `stride` is the group's rows. */
INLINE void score_block(const int rows, const uint32_t *q, int stride, const uint16_t *k, int pairs, tile_scores *scores,
                        int offset) {
    float32x4_t acc[2][TOKEN_VECTORS];
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < TOKEN_VECTORS; i++) acc[r][i] = vdupq_n_f32(0.0f);
    for (int p = 0; p < pairs; p++, q += stride, k += 2 * BLOCK_TOKENS)
#pragma GCC unroll 8
        for (int i = 0; i < TOKEN_VECTORS; i++) {
            bfloat16x8_t keys = bf16_pairs(k + 2 * WIDTH * i);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) acc[r][i] = vbfdotq_f32(acc[r][i], keys, broadcast_pair(q[r]));
        }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < TOKEN_VECTORS; i++) vst1q_f32(&scores[r][offset + WIDTH * i], acc[r][i]);
}

static void round_row(const float *p, uint32_t *pairs) {
    for (int t = 0; t < TILE_TOKENS; t += 8) {
        bfloat16x8_t low = vcvtq_low_bf16_f32(vld1q_f32(p + t));
        vst1q_u32(pairs + t / 2, vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(low, vld1q_f32(p + t + 4))));
    }
}

/* acc[r] = acc[r] * shrink[r] + p[r] . V, 16 dims at a time. */
INLINE void add_values(const int rows, const tile_scores *p, const kv_tile *tile, int head_dim, const float *shrink,
                       float *out) {
    uint32_t pairs[2][TILE_TOKENS / 2];
    for (int r = 0; r < rows; r++) round_row(p[r], pairs[r]);
    for (int dim = 0; dim < head_dim; dim += 16) {
        float32x4_t acc[2][4];
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) acc[r][i] = vmulq_n_f32(vld1q_f32(out + r * head_dim + dim + 4 * i), shrink[r]);
        for (int t = 0; t < TILE_TOKENS; t += 2) {
            const uint16_t *v = tile->v[t / BLOCK_TOKENS] + (t % BLOCK_TOKENS) * head_dim + 2 * dim;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                bfloat16x8_t values = bf16_pairs(v + 8 * i);
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++) acc[r][i] = vbfdotq_f32(acc[r][i], values, broadcast_pair(pairs[r][t / 2]));
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) vst1q_f32(out + r * head_dim + dim + 4 * i, acc[r][i]);
    }
}
