/* Row-wise primitives of tier.h in plain C that the compiler vectorises; every CPU level compiles its own copy. */
#ifndef PERILUNE_TIER_ROWWISE_H
#define PERILUNE_TIER_ROWWISE_H

#include "lanes.h"
#include "tier.h"

static float row_largest(const float *x, int n) {
    float lanes[8];
    memcpy(lanes, x, sizeof lanes);
    for (int i = 8; i < n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (int j = 1; j < 8; j++) lanes[0] = lanes[j] > lanes[0] ? lanes[j] : lanes[0];
    return lanes[0];
}

static void row_mass(const float *e, int64_t stride, int rows, const float *factor, int n, float *mass, float *lanes) {
    for (int i = 0; i < n; i += LANES) {
        float sum[LANES] = {0};
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < LANES; j++) sum[j] += factor[r] * e[r * stride + i + j];
        for (int j = 0; j < LANES; j++) {
            mass[i + j] = sum[j];
            lanes[j] += sum[j];
        }
    }
}

static void row_combine(const float *acc, const float *factors, int parts, int dim, float *out) {
    for (int p = 0; p < parts; p++, acc += dim)
        for (int i = 0; factors[p] > 0.0f && i < dim; i++) out[i] += factors[p] * acc[i];
}

static float row_log_moment(const float *w, int n) {
    float lanes[8] = {0};
    for (int i = 0; i < n; i += 8)
        for (int j = 0; j < 8; j++) {
            float weight = w[i + j];
            lanes[j] += weight > 0.0f ? weight * log2_fast(weight) : 0.0f;
        }
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

#define TIER_ROWWISE_OPS                                                                                        \
    .largest = row_largest, .mass = row_mass, .combine = row_combine, .log_moment = row_log_moment

#endif
