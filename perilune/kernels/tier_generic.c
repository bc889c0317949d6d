/* tier.h over GCC's vector types, compiled per CPU level as isa_generic.c is. Queries and weights stay fp32. */
#include "tier_rowwise.h"

#ifndef TIER_OPS
#define TIER_OPS tier_ops_portable
#endif

#if defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define UNIT_VECTORS (UNIT_TOKENS / WIDTH)
#define MAX_DIM 512
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

INLINE vf unsigned_byte(vu words, int j) { return __builtin_convertvector((vi)((words >> (8 * j)) & 255), vf); }

INLINE vf signed_byte(vu words, int j) { return __builtin_convertvector((vi)(words << (24 - 8 * j)) >> 24, vf); }

/* ------------------------------------------------------------------------------------------------- softmax */

/* 16 scores to weights and the row's sums; returns by how much old sums shrink. */
static float softmax_row(tier_rows *state, int r, float *s) {
    float *sum = state->sum + r * SUM_LANES, *moment = state->moment + r * SUM_LANES;
    float top = state->max[r], shrink = 1.0f;
    for (int t = 0; t < UNIT_TOKENS; t++) top = s[t] > top ? s[t] : top;
    if (top > state->max[r]) {
        float by = state->max[r] - top;
        shrink = state->max[r] <= MASKED ? 0.0f : exp2_fast(by);
        for (int j = 0; j < SUM_LANES; j++) {
            moment[j] = shrink > 0.0f ? shrink * (moment[j] + by * sum[j]) : 0.0f;
            sum[j] *= shrink;
        }
        state->max[r] = top;
    }
    for (int t = 0; t < UNIT_TOKENS; t++) {
        float distance = s[t] - top, weight = distance < -126.0f ? 0.0f : exp2_fast(distance);
        s[t] = weight;
        sum[t] += weight;
        moment[t] += weight * (distance < -126.0f ? 0.0f : distance);
    }
    return shrink;
}

/* --------------------------------------------------------------------------------------------- exact units */

INLINE void unit_scores(const int rows, const float (*q)[MAX_DIM], const float *zero, const uint8_t *k, int dim,
                        float (*s)[UNIT_TOKENS]) {
    vf acc[2][UNIT_VECTORS] = {{{0}}};
    for (int c = 0; c < dim / 4; c++, k += 64)
        for (int i = 0; i < UNIT_VECTORS; i++) {
            vu words = load_words(k + 4 * WIDTH * i);
            for (int j = 0; j < 4; j++) {
                vf code = unsigned_byte(words, j);
                for (int r = 0; r < rows; r++) acc[r][i] += q[r][4 * c + j] * code;
            }
        }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < UNIT_VECTORS; i++) store(s[r] + WIDTH * i, acc[r][i] + zero[r]);
}

INLINE void unit_values(const int rows, const float (*p)[UNIT_TOKENS], const int8_t *v, int dim, const float *shrink,
                        float *acc, int stride) {
    for (int d = 0; d < dim; d += WIDTH) {
        vf sum[2];
        for (int r = 0; r < rows; r++) sum[r] = shrink[r] * load(acc + r * stride + d);
        for (int quad = 0; quad < UNIT_TOKENS / 4; quad++) {
            vu words = load_words(v + 4 * (quad * dim + d));
            for (int j = 0; j < 4; j++) {
                vf value = signed_byte(words, j);
                for (int r = 0; r < rows; r++) sum[r] += p[r][4 * quad + j] * value;
            }
        }
        for (int r = 0; r < rows; r++) store(acc + r * stride + d, sum[r]);
    }
}

INLINE void attend_rows(const int rows, tier_rows *state, int first, const record_layout *at, const unit_ref *ref) {
    int dim = state->dim;
    const uint16_t *k_scale = halves_at(ref->payload, at->k_scale) + ref->unit / 2 * dim;
    const uint16_t *k_zero = halves_at(ref->payload, at->k_zero) + ref->unit / 2 * dim;
    const uint16_t *v_scale = halves_at(ref->payload, at->v_scale) + ref->unit * UNIT_TOKENS;
    int64_t offset = (int64_t)ref->unit * UNIT_TOKENS * dim;
    float q[2][MAX_DIM], zero[2] = {0}, s[2][UNIT_TOKENS], shrink[2];
    for (int d = 0; d < dim; d++) {
        float scale = half_to_float(k_scale[d]), add = half_to_float(k_zero[d]);
        for (int r = 0; r < rows; r++) {
            float x = state->q[(first + r) * dim + d];
            q[r][d] = x * scale;
            zero[r] += x * add;
        }
    }
    unit_scores(rows, (const float (*)[MAX_DIM])q, zero, ref->payload + at->k + offset, dim, s);
    for (int r = 0; r < rows; r++) {
        shrink[r] = softmax_row(state, first + r, s[r]);
        for (int t = 0; t < UNIT_TOKENS; t++) s[r][t] *= half_to_float(v_scale[t]);
    }
    unit_values(rows, (const float (*)[UNIT_TOKENS])s, (const int8_t *)(ref->payload + at->v + offset), dim, shrink,
                state->acc + first * state->padded, state->padded);
}

static void attend_units(tier_rows *state, const record_layout *at, const unit_ref *units, int count) {
    for (int i = 0; i < count; i++) {
        int row = 0;
        for (; row + 2 <= state->rows; row += 2) attend_rows(2, state, row, at, &units[i]);
        if (row < state->rows) attend_rows(1, state, row, at, &units[i]);
    }
}

/* ------------------------------------------------------------------------------------------------ outliers */

static void attend_outliers(tier_rows *state, const record_layout *at, const uint8_t *summary, int count,
                            const uint8_t *ahead) {
    const uint16_t *k = halves_at(summary, at->outlier_k), *v = halves_at(summary, at->outlier_v);
    int dim = state->dim;
    (void)ahead;
    for (int r = 0; count > 0 && r < state->rows; r++) {
        float s[UNIT_TOKENS] = {0}, *acc = state->acc + r * state->padded;
        const float *q = state->q + r * dim;
        for (int d = 0; d < dim; d++)
            for (int t = 0; t < UNIT_TOKENS; t++) s[t] += q[d] * bf16_to_float(k[(d / 2 * UNIT_TOKENS + t) * 2 + d % 2]);
        for (int t = count; t < UNIT_TOKENS; t++) s[t] = MASKED;
        float shrink = softmax_row(state, r, s);
        for (int d = 0; d < dim; d++) acc[d] *= shrink;
        for (int t = 0; t < count; t++)
            for (int d = 0; d < dim; d++) acc[d] += s[t] * bf16_to_float(v[(t / 2 * dim + d) * 2 + t % 2]);
    }
}

/* --------------------------------------------------------------------------------------------------- the index */

static void score_units(const tier_rows *state, const record_layout *at, const uint8_t *summary, int group, float *z,
                        int64_t stride) {
    const uint8_t *keys = summary + at->unit_k + (int64_t)group * GROUP_UNITS * state->dim;
    const uint16_t *scale = halves_at(summary, at->unit_k_scale) + group * GROUP_UNITS;
    const uint8_t *n = summary + at->unit_n + group * GROUP_UNITS;
    for (int r = 0; r < state->rows; r++) {
        const float *q = state->q + r * state->dim;
        vf acc[UNIT_VECTORS] = {{0}};
        for (int c = 0; c < state->dim / 4; c++)
            for (int i = 0; i < UNIT_VECTORS; i++) {
                vu words = load_words(keys + 64 * c + 4 * WIDTH * i);
                for (int j = 0; j < 4; j++) acc[i] += q[4 * c + j] * signed_byte(words, j);
            }
        float dots[GROUP_UNITS];
        memcpy(dots, acc, sizeof dots);
        for (int u = 0; u < GROUP_UNITS; u++)
            z[r * stride + u] = n[u] ? dots[u] * half_to_float(scale[u]) + log2f((float)n[u]) : MASKED;
    }
}

static void score_groups(const tier_rows *state, const record_layout *at, const uint8_t *summary, float *z,
                         int64_t stride) {
    const uint16_t *keys = halves_at(summary, at->group_k), *n = halves_at(summary, at->group_n);
    int dim = state->dim;
    for (int g = 0; g < SEGMENT_GROUPS; g++, keys += dim) {
        float key[MAX_DIM], bias = n[g] ? log2f((float)n[g]) : 0.0f;
        for (int d = 0; d < dim; d++) key[d] = half_to_float(keys[d]);
        for (int r = 0; r < state->rows; r++) {
            float lanes[LANES] = {0};
            for (int d = 0; d < dim; d += LANES)
                for (int j = 0; j < LANES; j++) lanes[j] += key[d + j] * state->q[r * dim + d + j];
            z[r * stride + g] = n[g] ? add_lanes(lanes) + bias : MASKED;
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- means */

static void add_units(tier_rows *state, const record_layout *at, const uint8_t *summary, int group, const float *weights,
                      int64_t stride) {
    const int8_t *v = (const int8_t *)(summary + at->unit_v) + (int64_t)group * GROUP_UNITS * state->dim;
    const uint16_t *scale = halves_at(summary, at->unit_v_scale) + group * GROUP_UNITS;
    for (int u = 0; u < GROUP_UNITS; u++, v += state->dim)
        for (int r = 0; r < state->rows; r++) {
            float weight = weights[r * stride + u] * half_to_float(scale[u]), *acc = state->acc + r * state->padded;
            for (int d = 0; weight > 0.0f && d < state->dim; d++) acc[d] += weight * (float)v[d];
        }
}

static void add_group(tier_rows *state, const record_layout *at, const uint8_t *summary, int group, const float *weights,
                      int64_t stride) {
    const uint16_t *v = halves_at(summary, at->group_v) + (int64_t)group * state->dim;
    for (int r = 0; r < state->rows; r++) {
        float weight = weights[r * stride], *acc = state->acc + r * state->padded;
        for (int d = 0; d < state->dim; d++) acc[d] += weight * half_to_float(v[d]);
    }
}

static void exponents(float *z, int n, float max, float *lanes) {
    for (int i = 0; i < n; i += 8)
        for (int j = 0; j < 8; j++) {
            float distance = z[i + j] - max, weight = exp2_fast(distance);
            z[i + j] = weight = distance < -126.0f ? 0.0f : weight;
            lanes[j] += weight;
        }
}

const tier_ops TIER_OPS = {
    .attend_units = attend_units, .attend_outliers = attend_outliers, .score_units = score_units,
    .score_groups = score_groups, .add_units = add_units, .add_group = add_group, .exponents = exponents,
    TIER_ROWWISE_OPS};
