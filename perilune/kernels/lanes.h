/* Sums in 16 explicit lanes, powers and logarithms: the same on every CPU level, in plain C that vectorises. */
#ifndef PERILUNE_LANES_H
#define PERILUNE_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

/* 2^x; 0 below -126. Degree-5 polynomial on [-0.5, 0.5], relative error 1e-7. */
static inline float exp2_fast(float x) {
    x = x < -126.0f ? -126.0f : (x > 126.0f ? 126.0f : x);
    float shifted = x + 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer */
    float f = x - (shifted - 12582912.0f);
    float p = 0x1.5bba14p-10f;
    p = p * f + 0x1.3cea8ap-7f;
    p = p * f + 0x1.c6b752p-5f;
    p = p * f + 0x1.ebf9bcp-3f;
    p = p * f + 0x1.62e42ap-1f;
    p = p * f + 1.0f;
    union { float f; int32_t i; } rounded = {shifted}, power;
    power.i = (rounded.i - 0x4b400000 + 127) << 23;
    return p * power.f;
}

/* 2^x for whole x and the chord between, at most 6 % above; x within -126 and 127, not NaN. */
static inline float exp2_chord(float x) {
    union { int32_t i; float f; } bits = {(int32_t)(x * 8388608.0f + 1065353216.0f)}; /* 2^23, 127 * 2^23 */
    return bits.f;
}

static inline float add_lanes(const float lanes[LANES]) {
    float pairs[LANES / 2];
    for (int i = 0; i < 8; i++) pairs[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; i++) pairs[i] += pairs[i + 4];
    return (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]);
}

/* log2 by exponent and atanh series of the mantissa in [0.7, 1.4]; error 1e-5. */
static inline float log2_fast(float x) {
    union { float f; int32_t i; } bits = {x}, mantissa;
    int32_t exponent = (bits.i - 0x3f3504f3) >> 23;
    mantissa.i = (int32_t)((uint32_t)bits.i - ((uint32_t)exponent << 23));
    float t = (mantissa.f - 1.0f) / (mantissa.f + 1.0f), square = t * t;
    return (float)exponent + t * (2.88539008f + square * (0.961796694f + square * (0.577078016f + square * 0.412198583f)));
}

#endif
