/* tier.h for AVX-512 with VNNI: integer products, fp32 sums across units.
 *
 * A query, times a block's key scales, becomes 16-bit fixed point in two signed bytes (error max / 65000), a weight times
 * its token's value scale two unsigned ones: VPDPBUSD then does 64 products at once. The signs are free: keys are
 * unsigned, values signed.
 */
#include <immintrin.h>

#include "tier_rowwise.h"

#define INLINE static inline __attribute__((always_inline))
#define SLACK 8.0f   /* the maximum moves only when a score passes it by 2^SLACK, see isa_avx512.c */

typedef struct block { /* one or two units of the same 32 tokens */
    const uint8_t *k[2];
    const int8_t *v[2];
    const uint16_t *k_scale, *k_zero, *v_scale[2];
    int units;
    const struct block *ahead; /* fetched line by line meanwhile, into L2: L1 has too few miss buffers */
} block;

INLINE __m512 halves_16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

INLINE __m512i broadcast4(const void *bytes) {
    int32_t word;
    memcpy(&word, bytes, 4);
    return _mm512_set1_epi32(word);
}

/* acc += 64 products, unsigned times signed. The intrinsic makes GCC 12 copy every accumulator in and out of a loop. */
INLINE void dot(__m512i *acc, __m512i unsigned_bytes, __m512i signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*acc) : "v"(unsigned_bytes), "v"(signed_bytes));
}

INLINE __m512 exp2_16(__m512 x) { /* exp2_fast of rowwise.h, 0 below -126 */
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, n), p = _mm512_set1_ps(0x1.5bba14p-10f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3cea8ap-7f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6b752p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebf9bcp-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e42ap-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

INLINE __m512 log2_16(__m512 x) { /* log2_fast of rowwise.h: atanh series of the mantissa; x > 0 */
    __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src), one = _mm512_set1_ps(1.0f);
    __m512 exponent = _mm512_getexp_ps(_mm512_div_ps(x, m)), t = _mm512_div_ps(_mm512_sub_ps(m, one), _mm512_add_ps(m, one));
    __m512 square = _mm512_mul_ps(t, t), p = _mm512_set1_ps(0.412198583f);
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(0.577078016f));
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(0.961796694f));
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(2.88539008f));
    return _mm512_fmadd_ps(t, p, exponent);
}

/* 256 * high + low, rounded once. As whole numbers that wouldn't fit from 260 dims on; each of them is exact in fp32. */
INLINE __m512 fixed_to_float(__m512i high, __m512i low) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
}

/* ------------------------------------------------------------------------------------------------ exact units */

typedef struct folded { /* a query in a block's key codes */
    _Alignas(64) int8_t high[MAX_HEAD_DIM], low[MAX_HEAD_DIM];
    float step, zero;
} folded;

INLINE void fold_queries(const int rows, const float *q, const block *b, int dim, folded *out) {
    _Alignas(64) float scaled[TIER_ROWS][MAX_HEAD_DIM];
    __m512 top[TIER_ROWS], zero[TIER_ROWS], inverse[TIER_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) top[r] = zero[r] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16) {
        __m512 scale = halves_16(b->k_scale + d), add = halves_16(b->k_zero + d);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512 x = _mm512_loadu_ps(q + r * dim + d), y = _mm512_mul_ps(x, scale);
            zero[r] = _mm512_fmadd_ps(x, add, zero[r]);
            top[r] = _mm512_max_ps(top[r], _mm512_abs_ps(y));
            _mm512_store_ps(scaled[r] + d, y);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        float peak = _mm512_reduce_max_ps(top[r]);
        inverse[r] = _mm512_set1_ps(peak > 0.0f ? 32512.0f / peak : 0.0f); /* 127 * 256: the high byte stays 127 */
        out[r].step = peak / 32512.0f;
        out[r].zero = _mm512_reduce_add_ps(zero[r]);
    }
    for (int d = 0; d < dim; d += 16)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scaled[r] + d), inverse[r]));
            __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
            _mm_store_si128((__m128i *)(out[r].high + d), _mm512_cvtepi32_epi8(high));
            _mm_store_si128((__m128i *)(out[r].low + d), _mm512_cvtepi32_epi8(x)); /* truncates to the low byte */
        }
}

INLINE void block_scores(const int rows, const int units, const block *b, const folded *q, int dim, __m512 s[][2]) {
    __m512i high[TIER_ROWS][2], low[TIER_ROWS][2];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int u = 0; u < units; u++) high[r][u] = low[r][u] = _mm512_setzero_si512();
    for (int c = 0; c < dim / 4; c++) {
        __m512i k[2];
#pragma GCC unroll 2
        for (int u = 0; u < units; u++) k[u] = _mm512_loadu_si512(b->k[u] + 64 * c);
#pragma GCC unroll 2
        for (int u = 0; u < 2; u++)
            if (u < b->ahead->units) _mm_prefetch((const char *)b->ahead->k[u] + 64 * c, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512i h = broadcast4(q[r].high + 4 * c), l = broadcast4(q[r].low + 4 * c);
#pragma GCC unroll 2
            for (int u = 0; u < units; u++) {
                dot(&high[r][u], k[u], h);
                dot(&low[r][u], k[u], l);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int u = 0; u < units; u++)
            s[r][u] = _mm512_fmadd_ps(fixed_to_float(high[r][u], low[r][u]), _mm512_set1_ps(q[r].step),
                                      _mm512_set1_ps(q[r].zero));
}

/* Scores to weights and the row's sums; returns by how much old sums shrink. */
INLINE float softmax_row(tier_rows *state, int r, const int vectors, __m512 *s) {
    __m512 top = vectors > 1 ? _mm512_max_ps(s[0], s[1]) : s[0];
    float shrink = 1.0f;
    float *sums = state->sum + r * SUM_LANES, *moments = state->moment + r * SUM_LANES;
    __m512 sum = _mm512_loadu_ps(sums), moment = _mm512_loadu_ps(moments);
    if (__builtin_expect(_mm512_cmp_ps_mask(top, _mm512_set1_ps(state->max[r] + SLACK), _CMP_GT_OQ), 0)) {
        float max = _mm512_reduce_max_ps(top), by = state->max[r] - max;
        shrink = state->max[r] <= MASKED ? 0.0f : exp2_fast(by);
        if (shrink > 0.0f) moment = _mm512_fmadd_ps(sum, _mm512_set1_ps(by), moment);
        sum = _mm512_mul_ps(sum, _mm512_set1_ps(shrink));
        moment = _mm512_mul_ps(moment, _mm512_set1_ps(shrink));
        state->max[r] = max;
    }
#pragma GCC unroll 2
    for (int j = 0; j < vectors; j++) {
        __m512 distance = _mm512_sub_ps(s[j], _mm512_set1_ps(state->max[r]));
        s[j] = exp2_16(distance);
        sum = _mm512_add_ps(sum, s[j]);
        moment = _mm512_fmadd_ps(s[j], distance, moment);
    }
    _mm512_storeu_ps(sums, sum);
    _mm512_storeu_ps(moments, moment);
    return shrink;
}

typedef struct weights { /* of a block's tokens for one row, times the tokens' value scales */
    uint8_t high[32], low[32];
    float step;
} weights;

INLINE void fix_weights(const int vectors, __m512 *p, weights *out) {
    float peak = _mm512_reduce_max_ps(vectors > 1 ? _mm512_max_ps(p[0], p[1]) : p[0]);
    peak = peak > 1e-30f ? peak : 1e-30f;
    __m512 inverse = _mm512_set1_ps(65280.0f / peak);
#pragma GCC unroll 2
    for (int j = 0; j < vectors; j++) {
        __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(p[j], inverse));
        _mm_storeu_si128((__m128i *)(out->high + 16 * j), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
        _mm_storeu_si128((__m128i *)(out->low + 16 * j), _mm512_cvtepi32_epi8(x));
    }
    out->step = peak / 65280.0f;
}

/* acc[row][dim …] = acc * shrink + weights . V for `width` vectors of 16 dims. */
INLINE void block_values(const int rows, const int units, const int width, const block *b, const weights *p, int head_dim,
                         int dim, const float *shrink, float *acc, int stride) {
    __m512i high[TIER_ROWS][4], low[TIER_ROWS][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) high[r][j] = low[r][j] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int u = 0; u < units; u++)
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; quad++) {
            __m512i v[4];
#pragma GCC unroll 4
            for (int j = 0; j < width; j++) {
                int at = 4 * (quad * head_dim + dim + 16 * j);
                v[j] = _mm512_loadu_si512(b->v[u] + at);
                _mm_prefetch((const char *)b->ahead->v[u] + at, _MM_HINT_T1);
                if (units == 1 && b->ahead->units == 2) _mm_prefetch((const char *)b->ahead->v[1] + at, _MM_HINT_T1);
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                __m512i h = broadcast4(p[r].high + 16 * u + 4 * quad), l = broadcast4(p[r].low + 16 * u + 4 * quad);
#pragma GCC unroll 4
                for (int j = 0; j < width; j++) {
                    dot(&high[r][j], h, v[j]);
                    dot(&low[r][j], l, v[j]);
                }
            }
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) {
            float *at = acc + r * stride + dim + 16 * j;
            __m512 old = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(shrink[r]));
            __m512 sum = fixed_to_float(high[r][j], low[r][j]);
            _mm512_storeu_ps(at, _mm512_fmadd_ps(sum, _mm512_set1_ps(p[r].step), old));
        }
}

INLINE void attend_block(const int rows, const int units, tier_rows *state, int first, const block *b) {
    folded q[TIER_ROWS];
    weights p[TIER_ROWS];
    __m512 s[TIER_ROWS][2], scale[2];
    float shrink[TIER_ROWS], *acc = state->acc + first * state->padded;
    int dim = state->dim, d = 0;
    fold_queries(rows, state->q + first * dim, b, dim, q);
    block_scores(rows, units, b, q, dim, s);
#pragma GCC unroll 2
    for (int u = 0; u < units; u++) scale[u] = halves_16(b->v_scale[u]);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        shrink[r] = softmax_row(state, first + r, units, s[r]);
#pragma GCC unroll 2
        for (int u = 0; u < units; u++) s[r][u] = _mm512_mul_ps(s[r][u], scale[u]);
        fix_weights(units, s[r], &p[r]);
    }
    const int width = rows > 2 ? 2 : 4;
    for (; d + 16 * width <= dim; d += 16 * width)
        block_values(rows, units, width, b, p, dim, d, shrink, acc, state->padded);
    for (; d < dim; d += 16) block_values(rows, units, 1, b, p, dim, d, shrink, acc, state->padded);
}

INLINE void attend_any(const int units, tier_rows *state, const block *b) {
    int chunks = (state->rows + TIER_ROWS - 1) / TIER_ROWS, first = 0;
    for (int i = 0; i < chunks; i++) {
        int rows = (state->rows - first + chunks - i - 1) / (chunks - i);
        switch (rows) {
        case 1: attend_block(1, units, state, first, b); break;
        case 2: attend_block(2, units, state, first, b); break;
        case 3: attend_block(3, units, state, first, b); break;
        default: attend_block(4, units, state, first, b); break;
        }
        first += rows;
    }
}

static void attend_one(tier_rows *state, const block *b) { attend_any(1, state, b); }

static void attend_two(tier_rows *state, const block *b) { attend_any(2, state, b); }

INLINE int open_block(const record_layout *at, const unit_ref *ref, int left, int dim, block *b) { /* units it holds */
    int64_t size = (int64_t)UNIT_TOKENS * dim, unit = ref->unit;
    int two = left > 1 && ref[1].payload == ref->payload && unit % 2 == 0 && ref[1].unit == unit + 1;
    b->k_scale = halves_at(ref->payload, at->k_scale) + unit / 2 * dim;
    b->k_zero = halves_at(ref->payload, at->k_zero) + unit / 2 * dim;
    for (int side = 0; side < 2; side++) {
        int64_t number = unit + (side && two);
        b->k[side] = ref->payload + at->k + number * size;
        b->v[side] = (const int8_t *)(ref->payload + at->v + number * size);
        b->v_scale[side] = halves_at(ref->payload, at->v_scale) + number * UNIT_TOKENS;
    }
    return b->units = 1 + two;
}

INLINE void fetch_scales(const block *b, int dim) {
    for (int i = 0; i < dim; i += 32) {
        _mm_prefetch((const char *)(b->k_scale + i), _MM_HINT_T1);
        _mm_prefetch((const char *)(b->k_zero + i), _MM_HINT_T1);
    }
    _mm_prefetch((const char *)b->v_scale[0], _MM_HINT_T1);
}

static void attend_units(tier_rows *state, const record_layout *at, const unit_ref *units, int count) {
    int dim = state->dim, i = 0;
    block now, ahead;
    if (count == 0) return;
    int held = open_block(at, units, count, dim, &now);
    while (i < count) {
        int next = i + held, next_held = 0;
        if (next < count) next_held = open_block(at, units + next, count - next, dim, &ahead);
        else ahead = now;
        now.ahead = &ahead;
        fetch_scales(&ahead, dim);
        if (held == 2) attend_two(state, &now);
        else attend_one(state, &now);
        now = ahead;
        held = next_held;
        i = next;
    }
}

/* --------------------------------------------------------------------------------------------------- the index */

typedef struct index_group { /* 16 units of a record, one a lane */
    const uint8_t *mean, *spread, *signs;
    __m512 mean_scale, spread_scale;
    __mmask16 exist;
} index_group;

INLINE index_group open_group(const record_layout *at, const uint8_t *summary, int group, int dim) {
    int present = *halves_at(summary, at->units) - group * GROUP_UNITS;
    return (index_group){
        .mean = summary + at->mean + group * GROUP_UNITS * dim / 2,
        .spread = summary + at->spread + group * UNIT_TOKENS * GROUP_UNITS / 2,
        .signs = summary + at->signs + group * GROUP_UNITS * UNIT_TOKENS * dim / 8,
        .mean_scale = halves_16(halves_at(summary, at->mean_scale) + group * GROUP_UNITS),
        .spread_scale = halves_16(halves_at(summary, at->spread_scale) + group * GROUP_UNITS),
        .exist = present >= GROUP_UNITS ? 0xffff : (__mmask16)((1u << (present > 0 ? present : 0)) - 1),
    };
}

/* q . mean key of each unit */
INLINE void mean_scores(const int rows, const tier_rows *state, int first, const index_group *at, __m512 *out) {
    __m512i sum[TIER_ROWS], low_half = _mm512_set1_epi8(15);
    const int8_t *q = state->fixed + first * state->padded;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_si512();
    for (int w = 0; w < state->dim / 8; w++) {
        __m512i codes = _mm512_loadu_si512(at->mean + 64 * w), low = _mm512_and_si512(codes, low_half);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            dot(&sum[r], low, broadcast4(q + r * state->padded + 4 * w));
            dot(&sum[r], high, broadcast4(q + r * state->padded + 4 * w + state->dim / 2));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        __m512 centred = _mm512_sub_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_set1_ps(7.5f * (float)state->total[first + r]));
        out[r] = _mm512_mul_ps(centred, _mm512_mul_ps(at->mean_scale, _mm512_set1_ps(state->step[first + r])));
    }
}

#define SKETCH_TOKENS 4 /* of each of the 16 units: the 64 bytes of a vector */

/* Of four tokens of each unit: the looked up sums of four signed channels, over all channels, in 32 bits. */
INLINE void sign_sums(const int rows, const tier_rows *state, int first, const uint8_t *signs, __m512i out[][SKETCH_TOKENS]) {
    __m512i low_half = _mm512_set1_epi8(15);
    int words = state->dim / 8;
    const uint8_t *table = state->signed_sums + first * state->dim * 4;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < SKETCH_TOKENS; i++) out[r][i] = _mm512_setzero_si512();
    for (int start = 0; start < words; start += 8) { /* 16 sums of at most 15 stay within a byte */
        __m512i sum[TIER_ROWS];
        int end = start + 8 < words ? start + 8 : words;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_si512();
        for (int w = start; w < end; w++) {
            __m512i codes = _mm512_loadu_si512(signs + 64 * w), low = _mm512_and_si512(codes, low_half);
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const __m128i *of = (const __m128i *)(table + r * state->dim * 4);
                sum[r] = _mm512_add_epi8(sum[r], _mm512_shuffle_epi8(_mm512_broadcast_i32x4(of[w]), low));
                sum[r] = _mm512_add_epi8(sum[r], _mm512_shuffle_epi8(_mm512_broadcast_i32x4(of[w + words]), high));
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            out[r][0] = _mm512_add_epi32(out[r][0], _mm512_cvtepu8_epi32(_mm512_castsi512_si128(sum[r])));
            out[r][1] = _mm512_add_epi32(out[r][1], _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(sum[r], 1)));
            out[r][2] = _mm512_add_epi32(out[r][2], _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(sum[r], 2)));
            out[r][3] = _mm512_add_epi32(out[r][3], _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(sum[r], 3)));
        }
    }
}

INLINE void spread_of(const index_group *at, int quad, __m512 out[SKETCH_TOKENS]) {
    const __m128i *codes = (const __m128i *)(at->spread + quad * 2 * GROUP_UNITS);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes + i));
        __m512 low = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
        out[i] = _mm512_fmadd_ps(low, at->spread_scale, at->spread_scale);
        out[i + 2] = _mm512_fmadd_ps(high, at->spread_scale, at->spread_scale);
    }
}

INLINE __m512 exp2_chord_16(__m512 x) { /* of lanes.h, within MAX_SKETCH */
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-MAX_SKETCH)), _mm512_set1_ps(MAX_SKETCH));
    __m512 bits = _mm512_fmadd_ps(x, _mm512_set1_ps(8388608.0f), _mm512_set1_ps(1065353216.0f));
    return _mm512_castsi512_ps(_mm512_cvttps_epi32(bits));
}

/* log2 of the sums over a unit's tokens of 2^(q . (key - mean)) */
INLINE void sketch_rows(const int rows, const tier_rows *state, int first, const index_group *at, __m512 *out) {
    __m512 total[TIER_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    for (int quad = 0; quad < UNIT_TOKENS / SKETCH_TOKENS; quad++) {
        __m512i sums[TIER_ROWS][SKETCH_TOKENS];
        __m512 spread[SKETCH_TOKENS];
        sign_sums(rows, state, first, at->signs + quad * 8 * state->dim, sums);
        spread_of(at, quad, spread);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512 step = _mm512_set1_ps(state->sum_step[first + r]), zero = _mm512_set1_ps(state->sum_zero[first + r]);
#pragma GCC unroll 4
            for (int i = 0; i < SKETCH_TOKENS; i++) {
                __m512 dot_product = _mm512_fmsub_ps(_mm512_cvtepi32_ps(sums[r][i]), step, zero);
                total[r] = _mm512_add_ps(total[r], exp2_chord_16(_mm512_mul_ps(spread[i], dot_product)));
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) out[r] = log2_16(total[r]);
}

INLINE void score_rows(const int rows, const tier_rows *state, int first, const index_group *at, float *z, int64_t stride) {
    __m512 base[TIER_ROWS], size[TIER_ROWS];
    mean_scores(rows, state, first, at, base);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) size[r] = _mm512_set1_ps(LOG2_UNIT_TOKENS);
    if (state->sketched) sketch_rows(rows, state, first, at, size);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        __m512 score = _mm512_add_ps(base[r], size[r]);
        _mm512_storeu_ps(z + (first + r) * stride, _mm512_mask_blend_ps(at->exist, _mm512_set1_ps(MASKED), score));
    }
}

static void score_units(const tier_rows *state, const record_layout *at, const uint8_t *summary, int group, float *z,
                        int64_t stride) {
    index_group units = open_group(at, summary, group, state->dim);
    for (int first = 0; first < state->rows; first += TIER_ROWS)
        switch (state->rows - first) {
        case 1: score_rows(1, state, first, &units, z, stride); break;
        case 2: score_rows(2, state, first, &units, z, stride); break;
        case 3: score_rows(3, state, first, &units, z, stride); break;
        default: score_rows(4, state, first, &units, z, stride); break;
        }
}

/* ---------------------------------------------------------------------------------------------------- means */

/* Four rows of bytes interleaved, 64 dims: vector i, 32-bit lane 4 l + j is dim 16 l + 4 i + j. */
INLINE void interleave(const int8_t *v, int stride, __mmask64 exist, __m512i out[4]) {
    __m512i a = _mm512_maskz_loadu_epi8(exist, v), b = _mm512_maskz_loadu_epi8(exist, v + stride);
    __m512i c = _mm512_maskz_loadu_epi8(exist, v + 2 * stride), d = _mm512_maskz_loadu_epi8(exist, v + 3 * stride);
    __m512i ab0 = _mm512_unpacklo_epi8(a, b), ab1 = _mm512_unpackhi_epi8(a, b);
    __m512i cd0 = _mm512_unpacklo_epi8(c, d), cd1 = _mm512_unpackhi_epi8(c, d);
    out[0] = _mm512_unpacklo_epi16(ab0, cd0);
    out[1] = _mm512_unpackhi_epi16(ab0, cd0);
    out[2] = _mm512_unpacklo_epi16(ab1, cd1);
    out[3] = _mm512_unpackhi_epi16(ab1, cd1);
}

INLINE void transpose_lanes(__m512 x[4]) { /* interleaved vectors to dims in order */
    __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
    __m512 c = _mm512_shuffle_f32x4(x[0], x[1], 0xee), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

/* Lane i: the sum of four neighbours from 4 i on. */
INLINE __m512 sums_of_four(const float *w) {
    __m512 out = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512 x = _mm512_loadu_ps(w + 16 * j), pairs = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
        out = _mm512_mask_add_ps(out, (__mmask16)(0x1111 << j), pairs, _mm512_permute_ps(pairs, 0x4e));
    }
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, out);
}

INLINE void mean_rows(const int rows, tier_rows *state, int first, const int8_t *v, const int8_t *ahead, const weights *p) {
    int dim = state->dim;
    for (int d = 0; d < dim; d += 64) {
        __mmask64 exist = dim - d >= 64 ? ~0ull : (1ull << (dim - d)) - 1;
        __m512i high[TIER_ROWS][4], low[TIER_ROWS][4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) high[r][i] = low[r][i] = _mm512_setzero_si512();
        for (int quad = 0; quad < 4; quad++) {
            __m512i x[4];
            interleave(v + 4 * quad * dim + d, dim, exist, x);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) _mm_prefetch((const char *)(ahead + (4 * quad + i) * dim + d), _MM_HINT_T1);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                __m512i h = broadcast4(p[r].high + 4 * quad), l = broadcast4(p[r].low + 4 * quad);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    dot(&high[r][i], h, x[i]);
                    dot(&low[r][i], l, x[i]);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            float *acc = state->acc + (first + r) * state->padded + d;
            __m512 sum[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sum[i] = fixed_to_float(high[r][i], low[r][i]);
            transpose_lanes(sum);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                _mm512_storeu_ps(acc + 16 * i, _mm512_fmadd_ps(sum[i], _mm512_set1_ps(p[r].step),
                                                               _mm512_loadu_ps(acc + 16 * i)));
        }
    }
}

static void add_quads(tier_rows *state, const record_layout *at, const uint8_t *summary, const uint8_t *ahead, int half,
                      const float *w, int64_t stride) {
    int64_t from = at->quad_v + (int64_t)half * HALF_QUADS * state->dim;
    const int8_t *v = (const int8_t *)(summary + from), *next = (const int8_t *)(ahead + from);
    __m512 scale = halves_16(halves_at(summary, at->quad_v_scale) + half * HALF_QUADS);
    for (int first = 0; first < state->rows; first += TIER_ROWS) {
        int rows = state->rows - first < TIER_ROWS ? state->rows - first : TIER_ROWS;
        weights p[TIER_ROWS];
        for (int r = 0; r < rows; r++) {
            __m512 scaled = _mm512_mul_ps(sums_of_four(w + (first + r) * stride), scale);
            fix_weights(1, &scaled, &p[r]);
        }
        switch (rows) {
        case 1: mean_rows(1, state, first, v, next, p); break;
        case 2: mean_rows(2, state, first, v, next, p); break;
        case 3: mean_rows(3, state, first, v, next, p); break;
        default: mean_rows(4, state, first, v, next, p); break;
        }
    }
}

static void exponents(float *z, int n, float max, float *lanes) {
    __m512 sums = _mm512_loadu_ps(lanes);
    for (int i = 0; i < n; i += 16) {
        __mmask16 inside = n - i >= 16 ? 0xffff : 0xff;
        __m512 distance = _mm512_sub_ps(_mm512_maskz_loadu_ps(inside, z + i), _mm512_set1_ps(max));
        __mmask16 counts = _mm512_mask_cmp_ps_mask(inside, distance, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
        __m512 weight = _mm512_maskz_mov_ps(counts, exp2_16(distance));
        sums = _mm512_add_ps(sums, weight);
        _mm512_mask_storeu_ps(z + i, inside, weight);
    }
    _mm512_storeu_ps(lanes, sums);
}

const tier_ops tier_ops_avx512 = {
    .attend_units = attend_units, .score_units = score_units, .add_quads = add_quads, .exponents = exponents,
    TIER_ROWWISE_OPS};
