/* How each sequence of a decode batch is read in a layer, and the memory that a step needs for it. */
#include <math.h>
#include <string.h>
#include <time.h>

#include "lanes.h"
#include "tier_decode.h"

#define LOG2_E 1.44269504f
#define NEAR_SEGMENT_PARTS (SEGMENT_TOKENS / PART_TOKENS)

/* --------------------------------------------------------------------------------------------------- plans */

static int is_dense(const tier_plan *plan, int first_layers) {
    const attention_policy *policy = plan->policy;
    int limit = policy->dense_tokens;
    if (first_layers && policy->dense_layer_tokens > limit) limit = policy->dense_layer_tokens;
    return !policy->sparse || plan->length <= limit;
}

/* A head's share of a number of units: at least one, unless there is none. */
static int shared(float share, int units, int most) {
    float part = share * (float)units + 0.5f;
    int whole = part < (float)most ? (int)part : most;
    return units > 0 ? smaller(whole > 1 ? whole : 1, most) : 0;
}

static void plan_far(tier_plan *plan, const decode_job *job, int head) {
    const attention_policy *policy = plan->policy;
    const float *shares = job->rows->closed->head_shares;
    int first_layers = !shares && job->layer < policy->dense_layers, before = plan->length - policy->window_tokens;
    int at = job->layer * job->shape->num_kv_heads + head;
    float share = shares ? shares[at] : (first_layers ? 4.0f : 1.0f);
    plan->before = is_dense(plan, first_layers) || before < 0 ? 0 : smaller(before / SEGMENT_TOKENS, plan->closed);
    plan->far = share > 0.0f ? plan->before : 0;
    plan->sketched = !shares || job->rows->closed->head_sketched[at];
    int units = plan->far * SEGMENT_UNITS, fixed = policy->top_p >= 1.0f;
    plan->least = shared(share, fixed ? policy->topk_units : policy->min_units, units);
    plan->most = shared(share, fixed ? policy->topk_units : policy->max_units, units);
    plan->whole = (plan->closed - plan->before) * WHOLE_PARTS;
    plan->selected = plan->far ? ceil_div(smaller(plan->most, units), PART_UNITS) : 0;
    plan->mean = ceil_div(plan->far, PART_SEGMENTS);
}

tier_plan tier_plan_of(const decode_job *job, int sequence, int head) {
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
    plan_far(&plan, job, head);
    return plan;
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
    return near + closed * (WHOLE_PARTS + 1 + SEGMENT_UNITS / PART_UNITS);
}

static uint8_t *lay_out_head(head_state *state, int rows, int closed, uint8_t *at) {
    int units = closed * SEGMENT_UNITS;
    head_state out = {.unit_stride = units};
    void **places[] = {(void **)&out.units, (void **)&out.mass, (void **)&out.top, (void **)&out.chosen, (void **)&out.space};
    int64_t sizes[] = {4 * (int64_t)rows * units, 4 * (int64_t)units, 4 * (int64_t)rows, 4 * (int64_t)(units + 1),
                       (int64_t)sizeof(ranked) * (2 * units + 1)};
    for (int i = 0; i < 5; i++) {
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
    all->thread_bytes = (group * (padded_dim(shape) * 14 + 4 * SUM_LANES * 2 + 64) + 1024) / 64 * 64;
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
    void **places[] = {(void **)&out.q, (void **)&out.acc, (void **)&out.fixed, (void **)&out.sum, (void **)&out.moment,
                       (void **)&out.step, (void **)&out.total, (void **)&out.max, (void **)&out.signed_sums,
                       (void **)&out.sum_step, (void **)&out.sum_zero};
    int64_t sizes[] = {4 * bytes, 4 * bytes, bytes, lanes, lanes, 4 * rows, 4 * rows, 4 * rows, 4 * bytes, 4 * rows, 4 * rows};
    for (int i = 0; i < 11; i++) {
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

tier_rows tier_open_rows(const decode_job *job, int sequence, int head, int thread) {
    tier_rows out = open_memory(job, thread);
    const uint16_t *q = job->q + ((int64_t)sequence * job->shape->num_q_heads + head * out.rows) * out.dim;
    job->ctx->ops->to_float(q, (int64_t)out.rows * out.dim, out.q);
    for (int i = 0; i < out.rows * out.dim; i++) out.q[i] *= job->shape->scale * LOG2_E;
    clear_sums(&out);
    return out;
}

static void fix_bytes(const float *q, int dim, tier_rows *rows, int r) {
    int8_t *fixed = rows->fixed + r * rows->padded;
    float peak = 0.0f;
    for (int d = 0; d < dim; d++) peak = fabsf(q[d]) > peak ? fabsf(q[d]) : peak;
    float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
    int32_t total = 0;
    for (int d = 0; d < dim; d++) {
        fixed[d] = (int8_t)nearest(q[d] * inverse);
        total += fixed[d];
    }
    rows->step[r] = peak / 127.0f;
    rows->total[r] = total;
}

static void fix_signed_sums(const float *q, int dim, tier_rows *rows, int r) {
    uint8_t *out = rows->signed_sums + r * dim * 4;
    float widest = 0.0f, zero = 0.0f;
    for (int d = 0; d < dim; d += 4) {
        float size = fabsf(q[d]) + fabsf(q[d + 1]) + fabsf(q[d + 2]) + fabsf(q[d + 3]);
        widest = size > widest ? size : widest;
        zero += size;
    }
    float inverse = widest > 0.0f ? 7.5f / widest : 0.0f;
    for (int d = 0; d < dim; d += 4, out += 16) {
        float sums[16] = {fabsf(q[d]) - q[d] + (fabsf(q[d + 1]) - q[d + 1]) + (fabsf(q[d + 2]) - q[d + 2]) +
                          (fabsf(q[d + 3]) - q[d + 3])};
        for (int j = 0; j < 4; j++)
            for (int bits = 0; bits < 1 << j; bits++) sums[bits + (1 << j)] = sums[bits] + 2.0f * q[d + j];
        for (int bits = 0; bits < 16; bits++) out[bits] = (uint8_t)nearest(sums[bits] * inverse);
    }
    rows->sum_step[r] = widest / 7.5f;
    rows->sum_zero[r] = zero;
}

void tier_fix_queries(tier_rows *rows) {
    for (int r = 0; r < rows->rows; r++) {
        float q[rows->dim];
        memcpy(q, rows->q + r * rows->dim, sizeof q);
        rotate_values(q, rows->dim);
        fix_bytes(q, rows->dim, rows, r);
        if (rows->sketched) fix_signed_sums(q, rows->dim, rows, r);
    }
}

void tier_store_rows(const decode_job *job, int sequence, int head, int part, const tier_rows *rows, int tokens) {
    const tier_sequence *at = &tier_memory_of(job)->sequences[sequence];
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

int64_t tier_now_ns(const decode_job *job) {
    if (!job->rows->closed->part_ns) return 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void tier_add_time(const decode_job *job, int part, int64_t since_ns) {
    int64_t *total = job->rows->closed->part_ns;
    if (total) __atomic_fetch_add(total + job->layer * TIMES + part, tier_now_ns(job) - since_ns, __ATOMIC_RELAXED);
}
