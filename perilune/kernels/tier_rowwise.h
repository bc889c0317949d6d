/* Row-wise primitives of tier.h in plain C that the compiler vectorises; every CPU level compiles its own copy. */
#ifndef PERILUNE_TIER_ROWWISE_H
#define PERILUNE_TIER_ROWWISE_H

#include "lanes.h"
#include "tier.h"

/* Sixteen lanes as one value: GCC 12 takes loops over arrays of lanes apart into scalars. All of it is inlined, so
 * no such value is ever passed. */
#pragma GCC diagnostic ignored "-Wpsabi"
typedef float lanes_float __attribute__((vector_size(64)));
typedef int32_t lanes_int __attribute__((vector_size(64)));

static inline lanes_float load_lanes(const float *at) {
    lanes_float out;
    memcpy(&out, at, sizeof out);
    return out;
}

static inline lanes_float larger_lanes(lanes_float a, lanes_float b) {
    lanes_int first = a > b;
    return (lanes_float)(((lanes_int)a & first) | ((lanes_int)b & ~first));
}

static inline float largest_lane(lanes_float x) {
    float out = x[0];
    for (int j = 1; j < LANES; j++) out = x[j] > out ? x[j] : out;
    return out;
}

static float row_largest(const float *x, int n) {
    float out = x[0];
    int i = 0;
    if (n >= LANES) {
        lanes_float top = load_lanes(x);
        for (i = LANES; i + LANES <= n; i += LANES) top = larger_lanes(load_lanes(x + i), top);
        out = largest_lane(top);
    }
    for (; i < n; i++) out = x[i] > out ? x[i] : out;
    return out;
}

static float row_sum(const float *w, int n, float *lanes) {
    lanes_float sum = load_lanes(lanes), top = {0};
    for (int i = 0; i < n; i += LANES) {
        lanes_float x = load_lanes(w + i);
        sum += x;
        top = larger_lanes(x, top);
    }
    memcpy(lanes, &sum, sizeof sum);
    return largest_lane(top);
}

static void row_mass(const float *e, int64_t stride, int rows, const float *factor, int n, float *mass, float *lanes) {
    lanes_float all = load_lanes(lanes);
    for (int i = 0; i < n; i += LANES) {
        lanes_float sum = factor[0] * load_lanes(e + i);
        for (int r = 1; r < rows; r++) sum += factor[r] * load_lanes(e + r * stride + i);
        memcpy(mass + i, &sum, sizeof sum);
        all += sum;
    }
    memcpy(lanes, &all, sizeof all);
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
    .sum = row_sum, .largest = row_largest, .mass = row_mass, .combine = row_combine, .log_moment = row_log_moment

#endif
