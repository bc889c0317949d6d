/* Decode attention over closed segments: which thread does which part of which sequence and KV head.
 *
 * Phases: what is read exactly anyway, and the index (TIER_EXACT); with two levels, the units of the groups that are opened
 * (TIER_UNITS); the units selected and the means of the others (TIER_FAR). Between them a head waits for its own choice
 * only. Parts lie at fixed places, so a row's sum has the same order with any number of threads and beside any other
 * sequence; a sequence without closed segments gets the sums that attention.c would give it.
 */
#include <math.h>
#include <string.h>

#include "lanes.h"
#include "tier_decode.h"

#define NEGLIGIBLE 0x1p-24f /* weight, relative to a row's largest, whose value is not read; thousands stay below 0.1 % */

/* ------------------------------------------------------------------------------------------------ the parts */

static void near_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    int64_t index = part_index(job, at, head, part);
    int sinks = plan->closed > 0 && part == 0, number = plan->first_near + part - (plan->closed > 0);
    int from = sinks ? 0 : number * PART_TILES, to = sinks ? 1 : from + PART_TILES;
    float *moment = job->rows->closed->stats ? at->sums[SUM_MOMENT] + index : NULL;
    partial_rows out = {at->acc + index * job->shape->head_dim, at->sums[SUM_MAX] + index, at->sums[SUM_WEIGHT] + index,
                        moment, at->capacity};
    int64_t since_ns = tier_now_ns(job);
    decode_tiles(job, sequence, head, from, to, thread, &out);
    int end = smaller(to * TILE_TOKENS, plan->length), begin = from * TILE_TOKENS;
    if (job->window > 0 && plan->length - job->window > begin) begin = plan->length - job->window;
    at->sums[SUM_TOKENS][index] = (float)(end - begin);
    tier_add_time(job, TIME_EXACT, since_ns);
}

static void fetch(const uint8_t *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2); /* into L2: L1 has too few miss buffers */
}

static void fetch_unit_keys(const decode_job *job, const uint8_t *summary, int group) {
    const record_layout *layout = &job->rows->closed->pool.at;
    int dim = job->shape->head_dim;
    fetch(summary + layout->unit_k + group * GROUP_UNITS * dim, GROUP_UNITS * dim);
    fetch(summary + layout->unit_k_scale + 2 * group * GROUP_UNITS, 1);
    fetch(summary + layout->unit_n + group * GROUP_UNITS, 1);
}

static void score_segment(const decode_job *job, const tier_plan *plan, const tier_rows *rows, head_state *state,
                          int segment, const uint8_t *summary, const uint8_t *ahead) {
    const tier_ops *ops = job->ctx->ops->tiers;
    const record_layout *layout = &job->rows->closed->pool.at;
    if (plan->two_level) {
        if (ahead) fetch(ahead + layout->group_k, 2 * SEGMENT_GROUPS * rows->dim);
        ops->score_groups(rows, layout, summary, state->groups + segment * SEGMENT_GROUPS, state->group_stride);
        return;
    }
    for (int g = 0; g < SEGMENT_GROUPS; g++) {
        if (g + 1 < SEGMENT_GROUPS) fetch_unit_keys(job, summary, g + 1);
        else if (ahead) fetch_unit_keys(job, ahead, 0);
        ops->score_units(rows, layout, summary, g, state->units + segment * SEGMENT_UNITS + g * GROUP_UNITS, state->unit_stride);
    }
}

/* Outliers of some segments, and the index of those that are read through it. */
static void outlier_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    const record_layout *layout = &job->rows->closed->pool.at;
    int first = part * PART_SEGMENTS, end = smaller(first + PART_SEGMENTS, plan->closed), tokens = 0;
    tier_rows rows = tier_open_rows(job, sequence, head, thread);
    int64_t since_ns = tier_now_ns(job);
    if (first < plan->far) tier_fix_queries(&rows);
    int scored = smaller(end, plan->far);
    for (int i = first; i < scored; i++)
        score_segment(job, plan, &rows, &at->heads[head], i, summary_of(job, sequence, head, i),
                      i + 1 < scored ? summary_of(job, sequence, head, i + 1) : NULL);
    tier_add_time(job, TIME_INDEX, since_ns);
    since_ns = tier_now_ns(job);
    for (int i = first; i < end; i++) {
        const uint8_t *summary = summary_of(job, sequence, head, i);
        int count = *halves_at(summary, layout->outlier_n);
        job->ctx->ops->tiers->attend_outliers(&rows, layout, summary, count,
                                              i + 1 < end ? summary_of(job, sequence, head, i + 1) : NULL);
        tokens += count;
    }
    tier_store_rows(job, sequence, head, plan->near + part, &rows, tokens);
    tier_add_time(job, TIME_EXACT, since_ns);
}

static void whole_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    int segment = plan->far + part / WHOLE_PARTS, first = part % WHOLE_PARTS * WHOLE_UNITS, count = 0;
    const uint8_t *summary = summary_of(job, sequence, head, segment), *payload = payload_of(job, sequence, head, segment);
    unit_ref units[WHOLE_UNITS];
    tier_rows rows = tier_open_rows(job, sequence, head, thread);
    int64_t since_ns = tier_now_ns(job);
    for (int g = first / GROUP_UNITS; g < (first + WHOLE_UNITS) / GROUP_UNITS; g++)
        for (int u = 0, present = units_in(job, summary, g); u < present; u++)
            units[count++] = (unit_ref){payload, g * GROUP_UNITS + u};
    job->ctx->ops->tiers->attend_units(&rows, &job->rows->closed->pool.at, units, count);
    tier_store_rows(job, sequence, head, plan->near + plan->outlier + part, &rows,
               count * UNIT_TOKENS);
    tier_add_time(job, TIME_EXACT, since_ns);
}

static void selected_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    const head_state *state = &at->heads[head];
    int first = part * PART_UNITS, count = smaller(state->num_chosen - first, PART_UNITS);
    unit_ref units[PART_UNITS];
    tier_rows rows = tier_open_rows(job, sequence, head, thread);
    int64_t since_ns = tier_now_ns(job);
    for (int i = 0; i < count; i++) {
        int unit = state->chosen[first + i];
        units[i] = (unit_ref){payload_of(job, sequence, head, unit / SEGMENT_UNITS), unit % SEGMENT_UNITS};
    }
    job->ctx->ops->tiers->attend_units(&rows, &job->rows->closed->pool.at, units, count > 0 ? count : 0);
    tier_store_rows(job, sequence, head, plan->near + plan->outlier + plan->whole + part, &rows, count > 0 ? count * UNIT_TOKENS : 0);
    tier_add_time(job, TIME_SELECTED, since_ns);
}

/* -------------------------------------------------------------------------------------------------- the means */

static int first_open(const head_state *state, int group) { /* of the opened groups, the first from `group` on */
    int low = 0, high = state->num_open;
    while (low < high) {
        int middle = (low + high) / 2;
        if (state->open[middle] < group) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* What statistics need of a row's weights w[n] of means that stand for about `tokens` tokens each. */
static void note_weights(const tier_ops *ops, const float *w, int n, int tokens, float *moment) {
    float lanes[SUM_LANES] = {0};
    for (int i = 0; i < n; i++) lanes[i % SUM_LANES] += w[i];
    *moment += ops->log_moment(w, n) - add_lanes(lanes) * log2f((float)tokens);
}

/* Sums of the weights of segments first … end-1: units of groups that are opened, and groups that aren't. */
static void sum_weights(const decode_job *job, const tier_plan *plan, const head_state *state, int first, int end,
                        int r, float *sum, float *moment) {
    const tier_ops *ops = job->ctx->ops->tiers;
    float *units = state->units + (int64_t)r * state->unit_stride, *groups = state->groups + (int64_t)r * state->group_stride;
    int opened = plan->two_level ? first_open(state, first * SEGMENT_GROUPS) : first * SEGMENT_GROUPS;
    int last = plan->two_level ? first_open(state, end * SEGMENT_GROUPS) : end * SEGMENT_GROUPS;
    for (int i = opened; i < last; i++) {
        const float *w = units + (plan->two_level ? state->open[i] : i) * GROUP_UNITS;
        for (int j = 0; j < GROUP_UNITS; j++) sum[j] += w[j];
        if (moment) note_weights(ops, w, GROUP_UNITS, UNIT_TOKENS, moment);
    }
    if (!plan->two_level) return;
    for (int g = first * SEGMENT_GROUPS; g < end * SEGMENT_GROUPS; g++) sum[g % SUM_LANES] += groups[g];
    if (moment)
        note_weights(ops, groups + first * SEGMENT_GROUPS, (end - first) * SEGMENT_GROUPS, GROUP_UNITS * UNIT_TOKENS, moment);
}

typedef struct mean_ref { /* a group whose units' values, or whose own, count */
    int32_t group, opened;
} mean_ref;

static int counts(const float *w, int64_t stride, int rows, int n) {
    float lanes[GROUP_UNITS] = {0};
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n; i++) lanes[i] = w[r * stride + i] > lanes[i] ? w[r * stride + i] : lanes[i];
    int any = 0;
    for (int i = 0; i < GROUP_UNITS; i++) any |= lanes[i] >= NEGLIGIBLE;
    return any;
}

static int list_means(const tier_plan *plan, const head_state *state, int rows, int first, int end, mean_ref *out) {
    int next = first_open(state, first * SEGMENT_GROUPS), count = 0;
    for (int g = first * SEGMENT_GROUPS; g < end * SEGMENT_GROUPS; g++) {
        int opened = !plan->two_level || (next < state->num_open && state->open[next] == g);
        next += opened;
        out[count] = (mean_ref){g, opened};
        if (opened) count += counts(state->units + g * GROUP_UNITS, state->unit_stride, rows, GROUP_UNITS);
        else count += counts(state->groups + g, state->group_stride, rows, 1);
    }
    return count;
}

static void fetch_mean(const decode_job *job, int sequence, int head, mean_ref ref) {
    const record_layout *layout = &job->rows->closed->pool.at;
    const uint8_t *summary = summary_of(job, sequence, head, ref.group / SEGMENT_GROUPS);
    int group = ref.group % SEGMENT_GROUPS, dim = job->shape->head_dim;
    if (!ref.opened) fetch(summary + layout->group_v + 2 * group * dim, 2 * dim);
    else {
        fetch(summary + layout->unit_v + group * GROUP_UNITS * dim, GROUP_UNITS * dim);
        fetch(summary + layout->unit_v_scale + 2 * group * GROUP_UNITS, 1);
    }
}

static void add_means(const decode_job *job, const tier_plan *plan, int sequence, int head, int first, int end,
                      tier_rows *rows) {
    const head_state *state = &tier_memory_of(job)->sequences[sequence].heads[head];
    const tier_ops *ops = job->ctx->ops->tiers;
    const record_layout *layout = &job->rows->closed->pool.at;
    mean_ref refs[PART_SEGMENTS * SEGMENT_GROUPS];
    int count = list_means(plan, state, rows->rows, first, end, refs);
    for (int i = 0; i < count; i++) {
        int g = refs[i].group;
        const uint8_t *summary = summary_of(job, sequence, head, g / SEGMENT_GROUPS);
        if (i + 1 < count) fetch_mean(job, sequence, head, refs[i + 1]);
        if (refs[i].opened)
            ops->add_units(rows, layout, summary, g % SEGMENT_GROUPS, state->units + g * GROUP_UNITS, state->unit_stride);
        else ops->add_group(rows, layout, summary, g % SEGMENT_GROUPS, state->groups + g, state->group_stride);
    }
}

static int first_border(const tier_plan *plan) { /* the first segment that ends within twice the exact zone */
    int reach = 2 * (plan->length - plan->far * SEGMENT_TOKENS);
    return plan->length > reach ? (plan->length - reach) / SEGMENT_TOKENS : 0;
}

static void mean_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    const head_state *state = &at->heads[head];
    tier_rows rows = tier_open_rows(job, sequence, head, thread);
    int first = part * PART_SEGMENTS, end = smaller(first + PART_SEGMENTS, plan->far), border = first_border(plan);
    int place = exact_parts(plan) + plan->selected + part, stats = job->rows->closed->stats != NULL;
    int64_t since_ns = tier_now_ns(job);
    memcpy(rows.max, state->top, sizeof(float) * (size_t)rows.rows);
    for (int r = 0; r < rows.rows; r++)
        sum_weights(job, plan, state, first, end, r, rows.sum + r * SUM_LANES, stats ? rows.moment + r * SUM_LANES : NULL);
    if (plan->policy->summary_weight > 0.0f) add_means(job, plan, sequence, head, first, end, &rows);
    tier_store_rows(job, sequence, head, place, &rows, 0);
    for (int r = 0; stats && border < end && r < rows.rows; r++) {
        float lanes[SUM_LANES] = {0};
        sum_weights(job, plan, state, border > first ? border : first, end, r, lanes, NULL);
        at->sums[SUM_BORDER][part_index(job, at, head, place) + r * at->capacity] = add_lanes(lanes);
    }
    tier_add_time(job, TIME_SUMMARY, since_ns);
}

/* --------------------------------------------------------------------------------------------------- phases */

typedef struct work { /* an item of a phase */
    int sequence, head, part;
    tier_plan plan;
} work;

/* Never depends on what was chosen: a thread that comes late, when the others are a layer further, must count the same. */
static int parts_in(int which, const tier_plan *plan) {
    if (which == TIER_EXACT) return exact_parts(plan);
    if (which == TIER_UNITS) return plan->two_level ? ceil_div(plan->far * SEGMENT_GROUPS, PART_UNITS) : 0;
    return plan->selected + plan->mean;
}

static int items_of(const decode_job *job, int which) {
    int total = 0;
    for (int s = 0; s < job->rows->num_sequences; s++) {
        tier_plan plan = tier_plan_of(job, s);
        total += parts_in(which, &plan) * job->shape->num_kv_heads;
    }
    return total;
}

static work find_work(const decode_job *job, int which, int item) {
    for (int s = 0;; s++) {
        tier_plan plan = tier_plan_of(job, s);
        int parts = parts_in(which, &plan), all = parts * job->shape->num_kv_heads;
        if (item < all) return (work){s, item / parts, item % parts, plan};
        item -= all;
    }
}

static void run_exact(const decode_job *job, const work *at, int thread) {
    const tier_plan *plan = &at->plan;
    int part = at->part, outlier = part - plan->near, whole = outlier - plan->outlier;
    if (outlier < 0) near_part(job, plan, at->sequence, at->head, part, thread);
    else if (whole < 0) outlier_part(job, plan, at->sequence, at->head, outlier, thread);
    else whole_part(job, plan, at->sequence, at->head, whole, thread);
}

static void run_units(const decode_job *job, const work *at, int thread) {
    const head_state *state = &tier_memory_of(job)->sequences[at->sequence].heads[at->head];
    int first = at->part * PART_UNITS, end = smaller(first + PART_UNITS, state->num_open);
    if (first >= end) return;
    tier_rows rows = tier_open_rows(job, at->sequence, at->head, thread);
    int64_t since_ns = tier_now_ns(job);
    tier_fix_queries(&rows);
    for (int i = first; i < end; i++) {
        int group = state->open[i];
        const uint8_t *summary = summary_of(job, at->sequence, at->head, group / SEGMENT_GROUPS);
        if (i + 1 < end) {
            int next = state->open[i + 1];
            fetch_unit_keys(job, summary_of(job, at->sequence, at->head, next / SEGMENT_GROUPS), next % SEGMENT_GROUPS);
        }
        job->ctx->ops->tiers->score_units(&rows, &job->rows->closed->pool.at, summary, group % SEGMENT_GROUPS,
                                          state->units + group * GROUP_UNITS, state->unit_stride);
    }
    tier_add_time(job, TIME_INDEX, since_ns);
}

static void run_far(const decode_job *job, const work *at, int thread) {
    const tier_plan *plan = &at->plan;
    if (at->part < plan->selected) selected_part(job, plan, at->sequence, at->head, at->part, thread);
    else mean_part(job, plan, at->sequence, at->head, at->part - plan->selected, thread);
}

/* Whoever ends a head's last part of a phase makes the choice that the next phase of that head waits for; meanwhile the
 * other threads work on other heads. */
static void choose(const decode_job *job, int which, const work *at) {
    head_state *state = &tier_memory_of(job)->sequences[at->sequence].heads[at->head];
    if (at->plan.far == 0) return;
    if (atomic_fetch_add_explicit(&state->done[which], 1, memory_order_acq_rel) + 1 < parts_in(which, &at->plan)) return;
    int64_t since_ns = tier_now_ns(job);
    atomic_store_explicit(&state->done[which], 0, memory_order_relaxed);
    if (which == TIER_EXACT && at->plan.two_level) tier_open_groups(job, &at->plan, at->sequence, at->head);
    else tier_choose_units(job, &at->plan, at->sequence, at->head);
    atomic_store_explicit(&state->ready[which], job->layer + 1, memory_order_release);
    tier_add_time(job, TIME_INDEX, since_ns);
}

static void wait_ready(const decode_job *job, int which, const work *at) {
    head_state *state = &tier_memory_of(job)->sequences[at->sequence].heads[at->head];
    for (int spins = 1; atomic_load_explicit(&state->ready[which], memory_order_acquire) != job->layer + 1; spins++)
        spin(spins);
}

void tier_partials(const decode_job *job, phase *phases, int thread) {
    int total = items_of(job, TIER_EXACT), opened = items_of(job, TIER_UNITS), far = items_of(job, TIER_FAR);
    PHASE_ITEMS(&phases[TIER_EXACT], item, total) {
        work at = find_work(job, TIER_EXACT, item);
        run_exact(job, &at, thread);
        choose(job, TIER_EXACT, &at);
    }
    PHASE_ITEMS(&phases[TIER_UNITS], item, opened) {
        work at = find_work(job, TIER_UNITS, item);
        wait_ready(job, TIER_EXACT, &at);
        run_units(job, &at, thread);
        choose(job, TIER_UNITS, &at);
    }
    PHASE_ITEMS(&phases[TIER_FAR], item, far) {
        work at = find_work(job, TIER_FAR, item);
        wait_ready(job, at.plan.two_level ? TIER_UNITS : TIER_EXACT, &at);
        run_far(job, &at, thread);
    }
    phase_wait(&phases[TIER_EXACT], total);
    phase_wait(&phases[TIER_FAR], far);
}
