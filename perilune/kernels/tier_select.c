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

static float largest(const float *x, int n) {
    float lanes[8];
    for (int j = 0; j < 8; j++) lanes[j] = MASKED;
    for (int i = 0; i < n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (int j = 1; j < 8; j++) lanes[0] = lanes[j] > lanes[0] ? lanes[j] : lanes[0];
    return lanes[0];
}

static float lanes_total(const float *lanes) {
    float total = 0.0f;
    for (int j = 0; j < SUM_LANES; j++) total += lanes[j];
    return total;
}

void tier_open_groups(const decode_job *job, int sequence, int head) {
    const tier_ops *ops = job->ctx->ops->tiers;
    tier_plan plan = tier_plan_of(job, sequence);
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    head_state *state = &at->heads[head];
    int rows = group_rows(job->shape), n = plan.far * SEGMENT_GROUPS, count = 0;
    float factor[rows], far = 0.0f;
    for (int r = 0; r < rows; r++) {
        float *z = state->groups + (int64_t)r * state->group_stride, *e = state->spare + (int64_t)r * state->group_stride;
        float top = largest(z, n), lanes[SUM_LANES] = {0};
        float exact = exact_sum(at, &plan, head * rows + r, &top);
        memcpy(e, z, sizeof(float) * (size_t)n);
        ops->exponents(e, n, top, lanes);
        factor[r] = 1.0f / (exact + lanes_total(lanes));
    }
    ops->mass(state->spare, state->group_stride, rows, factor, n, state->mass);
    for (int g = 0; g < n; g++)
        if (state->groups[g] > MASKED) {
            state->ids[count] = g;
            state->mass[count] = state->mass[g];
            far += state->mass[count++];
        }
    choice want = {plan.policy->group_share * far, 1, count};
    state->num_open = choose_largest(state->mass, count, want, state->space, state->open);
    for (int i = 0; i < state->num_open; i++) {
        state->open[i] = state->ids[state->open[i]];
        for (int r = 0; r < rows; r++) state->groups[(int64_t)r * state->group_stride + state->open[i]] = MASKED;
    }
}

/* Scores to weights; returns the estimated mass of the groups not opened. Factors turn weights into mass. */
static float weigh(const decode_job *job, const tier_plan *plan, int sequence, int head, float *factor) {
    const tier_ops *ops = job->ctx->ops->tiers;
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    head_state *state = &at->heads[head];
    int rows = group_rows(job->shape), units = plan->far * SEGMENT_UNITS, groups = plan->far * SEGMENT_GROUPS;
    float shut = 0.0f;
    for (int r = 0; r < rows; r++) {
        float *z = state->units + (int64_t)r * state->unit_stride, *zg = state->groups + (int64_t)r * state->group_stride;
        float top = MASKED, lanes[SUM_LANES] = {0}, shut_lanes[SUM_LANES] = {0};
        if (plan->two_level) {
            top = largest(zg, groups);
            for (int i = 0; i < state->num_open; i++) {
                float group_top = largest(z + state->open[i] * GROUP_UNITS, GROUP_UNITS);
                top = group_top > top ? group_top : top;
            }
        } else top = largest(z, units);
        float exact = exact_sum(at, plan, head * rows + r, &top);
        if (plan->two_level) {
            ops->exponents(zg, groups, top, shut_lanes);
            for (int i = 0; i < state->num_open; i++)
                ops->exponents(z + state->open[i] * GROUP_UNITS, GROUP_UNITS, top, lanes);
        } else ops->exponents(z, units, top, lanes);
        state->top[r] = top;
        factor[r] = 1.0f / (exact + lanes_total(lanes) + lanes_total(shut_lanes));
        shut += lanes_total(shut_lanes) * factor[r];
    }
    return shut;
}

void tier_choose_units(const decode_job *job, int sequence, int head) {
    const tier_ops *ops = job->ctx->ops->tiers;
    tier_plan plan = tier_plan_of(job, sequence);
    head_state *state = &tier_memory_of(job)->sequences[sequence].heads[head];
    int rows = group_rows(job->shape), opened = plan.two_level ? state->num_open : plan.far * SEGMENT_GROUPS, count = 0;
    float factor[rows], far = weigh(job, &plan, sequence, head, factor);
    for (int i = 0; i < opened; i++) {
        int group = plan.two_level ? state->open[i] : i;
        int present = units_in(job, summary_of(job, sequence, head, group / SEGMENT_GROUPS), group % SEGMENT_GROUPS);
        ops->mass(state->units + group * GROUP_UNITS, state->unit_stride, rows, factor, GROUP_UNITS, state->mass + count);
        for (int u = 0; u < present; u++, count++) {
            state->ids[count] = group * GROUP_UNITS + u;
            far += state->mass[count];
        }
    }
    choice want = {plan.policy->top_p * far, plan.least, plan.most};
    state->num_chosen = choose_largest(state->mass, count, want, state->space, state->chosen);
    for (int i = 0; i < state->num_chosen; i++) {
        int unit = state->chosen[i] = state->ids[state->chosen[i]];
        for (int r = 0; r < rows; r++) state->units[(int64_t)r * state->unit_stride + unit] = 0.0f;
    }
}
