/* Row-wise primitives of tier.h in plain C that the compiler vectorises; every CPU level compiles its own copy. */
#ifndef PERILUNE_TIER_ROWWISE_H
#define PERILUNE_TIER_ROWWISE_H

#include "lanes.h"
#include "tier.h"

static void row_mass(const float *e, int64_t stride, int rows, const float *factor, int n, float *mass) {
    for (int i = 0; i < n; i++) mass[i] = factor[0] * e[i];
    for (int r = 1; r < rows; r++)
        for (int i = 0; i < n; i++) mass[i] += factor[r] * e[r * stride + i];
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

#define TIER_ROWWISE_OPS .mass = row_mass, .log_moment = row_log_moment

#endif
