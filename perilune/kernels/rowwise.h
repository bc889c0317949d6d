/* Row-wise primitives in plain C that the compiler vectorises; every CPU level includes and compiles its own copy.
 *
 * Sums keep 16 explicit lanes: their order is then the same on every level and for every address.
 */
#ifndef PERILUNE_ROWWISE_H
#define PERILUNE_ROWWISE_H

#include "kernels.h"
#include "lanes.h"

static void row_rms_norm(const float *x, const float *weight, int n, float eps, float offset, float *out) {
    float lanes[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += x[i + j] * x[i + j];
    for (; i < n; i++) lanes[0] += x[i] * x[i];
    float inverse = 1.0f / sqrtf(add_lanes(lanes) / (float)n + eps);
    for (i = 0; i < n; i++) out[i] = x[i] * inverse * (offset + weight[i]);
}

static void row_act_mul(int act, const float *gate, const float *up, int n, float *out) {
    if (act == ACT_SILU) {
        for (int i = 0; i < n; i++) out[i] = gate[i] / (1.0f + exp2_fast(-1.44269504f * gate[i])) * up[i];
        return;
    }
    for (int i = 0; i < n; i++) { /* 0.5 x (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3) */
        float x = gate[i], u = 0.7978845608f * (x + 0.044715f * x * x * x);
        out[i] = x / (1.0f + exp2_fast(-2.88539008f * u)) * up[i];
    }
}

static void row_add(const float *delta, int n, float *residual) {
    for (int i = 0; i < n; i++) residual[i] += delta[i];
}

static void row_rotate(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float left = x[i], right = x[half + i];
        x[i] = left * cos[i] - right * sin[i];
        x[half + i] = right * cos[i] + left * sin[i];
    }
}

static void row_to_float(const uint16_t *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) out[i] = bf16_to_float(x[i]);
}

static void row_to_bf16(const float *x, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < n; i++) out[i] = float_to_bf16(x[i]);
}

static void row_merge(int parts, const float *const *acc, const float *max, const float *sum, int n, float *out) {
    float top = MASKED, total = 0.0f;
    for (int p = 0; p < parts; p++) top = max[p] > top ? max[p] : top;
    memset(out, 0, sizeof(float) * (size_t)n);
    for (int p = 0; p < parts; p++) {
        float weight = max[p] <= MASKED ? 0.0f : exp2_fast(max[p] - top);
        total += weight * sum[p];
        for (int i = 0; i < n; i++) out[i] += weight * acc[p][i];
    }
    for (int i = 0; i < n; i++) out[i] /= total;
}

static inline uint32_t bf16_pair(float low, float high) { /* finite numbers */
    union { float f; uint32_t u; } a = {low}, b = {high};
    a.u += 0x7fff + (a.u >> 16 & 1);
    b.u += 0x7fff + (b.u >> 16 & 1);
    return a.u >> 16 | (b.u & 0xffff0000u);
}

static inline void row_open_unit(const unit_codes *unit, int head_dim, uint16_t *k, uint16_t *v) {
    for (int d = 0; d < head_dim; d += 2) { /* 16 tokens of two channels */
        float scale[2], zero[2];
        uint32_t pairs[UNIT_TOKENS];
        const uint8_t *codes = unit->k + d / 4 * 4 * UNIT_TOKENS + d % 4;
        for (int i = 0; i < 2; i++) {
            scale[i] = half_to_float(unit->k_scale[d + i]);
            zero[i] = half_to_float(unit->k_zero[d + i]);
        }
        for (int t = 0; t < UNIT_TOKENS; t++)
            pairs[t] = bf16_pair(codes[4 * t] * scale[0] + zero[0], codes[4 * t + 1] * scale[1] + zero[1]);
        memcpy(k + d * BLOCK_TOKENS, pairs, sizeof pairs);
    }
    for (int t = 0; t < UNIT_TOKENS; t += 2) { /* two tokens of all dims */
        float low = half_to_float(unit->v_scale[t]), high = half_to_float(unit->v_scale[t + 1]);
        const int8_t *codes = unit->v + t / 4 * 4 * head_dim + t % 4;
        for (int d = 0; d < head_dim; d++) {
            uint32_t pair = bf16_pair(codes[4 * d] * low, codes[4 * d + 1] * high);
            memcpy(v + (t / 2 * head_dim + d) * 2, &pair, 4);
        }
    }
}

/* With the level's own rounding and activation. */
#define ROWWISE_OPS(to_bf16_op, act_mul_op)                                                                     \
    .rms_norm = row_rms_norm, .act_mul = act_mul_op, .add = row_add, .rotate = row_rotate,                      \
    .to_float = row_to_float, .to_bf16 = to_bf16_op, .merge = row_merge

#endif
