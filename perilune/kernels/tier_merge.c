/* The end of decode attention over closed segments: a row's parts become one output, and statistics of it. */
#include <math.h>
#include <string.h>

#include "lanes.h"
#include "tier_decode.h"

/* factors[p] = 2^(exponent of part p - top) */
static void note_stats(const tier_sequence *at, const tier_plan *plan, int64_t first, const float *factors, float top,
                       float *stats) {
    float masses[4] = {0}, moment = 0.0f;
    int ends[] = {exact_parts(plan), plan->selected, plan->mean};
    for (int kind = 0, p = 0, end = 0; kind < 3; kind++)
        for (end += ends[kind]; p < end; p++) {
            float sum = at->sums[SUM_WEIGHT][first + p];
            if (factors[p] == 0.0f || sum == 0.0f) continue;
            masses[kind] += factors[p] * sum;
            float below = at->sums[SUM_MAX][first + p] - top;
            moment += factors[p] * (at->sums[SUM_MOMENT][first + p] + below * sum);
            if (kind == 2) masses[STAT_BORDER] += factors[p] * at->sums[SUM_BORDER][first + p];
        }
    float total = masses[0] + masses[1] + masses[2], tokens = (float)(plan->length > 2 ? plan->length : 2);
    for (int i = 0; i < 4; i++) stats[i] = masses[i] / total;
    stats[STAT_ENTROPY] = (log2f(total) - moment / total) / log2f(tokens);
}

void tier_merge(const decode_job *job, int sequence, int q_head, float *out) {
    const tier_ops *ops = job->ctx->ops->tiers;
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    tier_plan plan = tier_plan_of(job, sequence, q_head / group_rows(job->shape));
    int dim = job->shape->head_dim, parts = parts_of(&plan), plain = plan.near, padded = (parts + 7) / 8 * 8;
    int64_t first = (int64_t)q_head * at->capacity, since_ns = tier_now_ns(job);
    const float *max = at->sums[SUM_MAX] + first, *sum = at->sums[SUM_WEIGHT] + first, *acc = at->acc + first * dim;
    float factors[padded], rotated[dim], lanes[SUM_LANES] = {0}, total = 0.0f;
    for (int p = 0; p < padded; p++) factors[p] = p < parts ? max[p] : MASKED;
    float top = ops->largest(factors, padded);
    ops->exponents(factors, padded, top, lanes);
    if (job->rows->closed->stats) note_stats(at, &plan, first, factors, top, at->stats + q_head * STATS);
    for (int p = parts - plan.mean; p < parts; p++) factors[p] *= plan.policy->summary_weight;
    for (int p = 0; p < parts; p++) total += factors[p] * sum[p];
    memset(out, 0, sizeof(float) * (size_t)dim);
    memset(rotated, 0, sizeof rotated);
    ops->combine(acc, factors, plain, dim, out);
    ops->combine(acc + plain * dim, factors + plain, parts - plain, dim, rotated);
    if (parts > plain) rotate_values(rotated, dim);
    for (int i = 0; i < dim; i++) out[i] = (out[i] + rotated[i]) / total;
    tier_add_time(job, TIME_MERGE, since_ns);
}

void tier_stats(const decode_job *job, int sequence) {
    const segments *closed = job->rows->closed;
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    if (!closed->stats || job->window > 0) return; /* of layers that attend to everything */
    float *stats = closed->stats + ((int64_t)sequence * closed->pool.num_layers + job->layer) * STATS;
    for (int i = 0; i < STATS; i++) stats[i] = 0.0f;
    for (int h = 0; h < job->shape->num_q_heads; h++)
        for (int i = 0; i < STAT_TOKENS; i++) stats[i] += at->stats[h * STATS + i] / (float)job->shape->num_q_heads;
    for (int h = 0; h < job->shape->num_kv_heads; h++) {
        tier_plan plan = tier_plan_of(job, sequence, h);
        for (int p = 0; p < parts_of(&plan) - plan.mean; p++)
            stats[STAT_TOKENS] += at->sums[SUM_TOKENS][part_index(job, at, h, p)] / (float)job->shape->num_kv_heads;
    }
}
