/* What the files of decode over closed segments share: how a sequence is read in a layer, and where its sums lie. */
#ifndef PERILUNE_TIER_DECODE_H
#define PERILUNE_TIER_DECODE_H

#include "tier.h"

#define PART_TOKENS (PART_TILES * TILE_TOKENS) /* of bf16 blocks */
#define PART_SEGMENTS 8                        /* whose index or means are one part */
#define PART_UNITS 32                          /* selected units of one part */
#define WHOLE_UNITS 64                         /* units of one part where a segment is read whole */
#define WHOLE_PARTS (SEGMENT_UNITS / WHOLE_UNITS)

/* How one sequence is read by one KV head of a layer. Its parts stand in this order; a part is one thread's work, and the
 * sums of a part are merged with the others' at the end. */
typedef struct tier_plan {
    const attention_policy *policy;
    int32_t length, closed;  /* tokens; segments read as such */
    int32_t sketched;        /* how the index ranks */
    int32_t before;          /* segments, the first ones, that aren't read whole as the rest of `closed` is */
    int32_t far;             /* of these, read through the index: all, or none by a head without a share */
    int32_t least, most;     /* units selected */
    int32_t first_near;      /* number of the first bf16 part after the sinks */
    int32_t near, whole, selected, mean; /* parts; all but the first hold rotated values */
} tier_plan;

typedef struct ranked {
    float mass;
    int32_t index;
} ranked;

typedef struct choice {
    float sum, wanted; /* of the entries' masses; the mass to be held */
    int32_t least, most;
} choice;

/* Scores and choice of one (sequence, KV head); rows are the head's queries. Units are numbered 128 * segment + u. */
typedef struct head_state {
    float *units;    /* [rows][unit_stride]: scores, later weights 2^(score - top) of what isn't selected */
    float *mass;     /* of units */
    float *top;      /* [rows]: what weights refer to */
    int32_t *chosen; /* units read exactly */
    ranked *space;
    int32_t num_chosen, unit_stride;
    atomic_int done;  /* parts of the layer's first phase so far */
    atomic_int ready; /* 1 + the last layer whose units are chosen */
} head_state;

enum { SUM_MAX, SUM_WEIGHT, SUM_MOMENT, SUM_BORDER, SUM_TOKENS, SUMS };

/* One sequence's places. Arrays of parts: [q head][capacity]. */
typedef struct tier_sequence {
    float *acc;        /* [q head][capacity][head_dim] */
    float *sums[SUMS]; /* border: share of SUM_WEIGHT; tokens: read exactly, in the first row of a KV head */
    float *stats;      /* [q head][STATS] */
    head_state *heads; /* [KV head] */
    int32_t capacity;
} tier_sequence;

typedef struct tier_memory {
    tier_sequence *sequences;
    uint8_t *scratch; /* per thread */
    int64_t thread_bytes;
} tier_memory;

/* tier_plan.c */
tier_plan tier_plan_of(const decode_job *job, int sequence, int head);
tier_rows tier_open_rows(const decode_job *job, int sequence, int head, int thread); /* no sums yet */
void tier_fix_queries(tier_rows *rows);                                              /* for the index */
void tier_store_rows(const decode_job *job, int sequence, int head, int part, const tier_rows *rows, int tokens);
int64_t tier_now_ns(const decode_job *job); /* 0 unless somebody asked */
void tier_add_time(const decode_job *job, int part, int64_t since_ns);

/* tier_choose.c: indices, ascending, of the fewest entries that hold `wanted`, from `least` to `most`,
 * zeros never; returns how many */
int choose_largest(const float *mass, int n, choice want, ranked *space, int32_t *out);

/* tier_select.c: over the index alone, no payload */
void tier_choose_units(const decode_job *job, const tier_plan *plan, int sequence, int head);

static inline tier_memory *tier_memory_of(const decode_job *job) { return (tier_memory *)job->tiers; }

static inline const uint8_t *summary_of(const decode_job *job, int sequence, int head, int segment) {
    const segments *closed = job->rows->closed;
    int slot = closed->tables[(int64_t)sequence * closed->max_segments + segment];
    return record_summary(&closed->pool, slot, job->layer, head);
}

static inline const uint8_t *payload_of(const decode_job *job, int sequence, int head, int segment) {
    const segments *closed = job->rows->closed;
    int slot = closed->tables[(int64_t)sequence * closed->max_segments + segment];
    return record_payload(&closed->pool, slot, job->layer, head);
}

static inline int units_in(const record_layout *at, const uint8_t *summary) { return *halves_at(summary, at->units); }

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

static inline int smaller(int a, int b) { return a < b ? a : b; }

static inline int exact_parts(const tier_plan *plan) { return plan->near + plan->whole; }

static inline int parts_of(const tier_plan *plan) { return exact_parts(plan) + plan->selected + plan->mean; }

static inline int64_t part_index(const decode_job *job, const tier_sequence *at, int head, int part) {
    return (int64_t)head * (job->shape->num_q_heads / job->shape->num_kv_heads) * at->capacity + part;
}

static inline int group_rows(const heads *shape) { return shape->num_q_heads / shape->num_kv_heads; }

#endif
