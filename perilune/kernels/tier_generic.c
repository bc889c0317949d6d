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

INLINE void unit_scores(const int rows, const float (*q)[MAX_HEAD_DIM], const float *zero, const uint8_t *k, int dim,
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
    float q[2][MAX_HEAD_DIM], zero[2] = {0}, s[2][UNIT_TOKENS], shrink[2];
    for (int d = 0; d < dim; d++) {
        float scale = half_to_float(k_scale[d]), add = half_to_float(k_zero[d]);
        for (int r = 0; r < rows; r++) {
            float x = state->q[(first + r) * dim + d];
            q[r][d] = x * scale;
            zero[r] += x * add;
        }
    }
    unit_scores(rows, (const float (*)[MAX_HEAD_DIM])q, zero, ref->payload + at->k + offset, dim, s);
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

/* --------------------------------------------------------------------------------------------------- the index */

typedef uint8_t vb __attribute__((vector_size(16)));

INLINE vb load_bytes(const uint8_t *p) {
    vb v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Of one token of each of 16 units: the looked up sums of four signed channels, over all channels. */
static void sign_sums(const uint8_t *signs, const uint8_t *table, int dim, int32_t *sums) {
    int words = dim / 8;
    memset(sums, 0, sizeof(int32_t) * GROUP_UNITS);
    for (int start = 0; start < words; start += 8) { /* 16 sums of at most 15 stay within a byte */
        vb sum = {0};
        for (int w = start; w < words && w < start + 8; w++) {
            vb codes = load_bytes(signs + w * 4 * GROUP_UNITS);
            sum += __builtin_shuffle(load_bytes(table + 16 * w), codes & 15);
            sum += __builtin_shuffle(load_bytes(table + 16 * (w + words)), codes >> 4);
        }
        for (int u = 0; u < GROUP_UNITS; u++) sums[u] += sum[u];
    }
}

static void mean_sums(const int8_t *q, const uint8_t *mean, int dim, int32_t *sums) {
    memset(sums, 0, sizeof(int32_t) * GROUP_UNITS);
    for (int w = 0; w < dim / 8; w++, mean += 4 * GROUP_UNITS)
        for (int j = 0; j < 4; j++) {
            int first = q[4 * w + j], second = q[4 * w + dim / 2 + j];
            for (int u = 0; u < GROUP_UNITS; u++) {
                int codes = mean[4 * u + j];
                sums[u] += (codes & 15) * first + (codes >> 4) * second;
            }
        }
}

/* total[u] += a key's share of its unit's sum */
static void add_sketch(const tier_rows *state, int r, const int32_t *sums, const float *spread, float *total) {
    for (int u = 0; u < GROUP_UNITS; u++) {
        float x = spread[u] * ((float)sums[u] * state->sum_step[r] - state->sum_zero[r]);
        total[u] += exp2_chord(x > -MAX_SKETCH ? (x < MAX_SKETCH ? x : MAX_SKETCH) : -MAX_SKETCH); /* NaN: the least */
    }
}

static void score_units(const tier_rows *state, const record_layout *at, const uint8_t *summary, int group, float *z,
                        int64_t stride) {
    int dim = state->dim, present = *halves_at(summary, at->units) - group * GROUP_UNITS;
    const uint8_t *mean = summary + at->mean + (int64_t)group * GROUP_UNITS * dim / 2;
    const uint8_t *signs = summary + at->signs + (int64_t)group * GROUP_UNITS * UNIT_TOKENS * dim / 8;
    const uint8_t *codes = summary + at->spread + group * UNIT_TOKENS * GROUP_UNITS / 2;
    const uint16_t *scale = halves_at(summary, at->mean_scale) + group * GROUP_UNITS;
    const uint16_t *size = halves_at(summary, at->spread_scale) + group * GROUP_UNITS;
    float spread[UNIT_TOKENS][GROUP_UNITS];
    for (int t = 0; t < UNIT_TOKENS && state->sketched; t++)
        for (int u = 0; u < GROUP_UNITS; u++) {
            int code = codes[(t / 4 * 2 + t % 2) * GROUP_UNITS + u] >> t % 4 / 2 * 4 & 15;
            spread[t][u] = half_to_float(size[u]) * (float)(code + 1);
        }
    for (int r = 0; r < state->rows; r++, z += stride) {
        int32_t sums[GROUP_UNITS];
        float total[GROUP_UNITS] = {0};
        for (int t = 0; t < UNIT_TOKENS && state->sketched; t++) {
            const uint8_t *of = signs + (t / 4 * dim / 2 + t % 4) * GROUP_UNITS;
            sign_sums(of, state->signed_sums + r * dim * 4, dim, sums);
            add_sketch(state, r, sums, spread[t], total);
        }
        mean_sums(state->fixed + r * state->padded, mean, dim, sums);
        for (int u = 0; u < GROUP_UNITS; u++) {
            float base = half_to_float(scale[u]) * state->step[r] * ((float)sums[u] - 7.5f * (float)state->total[r]);
            z[u] = u < present ? base + (state->sketched ? log2_fast(total[u]) : LOG2_UNIT_TOKENS) : MASKED;
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- means */

static void add_quads(tier_rows *state, const record_layout *at, const uint8_t *summary, const uint8_t *ahead, int half,
                      const float *w, int64_t stride) {
    (void)ahead;
    const int8_t *v = (const int8_t *)(summary + at->quad_v) + (int64_t)half * HALF_QUADS * state->dim;
    const uint16_t *scale = halves_at(summary, at->quad_v_scale) + half * HALF_QUADS;
    for (int quad = 0; quad < HALF_QUADS; quad++, v += state->dim)
        for (int r = 0; r < state->rows; r++) {
            const float *of = w + r * stride + quad * QUAD_UNITS;
            float weight = (of[0] + of[1] + of[2] + of[3]) * half_to_float(scale[quad]), *acc = state->acc + r * state->padded;
            for (int d = 0; weight > 0.0f && d < state->dim; d++) acc[d] += weight * (float)v[d];
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
    .attend_units = attend_units, .score_units = score_units, .add_quads = add_quads, .exponents = exponents,
    TIER_ROWWISE_OPS};
