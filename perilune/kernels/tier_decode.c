/* Decode attention over closed segments: which thread does which part of which sequence and KV head.
 *
 * Phases: what is read exactly anyway, and the index (TIER_EXACT); the units selected and the means of the others
 * (TIER_FAR). Between them a head waits for its own choice only. Parts lie at fixed places, so a row's sum has the same
 * order with any number of threads and beside any other sequence; a sequence without closed segments gets the sums that
 * attention.c would give it.
 */
#include <math.h>
#include <string.h>

#include "lanes.h"
#include "tier_decode.h"

#define NEGLIGIBLE 0x1p-24f /* weight, relative to a row's largest, whose value is not read; thousands stay below 0.1 % */
#define GROUPS_AHEAD 2          /* groups of the index that are fetched meanwhile */

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

static void fetch_index(const decode_job *job, const tier_plan *plan, const uint8_t *summary, int group) {
    const record_layout *layout = &job->rows->closed->pool.at;
    int dim = job->shape->head_dim;
    fetch(summary + layout->mean + group * GROUP_UNITS * dim / 2, GROUP_UNITS * dim / 2);
    fetch(summary + layout->mean_scale + 2 * group * GROUP_UNITS, 1);
    if (group == 0) fetch(summary + layout->units, 1);
    if (!plan->sketched) return;
    fetch(summary + layout->signs + group * GROUP_UNITS * UNIT_TOKENS * dim / 8, GROUP_UNITS * UNIT_TOKENS * dim / 8);
    fetch(summary + layout->spread + group * GROUP_UNITS * UNIT_TOKENS / 2, GROUP_UNITS * UNIT_TOKENS / 2);
    fetch(summary + layout->spread_scale + 2 * group * GROUP_UNITS, 1);
}

static void index_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    const tier_ops *ops = job->ctx->ops->tiers;
    const record_layout *layout = &job->rows->closed->pool.at;
    head_state *state = &tier_memory_of(job)->sequences[sequence].heads[head];
    int first = part * PART_SEGMENTS * SEGMENT_GROUPS, end = smaller((part + 1) * PART_SEGMENTS, plan->far) * SEGMENT_GROUPS;
    int64_t since_ns = tier_now_ns(job);
    fetch_index(job, plan, summary_of(job, sequence, head, first / SEGMENT_GROUPS), 0);
    tier_rows rows = tier_open_rows(job, sequence, head, thread);
    rows.sketched = plan->sketched;
    tier_fix_queries(&rows);
    for (int g = first; g < end; g++) {
        int next = g + GROUPS_AHEAD;
        if (next < end)
            fetch_index(job, plan, summary_of(job, sequence, head, next / SEGMENT_GROUPS), next % SEGMENT_GROUPS);
        ops->score_units(&rows, layout, summary_of(job, sequence, head, g / SEGMENT_GROUPS), g % SEGMENT_GROUPS,
                         state->units + g * GROUP_UNITS, state->unit_stride);
    }
    tier_add_time(job, TIME_INDEX, since_ns);
}

static void whole_part(const decode_job *job, const tier_plan *plan, int sequence, int head, int part, int thread) {
    int segment = plan->before + part / WHOLE_PARTS, first = part % WHOLE_PARTS * WHOLE_UNITS, count = 0;
    const uint8_t *summary = summary_of(job, sequence, head, segment), *payload = payload_of(job, sequence, head, segment);
    unit_ref units[WHOLE_UNITS];
    tier_rows rows = tier_open_rows(job, sequence, head, thread);
    int64_t since_ns = tier_now_ns(job);
    int end = smaller(first + WHOLE_UNITS, units_in(&job->rows->closed->pool.at, summary));
    for (int u = first; u < end; u++) units[count++] = (unit_ref){payload, u};
    job->ctx->ops->tiers->attend_units(&rows, &job->rows->closed->pool.at, units, count);
    tier_store_rows(job, sequence, head, plan->near + part, &rows, count * UNIT_TOKENS);
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
    tier_store_rows(job, sequence, head, exact_parts(plan) + part, &rows, count > 0 ? count * UNIT_TOKENS : 0);
    tier_add_time(job, TIME_SELECTED, since_ns);
}

/* -------------------------------------------------------------------------------------------------- the means */

/* What statistics need of a row's weights w[n] of units that aren't read. */
static void note_weights(const tier_ops *ops, const float *w, int n, float *moment) {
    float lanes[SUM_LANES] = {0};
    ops->sum(w, n, lanes);
    *moment += ops->log_moment(w, n) - add_lanes(lanes) * log2f((float)UNIT_TOKENS);
}

/* The weights of the units of half a record, added to each row's sums; whether they change anything. */
static int sum_half(const tier_ops *ops, const float *w, int64_t stride, tier_rows *rows) {
    int counts = 0;
    for (int r = 0; r < rows->rows; r++)
        counts |= ops->sum(w + r * stride, HALF_UNITS, rows->sum + r * SUM_LANES) >= NEGLIGIBLE;
    return counts;
}

/* The weights of segments first … end-1, and their mean values where those are wanted. */
static void add_means(const decode_job *job, int sequence, int head, int first, int end, int values, tier_rows *rows) {
    const head_state *state = &tier_memory_of(job)->sequences[sequence].heads[head];
    const tier_ops *ops = job->ctx->ops->tiers;
    for (int i = 2 * first; i < 2 * end; i++) {
        const float *w = state->units + i * HALF_UNITS;
        const uint8_t *ahead = summary_of(job, sequence, head, smaller(i / 2 + 1, end - 1));
        fetch(ahead + job->rows->closed->pool.at.quad_v_scale, 1);
        if (sum_half(ops, w, state->unit_stride, rows) && values)
            ops->add_quads(rows, &job->rows->closed->pool.at, summary_of(job, sequence, head, i / 2), ahead, i % 2, w,
                           state->unit_stride);
    }
}

/* What statistics need of a row's weights of segments first … end-1; returns the weights of those from `border` on. */
static float note_row(const decode_job *job, const head_state *state, int first, int end, int border, int r, float *moment) {
    const tier_ops *ops = job->ctx->ops->tiers;
    const float *w = state->units + (int64_t)r * state->unit_stride;
    float lanes[SUM_LANES] = {0};
    note_weights(ops, w + first * SEGMENT_UNITS, (end - first) * SEGMENT_UNITS, moment);
    if (border < first) border = first;
    if (border < end) ops->sum(w + border * SEGMENT_UNITS, (end - border) * SEGMENT_UNITS, lanes);
    return add_lanes(lanes);
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
    add_means(job, sequence, head, first, end, plan->policy->summary_weight > 0.0f, &rows);
    float borders[rows.rows];
    for (int r = 0; stats && r < rows.rows; r++)
        borders[r] = note_row(job, state, first, end, border, r, rows.moment + r * SUM_LANES);
    tier_store_rows(job, sequence, head, place, &rows, 0);
    for (int r = 0; stats && r < rows.rows; r++)
        at->sums[SUM_BORDER][part_index(job, at, head, place) + r * at->capacity] = borders[r];
    tier_add_time(job, TIME_SUMMARY, since_ns);
}

/* --------------------------------------------------------------------------------------------------- phases */

typedef struct work { /* an item of a phase */
    int sequence, head, part;
    tier_plan plan;
} work;

static int index_parts(const tier_plan *plan) { return ceil_div(plan->far, PART_SEGMENTS); }

/* Never depends on what was chosen: a thread that comes late, when the others are a layer further, must count the same. */
static int parts_in(int which, const tier_plan *plan) {
    return which == TIER_EXACT ? exact_parts(plan) + index_parts(plan) : plan->selected + plan->mean;
}

/* Numbers of the first items of each (sequence, KV head), and of all: [S * KV heads + 1]. */
static int count_items(const decode_job *job, int which, int32_t *first) {
    int heads = job->shape->num_kv_heads, all = job->rows->num_sequences * heads;
    first[0] = 0;
    for (int i = 0; i < all; i++) {
        tier_plan plan = tier_plan_of(job, i / heads, i % heads);
        first[i + 1] = first[i] + parts_in(which, &plan);
    }
    return first[all];
}

static work find_work(const decode_job *job, const int32_t *first, int item) {
    int heads = job->shape->num_kv_heads, low = 0, high = job->rows->num_sequences * heads;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (first[middle] <= item) low = middle;
        else high = middle;
    }
    return (work){low / heads, low % heads, item - first[low], tier_plan_of(job, low / heads, low % heads)};
}

static void run_exact(const decode_job *job, const work *at, int thread) {
    const tier_plan *plan = &at->plan;
    int part = at->part, whole = part - plan->near, index = whole - plan->whole;
    if (whole < 0) near_part(job, plan, at->sequence, at->head, part, thread);
    else if (index < 0) whole_part(job, plan, at->sequence, at->head, whole, thread);
    else index_part(job, plan, at->sequence, at->head, index, thread);
}

static void run_far(const decode_job *job, const work *at, int thread) {
    const tier_plan *plan = &at->plan;
    if (at->part < plan->selected) selected_part(job, plan, at->sequence, at->head, at->part, thread);
    else mean_part(job, plan, at->sequence, at->head, at->part - plan->selected, thread);
}

/* Whoever ends a head's last part of the first phase makes the choice that its second phase waits for; meanwhile the other
 * threads work on other heads. */
static void choose(const decode_job *job, const work *at) {
    head_state *state = &tier_memory_of(job)->sequences[at->sequence].heads[at->head];
    if (at->plan.far == 0) return;
    if (atomic_fetch_add_explicit(&state->done, 1, memory_order_acq_rel) + 1 < parts_in(TIER_EXACT, &at->plan)) return;
    int64_t since_ns = tier_now_ns(job);
    atomic_store_explicit(&state->done, 0, memory_order_relaxed);
    tier_choose_units(job, &at->plan, at->sequence, at->head);
    atomic_store_explicit(&state->ready, job->layer + 1, memory_order_release);
    tier_add_time(job, TIME_INDEX, since_ns);
}

static void wait_chosen(const decode_job *job, const work *at) {
    head_state *state = &tier_memory_of(job)->sequences[at->sequence].heads[at->head];
    for (int spins = 1; atomic_load_explicit(&state->ready, memory_order_acquire) != job->layer + 1; spins++) spin(spins);
}

void tier_partials(const decode_job *job, phase *phases, int thread) {
    int owners = job->rows->num_sequences * job->shape->num_kv_heads;
    int32_t exact_items[owners + 1], far_items[owners + 1];
    int total = count_items(job, TIER_EXACT, exact_items), far = count_items(job, TIER_FAR, far_items);
    PHASE_ITEMS(&phases[TIER_EXACT], item, total) {
        work at = find_work(job, exact_items, item);
        run_exact(job, &at, thread);
        choose(job, &at);
    }
    PHASE_ITEMS(&phases[TIER_FAR], item, far) {
        work at = find_work(job, far_items, item);
        wait_chosen(job, &at);
        run_far(job, &at, thread);
    }
    phase_wait(&phases[TIER_EXACT], total);
    phase_wait(&phases[TIER_FAR], far);
}
