/* Which units are read exactly: by estimated mass, summed over the queries of a KV head. */
#include "lanes.h"
#include "tier_decode.h"

/* The largest exponent and, relative to it, the sum of weights of everything that a row reads exactly already. */
static float exact_sum(const tier_sequence *at, const tier_plan *plan, int q_head, float *top) {
    int64_t first = (int64_t)q_head * at->capacity;
    const float *max = at->sums[SUM_MAX] + first, *sum = at->sums[SUM_WEIGHT] + first;
    float total = 0.0f;
    int parts = exact_parts(plan);
    for (int p = 0; p < parts; p++) *top = max[p] > *top ? max[p] : *top;
    for (int p = 0; p < parts; p++) total += max[p] <= MASKED ? 0.0f : sum[p] * exp2_fast(max[p] - *top);
    return total;
}

/* One row's scores to weights; returns what turns weights into mass. */
static float weigh(const decode_job *job, const tier_plan *plan, const tier_sequence *at, int head, int row) {
    const tier_ops *ops = job->ctx->ops->tiers;
    head_state *state = &at->heads[head];
    int units = plan->far * SEGMENT_UNITS;
    float *z = state->units + (int64_t)row * state->unit_stride, lanes[SUM_LANES] = {0}, top = ops->largest(z, units);
    float exact = exact_sum(at, plan, head * group_rows(job->shape) + row, &top);
    ops->exponents(z, units, top, lanes);
    state->top[row] = top;
    return 1.0f / (exact + add_lanes(lanes));
}

void tier_choose_units(const decode_job *job, const tier_plan *plan, int sequence, int head) {
    const tier_ops *ops = job->ctx->ops->tiers;
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    head_state *state = &at->heads[head];
    int rows = group_rows(job->shape), count = plan->far * SEGMENT_UNITS;
    float factor[rows], lanes[SUM_LANES] = {0};
    for (int r = 0; r < rows; r++) factor[r] = weigh(job, plan, at, head, r);
    ops->mass(state->units, state->unit_stride, rows, factor, count, state->mass, lanes);
    float far = add_lanes(lanes);
    choice want = {far, plan->policy->top_p * far, plan->least, plan->most};
    state->num_chosen = choose_largest(state->mass, count, want, state->space, state->chosen);
    for (int i = 0; i < state->num_chosen; i++)
        for (int r = 0; r < rows; r++) state->units[(int64_t)r * state->unit_stride + state->chosen[i]] = 0.0f;
}
