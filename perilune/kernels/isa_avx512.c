/* Linear and attention for AVX-512 with VNNI and BF16 (Zen 4, Sapphire Rapids and later).
 *
 * Weights: 16 rows lie side by side, so that sums never cross lanes. Activations are 16-bit fixed point per block of 32,
 * split into two signed bytes (x = scale * (256 high + low), error max|x| / 65000): VPDPBUSD then does 64 products at once.
 * Attention: pairs are broadcast (query pairs over tokens, probability pairs over dims) into VDPBF16PS.
 */
#include <immintrin.h>

#include "rowwise.h"
#include "tier.h"
#include "tier_close.h"

#define INLINE static inline __attribute__((always_inline))
#define SLACK 8.0f /* in powers of two */

/* ------------------------------------------------------------------------------------------ activations */

typedef struct fixed_block { /* 32 activations */
    int8_t high[BLOCK_TOKENS], low[BLOCK_TOKENS];
    float scale, sum;
} fixed_block;

/* Rows of a chunk lie side by side: [chunk][block][row]. */
static int64_t prepared_index(int row, int rows, int blocks, int block) {
    int start = row / ROW_CHUNK * ROW_CHUNK, width = rows - start < ROW_CHUNK ? rows - start : ROW_CHUNK;
    return (int64_t)start * blocks + (int64_t)block * width + (row - start);
}

static void prepare_fixed(const float *x, int cols, int row, int rows, fixed_block *out) {
    int blocks = cols / BLOCK_TOKENS;
    for (int b = 0; b < blocks; b++) {
        __m512 x0 = _mm512_loadu_ps(x + b * BLOCK_TOKENS), x1 = _mm512_loadu_ps(x + b * BLOCK_TOKENS + 16);
        float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
        float scale = top / 32512.0f; /* 127 * 256: the high byte of the largest stays 127 */
        __m512 inverse = _mm512_set1_ps(top > 0.0f ? 32512.0f / top : 0.0f);
        __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse));
        __m512i q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse));
        __m512i half = _mm512_set1_epi32(128);
        __m512i high0 = _mm512_srai_epi32(_mm512_add_epi32(q0, half), 8);
        __m512i high1 = _mm512_srai_epi32(_mm512_add_epi32(q1, half), 8);
        fixed_block *block = out + prepared_index(row, rows, blocks, b);
        _mm_storeu_si128((__m128i *)block->high, _mm512_cvtepi32_epi8(high0));
        _mm_storeu_si128((__m128i *)(block->high + 16), _mm512_cvtepi32_epi8(high1));
        _mm_storeu_si128((__m128i *)block->low, _mm512_cvtepi32_epi8(q0)); /* truncates to the low byte */
        _mm_storeu_si128((__m128i *)(block->low + 16), _mm512_cvtepi32_epi8(q1));
        block->scale = scale;
        block->sum = scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
    }
}

/* Plain fp32, two columns of a row side by side: [chunk][column pair][row][2]. */
static void prepare_pairs(const float *x, int cols, int row, int rows, float *out) {
    for (int p = 0; p < cols / 2; p++) memcpy(out + 2 * prepared_index(row, rows, cols / 2, p), x + 2 * p, 8);
}

static void prepare(int kind, const float *x, int cols, int row, int rows, void *prepared) {
    if (kind == KIND_BF16) prepare_pairs(x, cols, row, rows, prepared);
    else prepare_fixed(x, cols, row, rows, prepared);
}

/* ---------------------------------------------------------------------------------------------- linear */

INLINE __m512i broadcast4(const int8_t *bytes) {
    int32_t word;
    memcpy(&word, bytes, 4);
    return _mm512_set1_epi32(word);
}

/* acc[t] += 16 weight rows . activation row t, over one tile. */
INLINE void tile_fixed(const int q4, const int rows, const uint8_t *bytes, const fixed_block *x, int blocks, __m512 *acc) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int t = 0; t < rows; t++) acc[t] = _mm512_setzero_ps();
    for (int b = 0; b < blocks; b++, bytes += q4 ? 320 : 544, x += rows) {
        __m512i w[8];
        __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)bytes)), m;
        if (q4) {
            m = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(bytes + 32)));
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                __m512i both = _mm512_loadu_si512(bytes + 64 + 64 * c);
                w[2 * c] = _mm512_and_si512(both, nibble);
                w[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            }
        } else {
            m = _mm512_mul_ps(d, _mm512_set1_ps(-128.0f));
#pragma GCC unroll 8
            for (int c = 0; c < 8; c++) w[c] = _mm512_loadu_si512(bytes + 32 + 64 * c);
        }
#pragma GCC unroll 8
        for (int t = 0; t < rows; t++) {
            __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int c = 0; c < 8; c++) {
                high = _mm512_dpbusd_epi32(high, w[c], broadcast4(x[t].high + 4 * c));
                low = _mm512_dpbusd_epi32(low, w[c], broadcast4(x[t].low + 4 * c));
            }
            __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
            acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(x[t].scale)), dot, acc[t]);
            acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(x[t].sum), acc[t]);
        }
    }
}

INLINE void tile_bf16(const int rows, const uint8_t *bytes, const float *x, int pairs, __m512 *acc) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    __m512 odd_acc[ROW_CHUNK];
    for (int t = 0; t < rows; t++) acc[t] = odd_acc[t] = _mm512_setzero_ps();
    for (int p = 0; p < pairs; p++, bytes += 64, x += 2 * rows) {
        __m512i words = _mm512_loadu_si512(bytes);
        __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
#pragma GCC unroll 8
        for (int t = 0; t < rows; t++) {
            acc[t] = _mm512_fmadd_ps(even, _mm512_set1_ps(x[2 * t]), acc[t]);
            odd_acc[t] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x[2 * t + 1]), odd_acc[t]);
        }
    }
    for (int t = 0; t < rows; t++) acc[t] = _mm512_add_ps(acc[t], odd_acc[t]);
}

INLINE void tile_any(const int rows, const packed *weight, int tile, const void *x, __m512 *acc) {
    int blocks = weight->cols / BLOCK_TOKENS;
    if (weight->kind == KIND_Q4)
        tile_fixed(1, rows, weight->data + (int64_t)tile * blocks * 320, x, blocks, acc);
    else if (weight->kind == KIND_INT8)
        tile_fixed(0, rows, weight->data + (int64_t)tile * blocks * 544, x, blocks, acc);
    else
        tile_bf16(rows, weight->data + (int64_t)tile * weight->cols * 32, x, weight->cols / 2, acc);
}

static void tile_rows(int rows, const packed *weight, int tile, const void *x, __m512 *acc) {
    switch (rows) {
    case 1: tile_any(1, weight, tile, x, acc); break;
    case 2: tile_any(2, weight, tile, x, acc); break;
    case 3: tile_any(3, weight, tile, x, acc); break;
    case 4: tile_any(4, weight, tile, x, acc); break;
    case 5: tile_any(5, weight, tile, x, acc); break;
    case 6: tile_any(6, weight, tile, x, acc); break;
    case 7: tile_any(7, weight, tile, x, acc); break;
    default: tile_any(8, weight, tile, x, acc); break;
    }
}

static void linear(const packed *weight, int begin, int end, const void *prepared, int rows, const float *bias,
                   float *out, int64_t stride) {
    int64_t row_bytes = weight->kind == KIND_BF16 ? 4 * (int64_t)weight->cols
                                                  : (int64_t)sizeof(fixed_block) * (weight->cols / BLOCK_TOKENS);
    for (int tile = begin; tile < end; tile++) {
        int base = tile * ROW_TILE, count = weight->rows - base < ROW_TILE ? weight->rows - base : ROW_TILE;
        __mmask16 valid = (__mmask16)((1u << count) - 1);
        __m512 extra = bias ? _mm512_maskz_loadu_ps(valid, bias + base) : _mm512_setzero_ps();
        for (int start = 0; start < rows; start += ROW_CHUNK) {
            int chunk = rows - start < ROW_CHUNK ? rows - start : ROW_CHUNK;
            __m512 acc[ROW_CHUNK];
            tile_rows(chunk, weight, tile, (const uint8_t *)prepared + start * row_bytes, acc);
            for (int t = 0; t < chunk; t++)
                _mm512_mask_storeu_ps(out + (start + t) * stride + base, valid, _mm512_add_ps(acc[t], extra));
        }
    }
}

/* ------------------------------------------------------------------------------------------- attention */

/* Degree 3: relative error 1e-4, a twentieth of bf16's rounding step; exactly 1 at 0. */
INLINE __m512 exp2_16(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, n), p = _mm512_set1_ps(0x1.c2a2180000000p-5f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.f00c520000000p-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62f5fa0000000p-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

INLINE __m512bh as_bf16(__m512i bits) { return (__m512bh)bits; }

INLINE __m512bh load_bf16(const uint16_t *p) { return as_bf16(_mm512_loadu_si512(p)); }

INLINE __m512bh broadcast_pair(const uint32_t *p) { return as_bf16(_mm512_set1_epi32((int)*p)); }

INLINE void scores(const int rows, const int fetch, const row_group *group, const kv_tile *tile, __m512 s[][4]) {
    const uint16_t *k0 = tile->k[0], *k1 = tile->k[1];
    const uint32_t *q = group->q;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) s[r][0] = s[r][1] = s[r][2] = s[r][3] = _mm512_setzero_ps();
    for (int pair = 0; pair < group->head_dim / 2; pair++, q += rows) {
        int at = pair * 2 * BLOCK_TOKENS;
        __m512bh k00 = load_bf16(k0 + at), k01 = load_bf16(k0 + at + 32);
        __m512bh k10 = load_bf16(k1 + at), k11 = load_bf16(k1 + at + 32);
        for (int b = 0; fetch && b < TILE_BLOCKS; b++) {
            _mm_prefetch((const char *)(tile->ahead_k[b] + at), _MM_HINT_T1);
            _mm_prefetch((const char *)(tile->ahead_k[b] + at + 32), _MM_HINT_T1);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m512bh x = broadcast_pair(q + r);
            s[r][0] = _mm512_dpbf16_ps(s[r][0], k00, x);
            s[r][1] = _mm512_dpbf16_ps(s[r][1], k01, x);
            s[r][2] = _mm512_dpbf16_ps(s[r][2], k10, x);
            s[r][3] = _mm512_dpbf16_ps(s[r][3], k11, x);
        }
    }
}

INLINE void mask_row(__m512 s[4], int low, int high) { /* tokens low … high of the tile are seen */
    __m512i token = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int j = 0; j < 4; j++, token = _mm512_add_epi32(token, _mm512_set1_epi32(16))) {
        __mmask16 seen = _mm512_cmpge_epi32_mask(token, _mm512_set1_epi32(low)) &
                         _mm512_cmple_epi32_mask(token, _mm512_set1_epi32(high));
        s[j] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(MASKED), s[j]);
    }
}

/* Kept beside the sums where entropy is asked for: sums of weight * (score - max). */
static void shrink_moment(row_group *group, int r, float by, float shrink) {
    float *moment = group->moment + r * LANES;
    for (int j = 0; j < LANES; j++) moment[j] = shrink > 0.0f ? shrink * (moment[j] + by * group->sum[r * LANES + j]) : 0.0f;
}

static void add_moment(row_group *group, int r, const __m512 s[4], __m512 factor, __m512 minus_max) {
    __m512 sum = _mm512_loadu_ps(group->moment + r * LANES);
    for (int j = 0; j < 4; j++) {
        __m512 distance = _mm512_max_ps(_mm512_fmadd_ps(s[j], factor, minus_max), _mm512_set1_ps(-150.0f));
        sum = _mm512_fmadd_ps(exp2_16(distance), distance, sum);
    }
    _mm512_storeu_ps(group->moment + r * LANES, sum);
}

/* Scores to probabilities: bf16 [row][token], the row's new maximum and sum; returns by how much old sums shrink.
 *
 * The maximum moves only when a score passes it by SLACK (2^SLACK is small enough for bf16 and sums). It then hardly ever
 * does after a row's first tile, and the CPU, predicting that, needn't wait for it. */
INLINE float softmax_row(row_group *group, int r, __m512 s[4], float scale, uint16_t *probabilities) {
    __m512 top = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
    __m512 factor = _mm512_set1_ps(scale), limit = _mm512_set1_ps(group->max[r] + SLACK);
    float shrink = 1.0f;
    if (__builtin_expect(_mm512_cmp_ps_mask(_mm512_mul_ps(top, factor), limit, _CMP_GT_OQ), 0)) {
        float max = _mm512_reduce_max_ps(top) * scale, by = group->max[r] - max;
        shrink = _mm512_cvtss_f32(exp2_16(_mm512_set1_ps(by)));
        if (group->moment) shrink_moment(group, r, by, shrink);
        group->max[r] = max;
    }
    __m512 minus_max = _mm512_set1_ps(-group->max[r]);
    if (group->moment) add_moment(group, r, s, factor, minus_max);
    for (int j = 0; j < 4; j++) s[j] = exp2_16(_mm512_fmadd_ps(s[j], factor, minus_max));
    __m512 sum = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
    float *sums = group->sum + r * LANES;
    _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(shrink), sum));
    _mm512_storeu_si512(probabilities, (__m512i)_mm512_cvtne2ps_pbh(s[1], s[0]));
    _mm512_storeu_si512(probabilities + 32, (__m512i)_mm512_cvtne2ps_pbh(s[3], s[2]));
    return shrink;
}

/* acc[row][dim …] = acc * shrink + probabilities . V for `width` vectors of 16 dims. */
INLINE void values(const int rows, const int width, const int fetch, const row_group *group, const kv_tile *tile,
                   int dim, const float *shrink, const uint16_t (*probabilities)[TILE_TOKENS]) {
    int head_dim = group->head_dim;
    __m512 acc[GROUP_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++)
            acc[r][j] = _mm512_mul_ps(_mm512_loadu_ps(group->acc + r * head_dim + dim + 16 * j),
                                      _mm512_set1_ps(shrink[r]));
    for (int b = 0; b < TILE_BLOCKS; b++) {
        const uint16_t *v = tile->v[b] + 2 * dim, *ahead = fetch ? tile->ahead_v[b] + 2 * dim : v;
        for (int pair = 0; pair < BLOCK_TOKENS / 2; pair++, v += 2 * head_dim, ahead += 2 * head_dim) {
            __m512bh x[4];
#pragma GCC unroll 4
            for (int j = 0; j < width; j++) {
                x[j] = load_bf16(v + 32 * j);
                if (fetch) _mm_prefetch((const char *)(ahead + 32 * j), _MM_HINT_T1);
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                __m512bh p = broadcast_pair((const uint32_t *)(probabilities[r] + b * BLOCK_TOKENS) + pair);
#pragma GCC unroll 4
                for (int j = 0; j < width; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], x[j], p);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) _mm512_storeu_ps(group->acc + r * head_dim + dim + 16 * j, acc[r][j]);
}

INLINE void attend_rows(const int rows, const int fetch, row_group *group, const kv_tile *tile, float scale) {
    __m512 s[GROUP_ROWS][4];
    float shrink[GROUP_ROWS];
    _Alignas(64) uint16_t probabilities[GROUP_ROWS][TILE_TOKENS];
    scores(rows, fetch, group, tile, s);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        int low = group->first[r] - tile->start, high = group->last[r] - tile->start;
        if (low >= TILE_TOKENS || high < 0) { /* nothing to see here: the row stays exactly as it is */
            shrink[r] = 1.0f;
            memset(probabilities[r], 0, sizeof probabilities[r]);
            continue;
        }
        if (low > 0 || high < TILE_TOKENS - 1) mask_row(s[r], low, high);
        shrink[r] = softmax_row(group, r, s[r], scale, probabilities[r]);
    }
    int dim = 0;
    for (; dim + 64 <= group->head_dim; dim += 64) values(rows, 4, fetch, group, tile, dim, shrink, probabilities);
    for (; dim + 32 <= group->head_dim; dim += 32) values(rows, 2, fetch, group, tile, dim, shrink, probabilities);
    for (; dim < group->head_dim; dim += 16) values(rows, 1, fetch, group, tile, dim, shrink, probabilities);
}

INLINE void attend_any(const int fetch, row_group *group, const kv_tile *tile, float scale) {
    switch (group->rows) {
    case 1: attend_rows(1, fetch, group, tile, scale); break;
    case 2: attend_rows(2, fetch, group, tile, scale); break;
    case 3: attend_rows(3, fetch, group, tile, scale); break;
    case 4: attend_rows(4, fetch, group, tile, scale); break;
    case 5: attend_rows(5, fetch, group, tile, scale); break;
    default: attend_rows(6, fetch, group, tile, scale); break;
    }
}

static void attend(row_group *group, const kv_tile *tile, float scale) {
    if (tile->ahead_k[0]) attend_any(1, group, tile, scale);
    else attend_any(0, group, tile, scale);
}

/* ------------------------------------------------------------------------------------------- row-wise, faster */

static void to_bf16(const float *x, int64_t n, uint16_t *out) { /* like float_to_bf16, but subnormals become 0 */
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
    row_to_bf16(x + i, n - i, out + i);
}

INLINE __m512 inverse(__m512 x) { /* 1 / x for 1 <= x <= 2^126: relative error 2^-27 */
    __m512 guess = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(2.0f)));
}

INLINE __m512 exp2_exact(__m512 x) { /* exp2_fast of rowwise.h */
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(126.0f));
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, n), p = _mm512_set1_ps(0x1.5bba14p-10f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3cea8ap-7f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6b752p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebf9bcp-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e42ap-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

static void act_mul(int act, const float *gate, const float *up, int n, float *out) {
    int i = 0;
    for (; act == ACT_SILU && i + 16 <= n; i += 16) {
        __m512 x = _mm512_loadu_ps(gate + i), one = _mm512_set1_ps(1.0f);
        __m512 power = exp2_exact(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
        __m512 product = _mm512_mul_ps(x, _mm512_loadu_ps(up + i));
        _mm512_storeu_ps(out + i, _mm512_mul_ps(product, inverse(_mm512_add_ps(power, one))));
    }
    row_act_mul(act, gate + i, up + i, n - i, out + i);
}

/* ----------------------------------------------------------------------------------- units of closed segments */

INLINE __m512i interleave(__m512 low, __m512 high) { /* bf16 pairs (low[i], high[i]) */
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

INLINE __m512 code_at(__m512i codes, int byte) { /* an unsigned byte of each word */
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(codes, 8 * byte), _mm512_set1_epi32(255)));
}

INLINE __m512 signed_at(__m512i codes, int byte) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 24 - 8 * byte), 24));
}

static void open_unit(const unit_codes *unit, int head_dim, uint16_t *k, uint16_t *v) {
    float scale[head_dim], zero[head_dim], v_scale[UNIT_TOKENS];
    for (int d = 0; d < head_dim; d += 16) {
        _mm512_storeu_ps(scale + d, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(unit->k_scale + d))));
        _mm512_storeu_ps(zero + d, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(unit->k_zero + d))));
    }
    _mm512_storeu_ps(v_scale, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)unit->v_scale)));
    for (int d = 0; d < head_dim; d += 4) { /* four channels of 16 tokens */
        __m512i codes = _mm512_loadu_si512(unit->k + d * UNIT_TOKENS);
        __m512 x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            x[i] = _mm512_fmadd_ps(code_at(codes, i), _mm512_set1_ps(scale[d + i]), _mm512_set1_ps(zero[d + i]));
        _mm512_storeu_si512(k + d * BLOCK_TOKENS, interleave(x[0], x[1]));
        _mm512_storeu_si512(k + (d + 2) * BLOCK_TOKENS, interleave(x[2], x[3]));
    }
    for (int t = 0; t < UNIT_TOKENS; t += 4) /* four tokens of all dims */
        for (int d = 0; d < head_dim; d += 16) {
            __m512i codes = _mm512_loadu_si512(unit->v + t * head_dim + 4 * d);
            __m512 x[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) x[i] = _mm512_mul_ps(signed_at(codes, i), _mm512_set1_ps(v_scale[t + i]));
            _mm512_storeu_si512(v + t * head_dim + 2 * d, interleave(x[0], x[1]));
            _mm512_storeu_si512(v + (t + 2) * head_dim + 2 * d, interleave(x[2], x[3]));
        }
}

const kernel_ops ops_avx512 = {
    .name = "AVX-512 VNNI + BF16", .tiers = &tier_ops_avx512, .prepare = prepare, .linear = linear, .attend = attend,
    .open_unit = open_unit, .close_record = close_record_avx512, ROWWISE_OPS(to_bf16, act_mul)};
