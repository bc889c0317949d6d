/* Which cluster a token belongs to, by the instructions of each CPU level: part of tier_record.c, which includes it.
 *
 * prepare_centroids puts the centroids into the level's own form. assign writes best[t]: the centroid of the largest
 * product with token t, the lowest of equals. Exact on every level.
 */
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define TILE_RUNS 4     /* runs of 16 tokens, and */
#define TILE_CLUSTERS 4 /* clusters, that share registers */

#if defined(__AVX512VNNI__)

static void prepare_centroids(work *w) {
    for (int i = 0; i < w->clusters * w->dim; i++) w->raised[i] = (uint8_t)(w->centroids[i] + 128);
}

/* Centroids plus 128 are the unsigned operand: each product is 128 * sum of the point too large. */
static void assign(work *w) {
    for (int t = 0; t < w->tokens; t += TILE_RUNS * LANES) {
        const int8_t *points = w->runs + (int64_t)t * w->dim;
        __m512i top[TILE_RUNS], index[TILE_RUNS];
#pragma GCC unroll 4
        for (int r = 0; r < TILE_RUNS; r++) {
            top[r] = _mm512_set1_epi32(INT32_MIN);
            index[r] = _mm512_setzero_si512();
        }
        for (int c = 0; c < w->clusters; c += TILE_CLUSTERS) {
            const uint8_t *centroid = w->raised + (int64_t)c * w->dim;
            __m512i acc[TILE_CLUSTERS][TILE_RUNS];
#pragma GCC unroll 4
            for (int i = 0; i < TILE_CLUSTERS; i++)
#pragma GCC unroll 4
                for (int r = 0; r < TILE_RUNS; r++) acc[i][r] = _mm512_setzero_si512();
            for (int d = 0; d < w->dim; d += 4) {
                __m512i p[TILE_RUNS];
#pragma GCC unroll 4
                for (int r = 0; r < TILE_RUNS; r++) p[r] = _mm512_loadu_si512(points + (r * w->dim + d) * LANES);
#pragma GCC unroll 4
                for (int i = 0; i < TILE_CLUSTERS; i++) {
                    int32_t word;
                    memcpy(&word, centroid + i * w->dim + d, 4);
                    __m512i x = _mm512_set1_epi32(word);
#pragma GCC unroll 4
                    for (int r = 0; r < TILE_RUNS; r++) acc[i][r] = _mm512_dpbusd_epi32(acc[i][r], x, p[r]);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < TILE_CLUSTERS; i++)
#pragma GCC unroll 4
                for (int r = 0; r < TILE_RUNS; r++) {
                    __mmask16 more = _mm512_cmpgt_epi32_mask(acc[i][r], top[r]);
                    top[r] = _mm512_mask_mov_epi32(top[r], more, acc[i][r]);
                    index[r] = _mm512_mask_mov_epi32(index[r], more, _mm512_set1_epi32(c + i));
                }
        }
#pragma GCC unroll 4
        for (int r = 0; r < TILE_RUNS; r++) {
            int at = t + r * LANES;
            _mm512_storeu_si512(w->best + at, index[r]);
        }
    }
}

#elif defined(__ARM_FEATURE_DOTPROD)

static void prepare_centroids(work *w) { (void)w; }

static void assign(work *w) {
    for (int t = 0; t < w->tokens; t += LANES) {
        const int8_t *points = w->runs + (int64_t)t * w->dim;
        int32x4_t top[4];
        uint32x4_t index[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            top[r] = vdupq_n_s32(INT32_MIN);
            index[r] = vdupq_n_u32(0);
        }
        for (int c = 0; c < w->clusters; c += TILE_CLUSTERS) {
            const int8_t *centroid = w->centroids + (int64_t)c * w->dim;
            int32x4_t acc[TILE_CLUSTERS][4];
#pragma GCC unroll 4
            for (int i = 0; i < TILE_CLUSTERS; i++)
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) acc[i][r] = vdupq_n_s32(0);
            for (int d = 0; d < w->dim; d += 4)
#pragma GCC unroll 4
                for (int i = 0; i < TILE_CLUSTERS; i++) {
                    int32_t word;
                    memcpy(&word, centroid + i * w->dim + d, 4);
                    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(word));
#pragma GCC unroll 4
                    for (int r = 0; r < 4; r++)
                        acc[i][r] = vdotq_s32(acc[i][r], vld1q_s8(points + d * LANES + 16 * r), x);
                }
#pragma GCC unroll 4
            for (int i = 0; i < TILE_CLUSTERS; i++)
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) {
                    uint32x4_t more = vcgtq_s32(acc[i][r], top[r]);
                    top[r] = vmaxq_s32(acc[i][r], top[r]);
                    index[r] = vbslq_u32(more, vdupq_n_u32((uint32_t)(c + i)), index[r]);
                }
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            vst1q_s32(w->best + t + 4 * r, vreinterpretq_s32_u32(index[r]));
        }
    }
}

#else /* products of whole numbers below 2^24 are exact in fp32, fused or not */

#if defined(__FMA__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define VECTORS (LANES / WIDTH)
#define SHARED (WIDTH / 2) /* clusters that share registers */

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));

INLINE vf add_product(vf acc, float x, vf y) {
#if defined(__FMA__)
    return (vf)_mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)y, (__m256)acc);
#else
    return acc + x * y;
#endif
}

static void prepare_centroids(work *w) {
    for (int i = 0; i < w->clusters * w->dim; i++) w->wide[i] = w->centroids[i];
}

INLINE void products(const work *w, int cluster, const float *run, vf acc[][VECTORS]) {
#pragma GCC unroll 4
    for (int i = 0; i < SHARED; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) acc[i][j] = (vf){0};
    const float *centroid = w->wide + (int64_t)cluster * w->dim;
    for (int d = 0; d < w->dim; d++) {
        vf points[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) memcpy(&points[j], run + d * LANES + WIDTH * j, sizeof points[j]);
#pragma GCC unroll 4
        for (int i = 0; i < SHARED; i++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) acc[i][j] = add_product(acc[i][j], centroid[i * w->dim + d], points[j]);
    }
}

static void assign(work *w) {
    float run[w->dim * LANES];
    for (int t = 0; t < w->tokens; t += LANES) {
        const int8_t *points = w->runs + (int64_t)t * w->dim;
        vf top[VECTORS];
        vi index[VECTORS];
        for (int d = 0; d < w->dim; d++)
            for (int i = 0; i < LANES; i++) run[d * LANES + i] = points[(d / 4 * LANES + i) * 4 + d % 4];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            top[j] = (vf){0} - 0x1p30f;
            index[j] = (vi){0};
        }
        for (int c = 0; c < w->clusters; c += SHARED) {
            vf acc[SHARED][VECTORS];
            products(w, c, run, acc);
#pragma GCC unroll 4
            for (int i = 0; i < SHARED; i++)
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) {
                    vi more = acc[i][j] > top[j];
                    top[j] = (vf)((more & (vi)acc[i][j]) | (~more & (vi)top[j]));
                    index[j] = (more & (c + i)) | (~more & index[j]);
                }
        }
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            memcpy(w->best + t + WIDTH * j, &index[j], sizeof index[j]);
        }
    }
}

#endif
