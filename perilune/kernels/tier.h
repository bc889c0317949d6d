/* What decode over closed segments adds to kernels.h: the primitives of each CPU level, and the state they work on.
 *
 * Scores are powers of two throughout: queries carry scale * log2(e), so a weight is 2^(score - max). tiers.py draws the
 * records; tier_decode.c hands out the work; tier_avx512.c and tier_generic.c do it.
 */
#ifndef PERILUNE_TIER_H
#define PERILUNE_TIER_H

#include "kernels.h"

#define TIER_ROWS 4     /* query rows that share registers */
#define GROUP_UNITS 16
#define QUAD_UNITS 4
#define HALF_QUADS (SEGMENT_QUADS / 2)
#define HALF_UNITS (SEGMENT_UNITS / 2)
#define MAX_SKETCH 100.0f /* exponent of a key's share of its unit: nothing overflows */
#define LOG2_UNIT_TOKENS 4.0f
#define SUM_LANES 16

/* The query rows of one KV head and their sums so far. `padded` is head_dim rounded up to 64. */
typedef struct tier_rows {
    int32_t rows, dim, padded;
    int32_t sketched;   /* whether units are scored by their keys' sketches, not by their means alone */
    float *q;           /* [rows][dim] */
    int8_t *fixed;      /* [rows][padded], for the index's means: rotated q = step * fixed */
    float *step;        /* [rows] */
    int32_t *total;     /* [rows], sum of `fixed` */
    uint8_t *signed_sums; /* [rows][dim / 4][16], for its signs: the sum of +-q of four channels by their four bits, */
    float *sum_step, *sum_zero; /* [rows]; all words' together are sum_step * (sum of signed_sums) - sum_zero */
    float *acc;         /* [rows][padded], weighted values */
    float *sum;         /* [rows][16], weights; lanes are added up at the end */
    float *moment;      /* [rows][16], weight * (score - max): what entropy needs */
    float *max;         /* [rows] */
} tier_rows;

typedef struct unit_ref { /* 16 tokens of a record's payload */
    const uint8_t *payload;
    int32_t unit;
} unit_ref;

struct tier_ops {
    /* Fold units into the running softmax; the two units of a 32-token block are quicker side by side. */
    void (*attend_units)(tier_rows *rows, const record_layout *at, const unit_ref *units, int count);
    /* z[row * stride + u] = log2 of the sum of 2^(q . key) of the 16 units of a group, with keys as sketched or all as the
     * mean; MASKED where there is none. */
    void (*score_units)(const tier_rows *rows, const record_layout *at, const uint8_t *summary, int group, float *z,
                        int64_t stride);
    /* acc += the weights w[row * stride + u] of half a record's units, times their quads' mean values. Those of `ahead`,
     * the record that comes next, may be fetched meanwhile. */
    void (*add_quads)(tier_rows *rows, const record_layout *at, const uint8_t *summary, const uint8_t *ahead, int half,
                      const float *w, int64_t stride);
    /* z = 2^(z - max), 0 where that is below 2^-126; adds the weights to 16 lanes. n is a multiple of 8. */
    void (*exponents)(float *z, int n, float max, float *lanes);
    /* Adds w to 16 lanes; returns the largest, 0 if all are below. n is a multiple of 16. */
    float (*sum)(const float *w, int n, float *lanes);
    float (*largest)(const float *x, int n); /* n is a multiple of 8 */
    /* mass[i] = sum over rows of factor[row] * e[row * stride + i], added to 16 lanes. n is a multiple of 16. */
    void (*mass)(const float *e, int64_t stride, int rows, const float *factor, int n, float *mass, float *lanes);
    /* out[i] += sum over parts of factors[p] * acc[p * dim + i] */
    void (*combine)(const float *acc, const float *factors, int parts, int dim, float *out);
    /* sum of w * log2(w), 0 for 0. n is a multiple of 8. */
    float (*log_moment)(const float *w, int n);
};

extern const tier_ops tier_ops_portable;
#if defined(__x86_64__)
extern const tier_ops tier_ops_avx2, tier_ops_avx512;
#elif defined(__aarch64__)
extern const tier_ops tier_ops_neon;
#endif

static inline const uint16_t *halves_at(const uint8_t *record, int32_t offset) {
    return (const uint16_t *)(record + offset);
}

#endif
