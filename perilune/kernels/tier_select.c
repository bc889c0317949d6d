/* Which groups are opened and which units are read exactly: by estimated mass, summed over the queries of a KV head. */
#include <string.h>

#include "lanes.h"
#include "tier_decode.h"

/* The largest exponent and, relative to it, the sum of weights of everything that a row reads exactly already. */
static float exact_sum(const tier_sequence *at, const tier_plan *plan, int q_head, float *top) {
    int64_t first = (int64_t)q_head * at->capacity;
    const float *max = at->sums[SUM_MAX] + first, *sum = at->sums[SUM_WEIGHT] + first;
    float total = 0.0f;
    int parts = plan->near + plan->outlier + plan->whole;
    for (int p = 0; p < parts; p++) *top = max[p] > *top ? max[p] : *top;
    for (int p = 0; p < parts; p++) total += max[p] <= MASKED ? 0.0f : sum[p] * exp2_fast(max[p] - *top);
    return total;
}

void tier_open_groups(const decode_job *job, const tier_plan *plan, int sequence, int head) {
    const tier_ops *ops = job->ctx->ops->tiers;
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    head_state *state = &at->heads[head];
    int rows = group_rows(job->shape), n = plan->far * SEGMENT_GROUPS;
    float factor[rows], lanes[SUM_LANES] = {0};
    for (int r = 0; r < rows; r++) {
        float *z = state->groups + (int64_t)r * state->group_stride, *e = state->spare + (int64_t)r * state->group_stride;
        float top = ops->largest(z, n), sums[SUM_LANES] = {0};
        float exact = exact_sum(at, plan, head * rows + r, &top);
        memcpy(e, z, sizeof(float) * (size_t)n);
        ops->exponents(e, n, top, sums);
        factor[r] = 1.0f / (exact + add_lanes(sums));
    }
    int even = n / SUM_LANES * SUM_LANES; /* a segment has 8 groups */
    ops->mass(state->spare, state->group_stride, rows, factor, even, state->mass, lanes);
    for (int g = even; g < n; g++) {
        state->mass[g] = 0.0f;
        for (int r = 0; r < rows; r++) state->mass[g] += factor[r] * state->spare[(int64_t)r * state->group_stride + g];
        lanes[g - even] += state->mass[g];
    }
    float far = add_lanes(lanes);
    choice want = {far, plan->policy->group_share * far, 1, n};
    state->num_open = choose_largest(state->mass, n, want, state->space, state->open);
    for (int i = 0; i < state->num_open; i++)
        for (int r = 0; r < rows; r++) state->groups[(int64_t)r * state->group_stride + state->open[i]] = MASKED;
}

/* One row's scores to weights; returns what turns weights into mass. `shut` gets the mass of the groups not opened. */
static float weigh(const decode_job *job, const tier_plan *plan, const tier_sequence *at, int head, int row, float *shut) {
    const tier_ops *ops = job->ctx->ops->tiers;
    head_state *state = &at->heads[head];
    int units = plan->far * SEGMENT_UNITS, groups = plan->far * SEGMENT_GROUPS;
    float *z = state->units + (int64_t)row * state->unit_stride, *zg = state->groups + (int64_t)row * state->group_stride;
    float lanes[SUM_LANES] = {0}, shut_lanes[SUM_LANES] = {0}, top = MASKED;
    if (plan->two_level) top = ops->largest(zg, groups);
    else top = ops->largest(z, units);
    for (int i = 0; plan->two_level && i < state->num_open; i++) {
        float largest = ops->largest(z + state->open[i] * GROUP_UNITS, GROUP_UNITS);
        top = largest > top ? largest : top;
    }
    float exact = exact_sum(at, plan, head * group_rows(job->shape) + row, &top);
    if (plan->two_level) ops->exponents(zg, groups, top, shut_lanes);
    else ops->exponents(z, units, top, lanes);
    for (int i = 0; plan->two_level && i < state->num_open; i++)
        ops->exponents(z + state->open[i] * GROUP_UNITS, GROUP_UNITS, top, lanes);
    state->top[row] = top;
    float shut_sum = add_lanes(shut_lanes), factor = 1.0f / (exact + add_lanes(lanes) + shut_sum);
    *shut += shut_sum * factor;
    return factor;
}

void tier_choose_units(const decode_job *job, const tier_plan *plan, int sequence, int head) {
    const tier_ops *ops = job->ctx->ops->tiers;
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    head_state *state = &at->heads[head];
    int rows = group_rows(job->shape), count = (plan->two_level ? state->num_open * GROUP_UNITS : plan->far * SEGMENT_UNITS);
    float factor[rows], shut = 0.0f, lanes[SUM_LANES] = {0};
    for (int r = 0; r < rows; r++) factor[r] = weigh(job, plan, at, head, r, &shut);
    if (!plan->two_level) ops->mass(state->units, state->unit_stride, rows, factor, count, state->mass, lanes);
    for (int i = 0; plan->two_level && i < state->num_open; i++)
        ops->mass(state->units + state->open[i] * GROUP_UNITS, state->unit_stride, rows, factor, GROUP_UNITS,
                  state->mass + i * GROUP_UNITS, lanes);
    float inside = add_lanes(lanes), wanted = plan->policy->top_p * (inside + shut);
    choice want = {inside, wanted, plan->least, plan->most};
    state->num_chosen = choose_largest(state->mass, count, want, state->space, state->chosen);
    for (int i = 0; i < state->num_chosen; i++) {
        int unit = state->chosen[i];
        if (plan->two_level) unit = state->open[unit / GROUP_UNITS] * GROUP_UNITS + unit % GROUP_UNITS;
        state->chosen[i] = unit;
        for (int r = 0; r < rows; r++) state->units[(int64_t)r * state->unit_stride + unit] = 0.0f;
    }
}
