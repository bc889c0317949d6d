/* Decode attention over closed segments: which thread does which part of which sequence and KV head.
 *
 * Phases: what is read exactly anyway, and the index (TIER_EXACT); with two levels, which groups are opened (TIER_OPEN)
 * and their units' scores (TIER_UNITS); which units are selected (TIER_SELECT); those units and the means of the others
 * (TIER_FAR). Parts lie at fixed places, so a row's sum has the same order with any number of threads and beside any
 * other sequence; a sequence without closed segments gets the sums that attention.c would give it.
 */
#include <math.h>
#include <string.h>
#include <time.h>

#include "lanes.h"
#include "tier_decode.h"

#define LOG2_E 1.44269504f
#define NEAR_SEGMENT_PARTS (SEGMENT_TOKENS / PART_TOKENS)

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

static int smaller(int a, int b) { return a < b ? a : b; }

static int bounded(int x, int most) { return x < 0 ? 0 : smaller(x, most); }

/* --------------------------------------------------------------------------------------------------- plans */

static int is_dense(const tier_plan *plan, int layer) {
    const attention_policy *policy = plan->policy;
    int limit = policy->dense_tokens;
    if (layer < policy->dense_layers && policy->dense_layer_tokens > limit) limit = policy->dense_layer_tokens;
    return !policy->sparse || plan->length <= limit;
}

static void plan_far(tier_plan *plan, int layer) {
    const attention_policy *policy = plan->policy;
    int times = layer < policy->dense_layers ? 4 : 1;
    int before = plan->length - policy->window_tokens;
    plan->far = is_dense(plan, layer) || before < 0 ? 0 : smaller(before / SEGMENT_TOKENS, plan->closed);
    plan->two_level = plan->far > 0 && plan->length >= policy->two_level_tokens;
    int units = plan->far * SEGMENT_UNITS, fixed = policy->top_p >= 1.0f;
    plan->least = times * bounded(fixed ? policy->topk_units : policy->min_units, units);
    plan->most = times * bounded(fixed ? policy->topk_units : policy->max_units, units);
    plan->outlier = ceil_div(plan->closed, PART_SEGMENTS);
    plan->whole = (plan->closed - plan->far) * WHOLE_PARTS;
    plan->selected = plan->far ? ceil_div(smaller(plan->most, units), PART_UNITS) : 0;
    plan->mean = ceil_div(plan->far, PART_SEGMENTS);
}

tier_plan tier_plan_of(const decode_job *job, int sequence) {
    const segments *closed = job->rows->closed;
    int length = job->rows->kv_lengths[sequence], last = ceil_div(length, PART_TOKENS);
    tier_plan plan = {.policy = &closed->policies[sequence], .length = length};
    if (job->window > 0 || closed->counts[sequence] == 0) {
        plan.first_near = job->window > 0 && length > job->window ? (length - job->window) / PART_TOKENS : 0;
        plan.near = last - plan.first_near;
        return plan;
    }
    plan.closed = closed->counts[sequence];
    plan.first_near = plan.closed * NEAR_SEGMENT_PARTS;
    plan.near = 1 + last - plan.first_near;
    plan_far(&plan, job->layer);
    return plan;
}

static int parts_of(const tier_plan *plan) {
    return plan->near + plan->outlier + plan->whole + plan->selected + plan->mean;
}

/* -------------------------------------------------------------------------------------------------- memory */

static int64_t take(uint8_t **memory, int64_t bytes) { /* moves on to the next piece; returns its rounded size */
    bytes = (bytes + 63) / 64 * 64;
    *memory += bytes;
    return bytes;
}

static int64_t padded_dim(const heads *shape) { return (shape->head_dim + 63) / 64 * 64; }

/* Parts that a sequence may have, whatever its layers do. Memory that isn't used costs nothing. */
static int capacity_of(const batch *rows, int sequence) {
    int closed = rows->closed->counts[sequence], near = ceil_div(rows->kv_lengths[sequence], PART_TOKENS) + 1;
    return near + closed * (WHOLE_PARTS + 2 + SEGMENT_UNITS / PART_UNITS);
}

static uint8_t *lay_out_head(head_state *state, int rows, int closed, uint8_t *at) {
    int units = closed * SEGMENT_UNITS, groups = closed * SEGMENT_GROUPS;
    head_state out = {.unit_stride = units, .group_stride = groups};
    void **places[] = {(void **)&out.units, (void **)&out.groups, (void **)&out.spare, (void **)&out.mass, (void **)&out.top,
                       (void **)&out.ids, (void **)&out.open, (void **)&out.chosen, (void **)&out.space};
    int64_t sizes[] = {4 * (int64_t)rows * units, 4 * (int64_t)rows * groups, 4 * (int64_t)rows * groups,
                       4 * (int64_t)(units + GROUP_UNITS), 4 * (int64_t)rows, 4 * (int64_t)units, 4 * (int64_t)units,
                       4 * (int64_t)units, (int64_t)sizeof(ranked) * units};
    for (int i = 0; i < 9; i++) {
        *places[i] = at;
        take(&at, sizes[i]);
    }
    if (state) *state = out;
    return at;
}

/* Hand out the pieces of one allocation; with `memory` NULL only count its bytes. */
static int64_t lay_out(const batch *rows, const heads *shape, int threads, uint8_t *memory) {
    uint8_t *at = memory;
    tier_memory *all = (tier_memory *)memory, unused;
    take(&at, sizeof *all);
    if (!memory) all = &unused;
    all->sequences = (tier_sequence *)at;
    take(&at, (int64_t)sizeof(tier_sequence) * rows->num_sequences);
    for (int s = 0; s < rows->num_sequences; s++) {
        tier_sequence out = {.capacity = capacity_of(rows, s)};
        int64_t parts = (int64_t)shape->num_q_heads * out.capacity;
        out.heads = (head_state *)at;
        take(&at, (int64_t)sizeof(head_state) * shape->num_kv_heads);
        for (int h = 0; h < shape->num_kv_heads; h++)
            at = lay_out_head(memory ? &out.heads[h] : NULL, group_rows(shape), rows->closed->counts[s], at);
        out.acc = (float *)at;
        take(&at, 4 * parts * shape->head_dim);
        for (int i = 0; i < SUMS; i++) {
            out.sums[i] = (float *)at;
            take(&at, 4 * parts);
        }
        out.stats = (float *)at;
        take(&at, 4 * STATS * (int64_t)shape->num_q_heads);
        if (memory) all->sequences[s] = out;
    }
    int64_t group = group_rows(shape);
    all->thread_bytes = (group * (padded_dim(shape) * 10 + 4 * SUM_LANES * 2 + 64) + 1024) / 64 * 64;
    all->scratch = at;
    take(&at, all->thread_bytes * threads);
    return at - memory;
}

int64_t tier_bytes(const batch *rows, const heads *shape, int threads) { return lay_out(rows, shape, threads, NULL); }

void tier_open(const batch *rows, const heads *shape, int threads, uint8_t *memory) {
    lay_out(rows, shape, threads, memory);
}

/* ---------------------------------------------------------------------------------------------------- rows */

static tier_rows open_memory(const decode_job *job, int thread) {
    const tier_memory *all = tier_memory_of(job);
    uint8_t *at = all->scratch + all->thread_bytes * thread;
    tier_rows out = {.rows = group_rows(job->shape), .dim = job->shape->head_dim, .padded = (int)padded_dim(job->shape)};
    int64_t rows = out.rows, lanes = 4 * rows * SUM_LANES, bytes = rows * out.padded;
    void **places[] = {(void **)&out.q, (void **)&out.acc, (void **)&out.high, (void **)&out.low, (void **)&out.sum,
                       (void **)&out.moment, (void **)&out.step, (void **)&out.total, (void **)&out.max};
    int64_t sizes[] = {4 * bytes, 4 * bytes, bytes, bytes, lanes, lanes, 4 * rows, 4 * rows, 4 * rows};
    for (int i = 0; i < 9; i++) {
        *places[i] = at;
        take(&at, sizes[i]);
    }
    return out;
}

static void clear_sums(tier_rows *rows) {
    memset(rows->acc, 0, sizeof(float) * (size_t)(rows->rows * rows->padded));
    memset(rows->sum, 0, sizeof(float) * (size_t)(rows->rows * SUM_LANES));
    memset(rows->moment, 0, sizeof(float) * (size_t)(rows->rows * SUM_LANES));
    for (int r = 0; r < rows->rows; r++) rows->max[r] = MASKED;
}

static tier_rows open_rows(const decode_job *job, int sequence, int head, int thread) {
    tier_rows out = open_memory(job, thread);
    const uint16_t *q = job->q + ((int64_t)sequence * job->shape->num_q_heads + head * out.rows) * out.dim;
    job->ctx->ops->to_float(q, (int64_t)out.rows * out.dim, out.q);
    for (int i = 0; i < out.rows * out.dim; i++) out.q[i] *= job->shape->scale * LOG2_E;
    clear_sums(&out);
    return out;
}

static void fix_queries(tier_rows *rows) { /* two signed bytes each, for the index */
    for (int r = 0; r < rows->rows; r++) {
        const float *q = rows->q + r * rows->dim;
        int8_t *high = rows->high + r * rows->padded, *low = rows->low + r * rows->padded;
        float peak = 0.0f;
        for (int d = 0; d < rows->dim; d++) peak = fabsf(q[d]) > peak ? fabsf(q[d]) : peak;
        float inverse = peak > 0.0f ? 32512.0f / peak : 0.0f;
        int32_t total = 0;
        for (int d = 0; d < rows->dim; d++) {
            float shifted = q[d] * inverse + 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer */
            int32_t x = (int32_t)(shifted - 12582912.0f);
            high[d] = (int8_t)((x + 128) >> 8);
            low[d] = (int8_t)(x & 255);
            total += x;
        }
        rows->step[r] = peak / 32512.0f;
        rows->total[r] = total;
    }
}

static int64_t part_index(const decode_job *job, const tier_sequence *at, int head, int part) {
    return (int64_t)head * group_rows(job->shape) * at->capacity + part;
}

static void store_rows(const decode_job *job, const tier_sequence *at, int head, int part, const tier_rows *rows, int tokens) {
    int64_t index = part_index(job, at, head, part);
    for (int r = 0; r < rows->rows; r++, index += at->capacity) {
        memcpy(at->acc + index * rows->dim, rows->acc + r * rows->padded, sizeof(float) * (size_t)rows->dim);
        at->sums[SUM_MAX][index] = rows->max[r];
        at->sums[SUM_WEIGHT][index] = add_lanes(rows->sum + r * SUM_LANES);
        at->sums[SUM_MOMENT][index] = add_lanes(rows->moment + r * SUM_LANES);
        at->sums[SUM_BORDER][index] = 0.0f;
        at->sums[SUM_TOKENS][index] = (float)tokens;
    }
}

static int64_t now_ns(const decode_job *job) { /* 0 unless somebody asked */
    if (!job->rows->closed->part_ns) return 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void add_time(const decode_job *job, int part, int64_t since_ns) {
    int64_t *total = job->rows->closed->part_ns;
    if (total) __atomic_fetch_add(total + job->layer * TIMES + part, now_ns(job) - since_ns, __ATOMIC_RELAXED);
}

/* ------------------------------------------------------------------------------------------------ the parts */

static void near_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    int64_t index = part_index(job, at, head, part);
    int sinks = plan->closed > 0 && part == 0, number = plan->first_near + part - (plan->closed > 0);
    int from = sinks ? 0 : number * PART_TILES, to = sinks ? 1 : from + PART_TILES;
    float *moment = job->rows->closed->stats ? at->sums[SUM_MOMENT] + index : NULL;
    partial_rows out = {at->acc + index * job->shape->head_dim, at->sums[SUM_MAX] + index, at->sums[SUM_WEIGHT] + index,
                        moment, at->capacity};
    int64_t since_ns = now_ns(job);
    decode_tiles(job, sequence, head, from, to, thread, &out);
    int end = smaller(to * TILE_TOKENS, plan->length), begin = from * TILE_TOKENS;
    if (job->window > 0 && plan->length - job->window > begin) begin = plan->length - job->window;
    at->sums[SUM_TOKENS][index] = (float)(end - begin);
    add_time(job, TIME_EXACT, since_ns);
}

static void score_segment(const decode_job *job, const tier_plan *plan, const tier_rows *rows, head_state *state,
                          const uint8_t *summary, int segment) {
    const tier_ops *ops = job->ctx->ops->tiers;
    const record_layout *layout = &job->rows->closed->pool.at;
    if (plan->two_level)
        ops->score_groups(rows, layout, summary, state->groups + segment * SEGMENT_GROUPS, state->group_stride);
    for (int g = 0; !plan->two_level && g < SEGMENT_GROUPS; g++)
        ops->score_units(rows, layout, summary, g, state->units + segment * SEGMENT_UNITS + g * GROUP_UNITS, state->unit_stride);
}

/* Outliers of some segments, and the index of those that are read through it. */
static void outlier_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    const record_layout *layout = &job->rows->closed->pool.at;
    int first = part * PART_SEGMENTS, end = smaller(first + PART_SEGMENTS, plan->closed), tokens = 0;
    tier_rows rows = open_rows(job, sequence, head, thread);
    int64_t since_ns = now_ns(job);
    if (first < plan->far) fix_queries(&rows);
    for (int i = first; i < end && i < plan->far; i++)
        score_segment(job, plan, &rows, &at->heads[head], summary_of(job, sequence, head, i), i);
    add_time(job, TIME_INDEX, since_ns);
    since_ns = now_ns(job);
    for (int i = first; i < end; i++) {
        const uint8_t *summary = summary_of(job, sequence, head, i);
        int count = *halves_at(summary, layout->outlier_n);
        job->ctx->ops->tiers->attend_outliers(&rows, layout, summary, count,
                                              i + 1 < end ? summary_of(job, sequence, head, i + 1) : NULL);
        tokens += count;
    }
    store_rows(job, at, head, plan->near + part, &rows, tokens);
    add_time(job, TIME_EXACT, since_ns);
}

static void whole_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    int segment = plan->far + part / WHOLE_PARTS, first = part % WHOLE_PARTS * WHOLE_UNITS, count = 0;
    const uint8_t *summary = summary_of(job, sequence, head, segment), *payload = payload_of(job, sequence, head, segment);
    unit_ref units[WHOLE_UNITS];
    tier_rows rows = open_rows(job, sequence, head, thread);
    int64_t since_ns = now_ns(job);
    for (int g = first / GROUP_UNITS; g < (first + WHOLE_UNITS) / GROUP_UNITS; g++)
        for (int u = 0, present = units_in(job, summary, g); u < present; u++)
            units[count++] = (unit_ref){payload, g * GROUP_UNITS + u};
    job->ctx->ops->tiers->attend_units(&rows, &job->rows->closed->pool.at, units, count);
    store_rows(job, &tier_memory_of(job)->sequences[sequence], head, plan->near + plan->outlier + part, &rows,
               count * UNIT_TOKENS);
    add_time(job, TIME_EXACT, since_ns);
}

static void selected_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    const head_state *state = &at->heads[head];
    int first = part * PART_UNITS, count = smaller(state->num_chosen - first, PART_UNITS);
    unit_ref units[PART_UNITS];
    tier_rows rows = open_rows(job, sequence, head, thread);
    int64_t since_ns = now_ns(job);
    for (int i = 0; i < count; i++) {
        int unit = state->chosen[first + i];
        units[i] = (unit_ref){payload_of(job, sequence, head, unit / SEGMENT_UNITS), unit % SEGMENT_UNITS};
    }
    job->ctx->ops->tiers->attend_units(&rows, &job->rows->closed->pool.at, units, count > 0 ? count : 0);
    store_rows(job, at, head, plan->near + plan->outlier + plan->whole + part, &rows, count > 0 ? count * UNIT_TOKENS : 0);
    add_time(job, TIME_SELECTED, since_ns);
}

/* -------------------------------------------------------------------------------------------------- the means */

typedef struct mean_item {
    const decode_job *job;
    const tier_plan *plan;
    const head_state *state;
    tier_rows *rows;
    float *border; /* [rows] */
} mean_item;

/* What statistics need of the weights w [row][n] of means that stand for `tokens` tokens each. */
static void note_weights(const mean_item *item, const float *w, int64_t stride, int n, int tokens, int segment) {
    int start = item->plan->far * SEGMENT_TOKENS, length = item->plan->length;
    int is_border = (segment + 1) * SEGMENT_TOKENS > length - 2 * (length - start);
    for (int r = 0; r < item->rows->rows; r++) {
        float sum = 0.0f, moment = 0.0f;
        for (int i = 0; i < n; i++) sum += w[r * stride + i];
        if (n > 1) moment = item->job->ctx->ops->tiers->log_moment(w + r * stride, n);
        else if (sum > 0.0f) moment = sum * log2f(sum);
        item->rows->moment[r * SUM_LANES] += moment - sum * log2f((float)tokens);
        if (is_border) item->border[r] += sum;
    }
}

static void add_means(const mean_item *item, const uint8_t *summary, int segment, int group, int opened) {
    const tier_ops *ops = item->job->ctx->ops->tiers;
    const segments *closed = item->job->rows->closed;
    const head_state *state = item->state;
    const float *units = state->units + (segment * SEGMENT_GROUPS + group) * GROUP_UNITS;
    const float *mean = state->groups + segment * SEGMENT_GROUPS + group;
    int64_t stride = opened ? state->unit_stride : state->group_stride;
    const float *w = opened ? units : mean;
    int n = opened ? GROUP_UNITS : 1;
    float any = 0.0f;
    for (int r = 0; r < item->rows->rows; r++)
        for (int i = 0; i < n; i++) {
            any += w[r * stride + i];
            item->rows->sum[r * SUM_LANES + i] += w[r * stride + i];
        }
    if (any == 0.0f) return;
    if (item->plan->policy->summary_weight > 0.0f) {
        if (opened) ops->add_units(item->rows, &closed->pool.at, summary, group, w, stride);
        else ops->add_group(item->rows, &closed->pool.at, summary, group, w, stride);
    }
    int tokens = opened ? UNIT_TOKENS : halves_at(summary, closed->pool.at.group_n)[group];
    if (closed->stats) note_weights(item, w, stride, n, tokens, segment);
}

static int first_open(const head_state *state, int group) { /* of the opened groups, the first from `group` on */
    int low = 0, high = state->num_open;
    while (low < high) {
        int middle = (low + high) / 2;
        if (state->open[middle] < group) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void mean_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    const head_state *state = &at->heads[head];
    tier_rows rows = open_rows(job, sequence, head, thread);
    float border[rows.rows];
    int first = part * PART_SEGMENTS, end = smaller(first + PART_SEGMENTS, plan->far);
    int next = first_open(state, first * SEGMENT_GROUPS), place = plan->near + plan->outlier + plan->whole + plan->selected;
    mean_item item = {job, plan, state, &rows, border};
    int64_t since_ns = now_ns(job);
    memset(border, 0, sizeof border);
    memcpy(rows.max, state->top, sizeof(float) * (size_t)rows.rows);
    for (int i = first; i < end; i++) {
        const uint8_t *summary = summary_of(job, sequence, head, i);
        for (int g = 0; g < SEGMENT_GROUPS; g++) {
            int opened = !plan->two_level || (next < state->num_open && state->open[next] == i * SEGMENT_GROUPS + g);
            next += opened;
            add_means(&item, summary, i, g, opened);
        }
    }
    store_rows(job, at, head, place + part, &rows, 0);
    for (int r = 0; r < rows.rows; r++)
        at->sums[SUM_BORDER][part_index(job, at, head, place + part) + r * at->capacity] = border[r];
    add_time(job, TIME_SUMMARY, since_ns);
}

/* --------------------------------------------------------------------------------------------------- phases */

typedef struct work { /* an item of a phase */
    int sequence, head, part;
    tier_plan plan;
} work;

static int parts_in(const decode_job *job, int which, const tier_plan *plan, int sequence, int head) {
    const head_state *state = &tier_memory_of(job)->sequences[sequence].heads[head];
    switch (which) {
    case TIER_EXACT: return plan->near + plan->outlier + plan->whole;
    case TIER_OPEN: return plan->two_level;
    case TIER_UNITS: return plan->two_level ? ceil_div(state->num_open, PART_UNITS) : 0;
    case TIER_SELECT: return plan->far > 0;
    default: return plan->selected + plan->mean;
    }
}

static int items_of(const decode_job *job, int which) {
    int total = 0;
    for (int s = 0; s < job->rows->num_sequences; s++) {
        tier_plan plan = tier_plan_of(job, s);
        for (int h = 0; h < job->shape->num_kv_heads; h++) total += parts_in(job, which, &plan, s, h);
    }
    return total;
}

static work find_work(const decode_job *job, int which, int item) {
    for (int s = 0;; s++) {
        tier_plan plan = tier_plan_of(job, s);
        for (int h = 0; h < job->shape->num_kv_heads; h++) {
            int parts = parts_in(job, which, &plan, s, h);
            if (item < parts) return (work){s, h, item, plan};
            item -= parts;
        }
    }
}

static void score_open_units(const decode_job *job, const work *at, int thread) {
    head_state *state = &tier_memory_of(job)->sequences[at->sequence].heads[at->head];
    tier_rows rows = open_rows(job, at->sequence, at->head, thread);
    fix_queries(&rows);
    for (int i = at->part * PART_UNITS; i < smaller((at->part + 1) * PART_UNITS, state->num_open); i++) {
        int group = state->open[i];
        const uint8_t *summary = summary_of(job, at->sequence, at->head, group / SEGMENT_GROUPS);
        job->ctx->ops->tiers->score_units(&rows, &job->rows->closed->pool.at, summary, group % SEGMENT_GROUPS,
                                          state->units + group * GROUP_UNITS, state->unit_stride);
    }
}

static void run_exact(const decode_job *job, const work *at, int thread) {
    const tier_plan *plan = &at->plan;
    int part = at->part, outlier = part - plan->near, whole = outlier - plan->outlier;
    if (outlier < 0) near_part(job, plan, at->sequence, at->head, part, thread);
    else if (whole < 0) outlier_part(job, plan, at->sequence, at->head, outlier, thread);
    else whole_part(job, plan, at->sequence, at->head, whole, thread);
}

static void run_far(const decode_job *job, const work *at, int thread) {
    const tier_plan *plan = &at->plan;
    if (at->part < plan->selected) selected_part(job, plan, at->sequence, at->head, at->part, thread);
    else mean_part(job, plan, at->sequence, at->head, at->part - plan->selected, thread);
}

static void run_index(const decode_job *job, int which, const work *at, int thread) {
    int64_t since_ns = now_ns(job);
    if (which == TIER_OPEN) tier_open_groups(job, at->sequence, at->head);
    else if (which == TIER_UNITS) score_open_units(job, at, thread);
    else tier_choose_units(job, at->sequence, at->head);
    add_time(job, TIME_INDEX, since_ns);
}

void tier_partials(const decode_job *job, phase *phases, int thread) {
    for (int which = 0; which < TIER_PHASES; which++) {
        int total = items_of(job, which); /* of TIER_UNITS, known once groups are opened */
        PHASE_ITEMS(&phases[which], item, total) {
            work at = find_work(job, which, item);
            if (which == TIER_EXACT) run_exact(job, &at, thread);
            else if (which == TIER_FAR) run_far(job, &at, thread);
            else run_index(job, which, &at, thread);
        }
        phase_wait(&phases[which], total);
    }
}

/* ---------------------------------------------------------------------------------------------------- merge */

static void note_stats(const tier_sequence *at, const tier_plan *plan, int64_t first, const float *factors, float *stats) {
    float masses[4] = {0}, moment = 0.0f;
    int ends[] = {plan->near + plan->outlier + plan->whole, plan->selected, plan->mean};
    for (int kind = 0, p = 0, end = 0; kind < 3; kind++)
        for (end += ends[kind]; p < end; p++) {
            float sum = at->sums[SUM_WEIGHT][first + p];
            if (factors[p] == 0.0f) continue;
            masses[kind] += factors[p] * sum;
            moment += factors[p] * (at->sums[SUM_MOMENT][first + p] + log2f(factors[p]) * sum);
            if (kind == 2) masses[STAT_BORDER] += factors[p] * at->sums[SUM_BORDER][first + p];
        }
    float total = masses[0] + masses[1] + masses[2], tokens = (float)(plan->length > 2 ? plan->length : 2);
    for (int i = 0; i < 4; i++) stats[i] = masses[i] / total;
    stats[STAT_ENTROPY] = (log2f(total) - moment / total) / log2f(tokens);
}

void tier_merge(const decode_job *job, int sequence, int q_head, float *out) {
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    tier_plan plan = tier_plan_of(job, sequence);
    int dim = job->shape->head_dim, parts = parts_of(&plan), plain = plan.near + plan.outlier, means = parts - plan.mean;
    int64_t first = (int64_t)q_head * at->capacity, since_ns = now_ns(job);
    const float *max = at->sums[SUM_MAX] + first, *sum = at->sums[SUM_WEIGHT] + first;
    float factors[parts], rotated[dim], top = MASKED, total = 0.0f;
    for (int p = 0; p < parts; p++) top = max[p] > top ? max[p] : top;
    memset(out, 0, sizeof(float) * (size_t)dim);
    memset(rotated, 0, sizeof rotated);
    for (int p = 0; p < parts; p++) {
        factors[p] = max[p] <= MASKED || sum[p] == 0.0f ? 0.0f : exp2_fast(max[p] - top);
        float weight = p < means ? factors[p] : factors[p] * plan.policy->summary_weight;
        if (weight == 0.0f) continue;
        const float *acc = at->acc + (first + p) * dim;
        float *into = p < plain ? out : rotated;
        total += weight * sum[p];
        for (int i = 0; i < dim; i++) into[i] += weight * acc[i];
    }
    if (parts > plain) {
        rotate_values(rotated, dim);
        for (int i = 0; i < dim; i++) out[i] += rotated[i];
    }
    for (int i = 0; i < dim; i++) out[i] /= total;
    if (job->rows->closed->stats) note_stats(at, &plan, first, factors, at->stats + q_head * STATS);
    add_time(job, TIME_MERGE, since_ns);
}

void tier_stats(const decode_job *job, int sequence) {
    const segments *closed = job->rows->closed;
    tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
    tier_plan plan = tier_plan_of(job, sequence);
    if (!closed->stats || job->window > 0) return; /* of layers that attend to everything */
    float *stats = closed->stats + ((int64_t)sequence * closed->pool.num_layers + job->layer) * STATS;
    for (int i = 0; i < STATS; i++) stats[i] = 0.0f;
    for (int h = 0; h < job->shape->num_q_heads; h++)
        for (int i = 0; i < STAT_TOKENS; i++) stats[i] += at->stats[h * STATS + i] / (float)job->shape->num_q_heads;
    for (int h = 0; h < job->shape->num_kv_heads; h++)
        for (int p = 0; p < parts_of(&plan) - plan.mean; p++)
            stats[STAT_TOKENS] += at->sums[SUM_TOKENS][part_index(job, at, h, p)] / (float)job->shape->num_kv_heads;
}
