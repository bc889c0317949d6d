/* The largest entries of a row of masses, without sorting it: the maxima of blocks rule most of them out, a histogram
 * finds the border, only the border is sorted. */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "tier_decode.h"

#define BUCKETS 1024 /* 32 for a factor of two; the last holds everything below 2^-32 of the largest, by index */
#define SHIFT 18
#define BLOCK 16 /* entries that are looked at together; a record has 128 */

static int32_t float_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static int bucket_of(int32_t top, float x) { /* NaN goes somewhere, too */
    int64_t steps = ((int64_t)top - float_bits(x)) >> SHIFT;
    return steps < 0 ? 0 : (steps < BUCKETS ? (int)steps : BUCKETS - 1);
}

static int by_mass(const void *left, const void *right) { /* largest first, ties to the lowest index */
    const ranked *a = left, *b = right;
    if (a->mass != b->mass) return a->mass < b->mass ? 1 : -1;
    return a->index < b->index ? -1 : 1;
}

typedef struct border { /* whole buckets before `bucket`, and of it the entries up to `last` */
    int bucket;
    ranked last; /* index -1: none */
} border;

static int short_of(const choice *want, int taken, float mass) {
    return taken < want->least || (mass < want->wanted && taken < want->most);
}

static border find_border(const ranked *from, int n, const choice *want, int32_t top, ranked *space) {
    int counts[BUCKETS] = {0}, taken = 0, count = 0, b = 0;
    float masses[BUCKETS] = {0}, sum = 0.0f;
    for (int i = 0; i < n; i++) {
        int at = bucket_of(top, from[i].mass);
        counts[at]++;
        masses[at] += from[i].mass;
    }
    for (; b < BUCKETS; taken += counts[b], sum += masses[b], b++) {
        int after = taken + counts[b];
        if (after > want->least && (after > want->most || sum + masses[b] >= want->wanted)) break;
    }
    border out = {b, {0.0f, -1}};
    if (b == BUCKETS) return out;
    for (int i = 0; i < n; i++)
        if (bucket_of(top, from[i].mass) == b) space[count++] = from[i];
    if (b < BUCKETS - 1) qsort(space, (size_t)count, sizeof *space, by_mass);
    for (int i = 0; i < count && short_of(want, taken, sum); i++, taken++) {
        sum += space[i].mass;
        out.last = space[i];
    }
    return out;
}

static void block_maxima(const float *mass, int n, float *out) {
    for (int b = 0; b < n / BLOCK; b++) {
        float lanes[4];
        memcpy(lanes, mass + b * BLOCK, sizeof lanes);
        for (int i = 4; i < BLOCK; i += 4)
            for (int j = 0; j < 4; j++) lanes[j] = mass[b * BLOCK + i + j] > lanes[j] ? mass[b * BLOCK + i + j] : lanes[j];
        float low = lanes[0] > lanes[1] ? lanes[0] : lanes[1], high = lanes[2] > lanes[3] ? lanes[2] : lanes[3];
        out[b] = low > high ? low : high;
    }
}

/* A number that at least `count` of the blocks' maxima reach, so that the `count` largest entries do. */
static float reached_by(const float *maxima, int blocks, int count) {
    int counts[BUCKETS] = {0}, taken = 0, b = 0;
    float largest = 0.0f, limit;
    for (int i = 0; i < blocks; i++) largest = maxima[i] > largest ? maxima[i] : largest;
    int32_t top = float_bits(largest);
    for (int i = 0; i < blocks; i++) counts[bucket_of(top, maxima[i])]++;
    while (b < BUCKETS - 1 && (taken += counts[b]) < count) b++;
    int32_t bits = top - ((b + 1) << SHIFT) + 1; /* the least of its bucket */
    if (b == BUCKETS - 1 || bits <= 0) return 0.0f;
    memcpy(&limit, &bits, 4);
    return limit;
}

/* Entries of at least `limit`, in order; returns how many. */
static int take_from(const float *mass, const float *maxima, int n, float limit, ranked *out) {
    int count = 0;
    for (int b = 0; b < n / BLOCK; b++) {
        if (maxima[b] < limit) continue;
        for (int i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
            out[count] = (ranked){mass[i], i};
            count += mass[i] >= limit;
        }
    }
    return count;
}

int choose_largest(const float *mass, int n, choice want, ranked *space, int32_t *out) {
    /* All entries below the first limit together hold less than what may be left out. */
    float spare = want.sum > want.wanted ? want.sum - want.wanted : 0.0f, maxima[n / BLOCK];
    block_maxima(mass, n, maxima);
    float limit = spare / (float)n + FLT_MIN, reached = want.most < n / BLOCK ? reached_by(maxima, n / BLOCK, want.most) : 0.0f;
    int count = take_from(mass, maxima, n, limit > reached ? limit : reached, space);
    if (count < want.least) count = take_from(mass, maxima, n, FLT_MIN, space);
    float largest = 0.0f;
    for (int i = 0; i < count; i++) largest = space[i].mass > largest ? space[i].mass : largest;
    want.most = want.most < count ? want.most : count;
    want.least = want.least < want.most ? want.least : want.most;
    int32_t top = float_bits(largest);
    border end = find_border(space, count, &want, top, space + n);
    int chosen = 0;
    for (int i = 0; i < count; i++) {
        ranked entry = space[i];
        int at = bucket_of(top, entry.mass), inside = at == end.bucket && end.last.index >= 0;
        int tied = inside && entry.index <= end.last.index && (at == BUCKETS - 1 || entry.mass == end.last.mass);
        int larger = inside && at < BUCKETS - 1 && entry.mass > end.last.mass;
        out[chosen] = entry.index;
        chosen += at < end.bucket || tied || larger;
    }
    return chosen;
}
