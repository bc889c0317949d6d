/* Shared shapes of the native kernels: the C ABI's structs and the table of primitives that each CPU level fills.
 *
 * Knows layouts (interface.py draws them); knows no thread. Primitives (`kernel_ops`) do one thread's share of work,
 * drivers (api.c, step.c) hand it out. One level is chosen at run time; its code lives in isa_*.c.
 */
#ifndef PERILUNE_KERNELS_H
#define PERILUNE_KERNELS_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default"))) /* the C ABI: functions named pk_* */

#define BLOCK_TOKENS 32 /* tokens of a KV block, columns of a quantisation block */
#define ROW_TILE 16     /* interleaved output rows of a packed weight */
#define ROW_CHUNK 8     /* activation rows that share one pass over a weight tile */
#define GROUP_ROWS 6    /* query rows that share registers in attention */
#define TILE_BLOCKS 2   /* KV blocks of one attention tile, at even block numbers */
#define TILE_TOKENS (TILE_BLOCKS * BLOCK_TOKENS)
#define PART_TILES 4 /* of a sequence's KV that one thread attends at a time at decode */
#define MAX_PARTS 3
#define UNIT_TOKENS 16 /* of closed segments, see tiers.py */
#define SEGMENT_TOKENS 2048
#define SEGMENT_UNITS 128
#define SEGMENT_GROUPS 8
#define SEGMENT_QUADS 32
#define SEGMENT_BLOCKS (SEGMENT_TOKENS / BLOCK_TOKENS)
#define SINK_BLOCKS 2
#define MAX_HEAD_DIM 512
#define MASKED (-1e30f) /* score of a key that a row doesn't see; finite, so that no NaN arises */

enum { KIND_Q4 = 0, KIND_INT8 = 1, KIND_BF16 = 2 };
enum { ACT_SILU = 0, ACT_GELU_TANH = 1 };
enum { STATUS_OK = 0, STATUS_CANCELLED = 1, STATUS_BAD_BATCH = 2, STATUS_NO_MEMORY = 3 };

typedef struct packed {
    const uint8_t *data;
    int32_t kind, rows, cols, tiles;
} packed;

typedef struct pool {
    uint8_t *data;
    int64_t num_blocks, block_bytes, half_bytes;
    int32_t num_kv_heads, head_dim;
} pool;

/* Byte offsets in a record's two parts: SegmentLayout's, in its order. */
typedef struct record_layout {
    int32_t mean, mean_scale, signs, spread, spread_scale, quad_v, quad_v_scale, units;
    int32_t summary_bytes;
    int32_t k, k_scale, k_zero, v, v_scale;
    int32_t payload_bytes;
} record_layout;

typedef struct segment_pool {
    uint8_t *summaries;
    const int64_t *payloads; /* addresses; 0: the slot is empty */
    record_layout at;
    int32_t num_slots, num_layers, num_kv_heads, head_dim;
} segment_pool;

typedef struct attention_policy { /* tiers.py says what they mean */
    int32_t sparse, window_tokens, topk_units, min_units, max_units;
    int32_t dense_layers, dense_tokens, dense_layer_tokens;
    float top_p, summary_weight;
} attention_policy;

enum { STAT_EXACT, STAT_SELECTED, STAT_SUMMARY, STAT_BORDER, STAT_ENTROPY, STAT_TOKENS, STATS };
enum { TIME_INDEX, TIME_EXACT, TIME_SELECTED, TIME_SUMMARY, TIME_MERGE, TIMES }; /* see interface.ATTENTION_PARTS */

typedef struct segments { /* the closed segments of a batch's sequences */
    segment_pool pool;
    const int32_t *tables, *counts;   /* [S][max_segments] slots; [S] */
    const attention_policy *policies; /* [S], of decode rows */
    float *stats;                     /* [S][layers][STATS]; NULL: not wanted */
    int64_t *part_ns;                 /* [layers][TIMES], added to; NULL: not wanted */
    const float *head_shares;         /* [layers][KV heads], as tiers.py says; NULL: all alike, */
    const uint8_t *head_sketched;     /* and ranked by sketches */
    int32_t max_segments;
} segments;

typedef struct batch {
    const int32_t *cu_q, *kv_lengths, *block_tables;
    int32_t num_sequences, max_blocks;
    const segments *closed; /* NULL: none */
} batch;

typedef struct heads {
    int32_t num_q_heads, num_kv_heads, head_dim;
    float scale;
} heads;

typedef struct qk_norm {
    const float *q_weight, *k_weight; /* NULL: no norm */
    float eps, offset;
} qk_norm;

typedef struct rope {
    const float *cos, *sin;
    int64_t max_positions;
} rope;

/* Up to GROUP_ROWS query rows of one KV head, and their running softmax. */
typedef struct row_group {
    int32_t rows, head_dim;
    const uint32_t *q;                         /* bf16 pairs [head_dim / 2][rows] */
    float *acc;                                /* [rows][head_dim] */
    float *sum;                                /* [rows][16], lanes are added up at the end */
    float *moment;                             /* the same of weight * (score - max); NULL: not wanted */
    float max[GROUP_ROWS];                     /* of score * scale * log2(e) */
    int32_t first[GROUP_ROWS], last[GROUP_ROWS]; /* positions that the row sees, inclusive */
} row_group;

/* TILE_BLOCKS blocks of one head's K and V. `ahead_*` (NULL: nothing) is fetched meanwhile. */
typedef struct kv_tile {
    const uint16_t *k[TILE_BLOCKS], *v[TILE_BLOCKS];
    const uint16_t *ahead_k[TILE_BLOCKS], *ahead_v[TILE_BLOCKS];
    int32_t start; /* position of the first token */
} kv_tile;

/* 16 tokens of a closed segment, as they lie in its payload. */
typedef struct unit_codes {
    const uint8_t *k;
    const uint16_t *k_scale, *k_zero; /* [head_dim] */
    const int8_t *v;
    const uint16_t *v_scale; /* [16] */
} unit_codes;

struct close_item;

typedef struct tier_ops tier_ops; /* tier.h */

typedef struct kernel_ops {
    const char *name;
    const tier_ops *tiers;
    /* Write row `row` of `rows` into the level's own form, for weights of `kind`; 8 * cols + 64 bytes a row. */
    void (*prepare)(int kind, const float *x, int cols, int row, int rows, void *prepared);
    /* out[row * stride + r] = prepared row . weight row r (+ bias[r]) for the weight tiles begin … end-1. */
    void (*linear)(const packed *weight, int begin, int end, const void *prepared, int rows, const float *bias,
                   float *out, int64_t stride);
    /* Fold a KV tile into the group's running softmax. `scale` includes log2(e). */
    void (*attend)(row_group *group, const kv_tile *tile, float scale);
    /* A unit as bf16, V still rotated: K at 16 tokens of a block ([head_dim / 2][32 tokens][2]), V [8][head_dim][2]. */
    void (*open_unit)(const unit_codes *unit, int head_dim, uint16_t *k, uint16_t *v);
    void (*close_record)(const struct close_item *item); /* see tier_close.h */
    void (*rms_norm)(const float *x, const float *weight, int n, float eps, float offset, float *out);
    void (*act_mul)(int act, const float *gate, const float *up, int n, float *out);
    void (*add)(const float *delta, int n, float *residual);
    void (*rotate)(float *x, const float *cos, const float *sin, int half);
    void (*to_float)(const uint16_t *x, int64_t n, float *out);
    void (*to_bf16)(const float *x, int64_t n, uint16_t *out);
    /* out[i] = sum over parts p of 2^(max[p] - top) * acc[p][i], divided by the same sum over sum[p]. */
    void (*merge)(int parts, const float *const *acc, const float *max, const float *sum, int n, float *out);
} kernel_ops;

typedef struct context {
    const kernel_ops *ops;
    int32_t threads;
} context;

/* Items that threads take from a counter. A phase is over when its items are done, not when all threads have come: a
 * thread that the system holds up delays nobody, finds nothing left to do and catches up. */
typedef struct phase {
    _Alignas(64) atomic_int next;
    atomic_int done;
} phase;

static inline int phase_take(phase *p, int total) { /* an item, or `total` */
    int item = atomic_load_explicit(&p->next, memory_order_relaxed);
    return item < total ? atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed) : total;
}

static inline void phase_done(phase *p) { atomic_fetch_add_explicit(&p->done, 1, memory_order_release); }

static inline void spin(int spins) { /* one round of waiting for another thread */
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    if (spins % 16384 == 0) sched_yield(); /* more threads than cores */
}

static inline void phase_wait(phase *p, int total) {
    for (int spins = 1; atomic_load_explicit(&p->done, memory_order_acquire) < total; spins++) spin(spins);
}

#define PHASE_ITEMS(phase, item, total) /* the loop over this thread's items */                                 \
    for (int item; (item = phase_take(phase, total)) < (total); phase_done(phase))

extern const kernel_ops ops_portable;
#if defined(__x86_64__)
extern const kernel_ops ops_avx2, ops_avx512;
#elif defined(__aarch64__)
extern const kernel_ops ops_neon;
#endif

/* api.c: weights standing side by side times prepared rows */
typedef struct linear_job {
    const packed *weights;
    void *prepared[2]; /* for quantised and for bf16 weights */
    const float *bias; /* NULL: none */
    float *out;        /* [rows][stride] */
    int64_t stride;
    int32_t parts, rows;
} linear_job;

int64_t prepared_bytes(int cols, int rows);
void linear_prepare(const context *ctx, const linear_job *job, const float *x, int row);
void linear_run(const context *ctx, const linear_job *job, phase *at);

/* attention.c, used by step.c inside its parallel region */
typedef struct decode_job {
    const context *ctx;
    const pool *kv;
    const batch *rows;
    const heads *shape;
    int32_t layer, window; /* window 0: none */
    int32_t parts;         /* parts that each (sequence, KV head) is split into */
    const uint16_t *q;     /* bf16 [S][Hq][D] */
    float *partial;        /* scratch, see decode_scratch_floats */
    uint8_t *scratch;      /* per thread, attention_scratch_bytes each */
    uint8_t *tiers;        /* of tier_open; NULL: no sequence has closed segments */
} decode_job;

typedef struct partial_rows { /* where a KV head's rows leave a part's sums; row g is g * stride further */
    float *acc, *max, *sum, *moment; /* acc in head_dim; moment NULL: not wanted */
    int64_t stride;
} partial_rows;

int decode_parts(const batch *rows);
int64_t decode_scratch_floats(const batch *rows, const heads *shape, int parts);
int64_t attention_scratch_bytes(const heads *shape);
void decode_partials(const decode_job *job, phase *at, int thread);
void decode_tiles(const decode_job *job, int sequence, int head, int from, int to, int thread, const partial_rows *out);
void decode_merge(const decode_job *job, int sequence, int q_head, float *out);
int batch_is_valid(const batch *rows, const pool *kv, int64_t max_positions); /* 0: no limit of positions */
int window_is_kept(const batch *rows, int window); /* no block that a row's window (0: none) reaches was released */
int decode_batch_is_valid(const batch *rows, const pool *kv, int64_t max_positions); /* and one row a sequence */

/* tier_decode.c: the same for batches with closed segments. Memory of tier_bytes is laid out once a step. */
enum { TIER_EXACT, TIER_FAR, TIER_PHASES };

int64_t tier_bytes(const batch *rows, const heads *shape, int threads);
void tier_open(const batch *rows, const heads *shape, int threads, uint8_t *memory);
void tier_partials(const decode_job *job, phase *phases, int thread);
void tier_merge(const decode_job *job, int sequence, int q_head, float *out);
void tier_stats(const decode_job *job, int sequence); /* once its heads are merged */

/* tier_prefill.c: a run of rows, none of which stands in a closed segment */
typedef struct tier_item {
    const kernel_ops *ops;
    const pool *kv;
    const segments *closed;
    const int32_t *blocks; /* the sequence's table */
    row_group *rows;
    uint16_t *scratch; /* K and V of a tile */
    const volatile int32_t *cancel;
    float scale; /* includes log2(e) */
    int32_t sequence, layer, head, groups;
} tier_item;

int attend_segments(const tier_item *item); /* 0: cancelled */
void rotate_values(float *x, int dim);

/* rows.c: norm, rotate and store the heads begin … end-1 (q heads, k heads, v heads) of one row; `qkv` is overwritten */
typedef struct rope_job {
    const kernel_ops *ops;
    const pool *kv;
    const batch *rows;
    const heads *shape;
    const rope *angles;
    const qk_norm *norm; /* NULL: none */
    int32_t layer;
} rope_job;

void rope_store_heads(const rope_job *job, float *qkv, int sequence, int position, int begin, int end, uint16_t *q_out);

static inline uint8_t *kv_half(const pool *kv, int layer, int value, int32_t block, int head) {
    int64_t head_bytes = (int64_t)kv->head_dim * BLOCK_TOKENS * 2;
    return kv->data + block * kv->block_bytes + (2 * layer + value) * kv->half_bytes + head * head_bytes;
}

static inline int closed_count(const batch *rows, int sequence) {
    return rows->closed ? rows->closed->counts[sequence] : 0;
}

static inline uint8_t *record_summary(const segment_pool *pool, int slot, int layer, int head) {
    int64_t record = (int64_t)layer * pool->num_kv_heads + head, records = (int64_t)pool->num_layers * pool->num_kv_heads;
    return pool->summaries + (slot * records + record) * pool->at.summary_bytes;
}

static inline uint8_t *record_payload(const segment_pool *pool, int slot, int layer, int head) {
    int64_t record = (int64_t)layer * pool->num_kv_heads + head;
    return (uint8_t *)(intptr_t)pool->payloads[slot] + record * pool->at.payload_bytes;
}

static inline float half_to_float(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#elif defined(__aarch64__)
    union { uint16_t u; __fp16 f; } bits = {half};
    return bits.f;
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    union { uint32_t u; float f; } bits = {magnitude << 13};
    if (magnitude >= 0x7c00) bits.u |= 0x7f800000; /* infinity, NaN */
    else bits.f *= 0x1p112f;                       /* rebias; subnormals come out right */
    bits.u |= sign;
    return bits.f;
#endif
}

static inline uint16_t float_to_half(float value) { /* to nearest, ties to even */
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    union { __fp16 f; uint16_t u; } bits = {(__fp16)value};
    return bits.u;
#else
    union { float f; uint32_t u; } bits = {value};
    uint32_t sign = bits.u >> 16 & 0x8000, magnitude = bits.u & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal in half: let float addition round */
        union { float f; uint32_t u; } shifted = {.u = magnitude};
        shifted.f += 0.5f;
        return (uint16_t)(sign | (shifted.u - 0x3f000000));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
#endif
}

/* To the nearest whole number, ties to even, for |x| < 2^22. Infinities and NaN become some number: a cast may do anything. */
static inline int32_t nearest(float x) {
    union { float f; int32_t i; } bits = {x + 12582912.0f}; /* 1.5 * 2^23 */
    return (int32_t)((uint32_t)bits.i - 0x4b400000u);
}

static inline float bf16_to_float(uint16_t value) {
    union { uint32_t u; float f; } bits = {(uint32_t)value << 16};
    return bits.f;
}

static inline uint16_t float_to_bf16(float value) { /* to nearest, ties to even; NaN stays NaN */
    union { float f; uint32_t u; } bits = {value};
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits.u + 0x7fff + ((bits.u >> 16) & 1)) >> 16);
}

#endif
