/* One decode step of a whole model inside one parallel region: a token for each of up to 16 sequences.
 *
 * A step is a fixed list of phases (see kernels.h). Their buffers are reused by later phases, which is safe because a
 * thread only touches them for items that it took, and a phase isn't over before its items are.
 */
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

typedef struct decode_layer {
    const float *input_norm, *qkv_bias, *o_bias, *post_attn_norm, *ffn_norm, *post_ffn_norm;
    packed qkv[MAX_PARTS], o, gate_up[MAX_PARTS], down;
    qk_norm norm;
    rope angles;
    int32_t qkv_parts, gate_up_parts, window, has_qk_norm;
} decode_layer;

typedef struct decode_model {
    const decode_layer *layers;
    const float *final_norm;
    packed head;
    heads shape;
    float eps;
    int32_t num_layers, hidden, ffn, act;
} decode_model;

enum { /* of one layer */
    PHASE_NORM, PHASE_QKV, PHASE_STORE, PHASE_ATTENTION, PHASE_MERGE, PHASE_O, PHASE_FFN_NORM, PHASE_GATE_UP,
    PHASE_ACTIVATE, PHASE_DOWN, PHASE_TIERS, PHASES = PHASE_TIERS + TIER_PHASES
};

#define STORE_ITEMS 4 /* of a row's heads */

typedef struct step { /* what all threads of a step share */
    const context *ctx;
    const decode_model *model;
    const pool *kv;
    const batch *rows;
    const volatile int32_t *cancel;
    float *x, *wide, *branch, *logits; /* residual [T][hidden]; qkv or gate_up; o or down, [T][hidden] */
    uint16_t *q;
    uint8_t *prepared[2];
    float *partial;
    uint8_t *scratch, *tiers; /* tiers NULL: no sequence has closed segments */
    phase *phases;
    int32_t parts;
    atomic_int stopped;
} step;

static linear_job job_for(const step *s, const packed *weights, int parts, const float *bias, float *out, int64_t stride) {
    return (linear_job){weights, {s->prepared[0], s->prepared[1]}, bias, out, stride, parts, s->rows->num_sequences};
}

static phase *phase_of(const step *s, int layer, int which) { return &s->phases[layer * PHASES + which]; }

/* Add the branch (if there is one) to the rows, norm them and prepare them for `job`. */
static void add_norm_prepare(step *s, phase *at, int has_branch, const float *post_norm, const float *norm,
                             const linear_job *job) {
    const kernel_ops *ops = s->ctx->ops;
    int n = s->model->hidden;
    float normed[n];
    PHASE_ITEMS(at, row, s->rows->num_sequences) {
        float *x = s->x + (int64_t)row * n, *branch = s->branch + (int64_t)row * n;
        if (s->cancel && *s->cancel) atomic_store_explicit(&s->stopped, 1, memory_order_relaxed);
        if (has_branch && post_norm) ops->rms_norm(branch, post_norm, n, s->model->eps, 0.0f, branch);
        if (has_branch) ops->add(branch, n, x);
        ops->rms_norm(x, norm, n, s->model->eps, 0.0f, normed);
        linear_prepare(s->ctx, job, normed, row);
    }
    phase_wait(at, s->rows->num_sequences);
}

/* Rotation and KV store, by row and share of its heads. */
static void store_rows(const step *s, const decode_layer *layer, int index) {
    const heads *shape = &s->model->shape;
    phase *at = phase_of(s, index, PHASE_STORE);
    int all = shape->num_q_heads + 2 * shape->num_kv_heads, total = s->rows->num_sequences * STORE_ITEMS;
    rope_job job = {s->ctx->ops, s->kv, s->rows, shape, &layer->angles, layer->has_qk_norm ? &layer->norm : NULL, index};
    PHASE_ITEMS(at, item, total) {
        int row = item / STORE_ITEMS, share = item % STORE_ITEMS;
        rope_store_heads(&job, s->wide + (int64_t)row * all * shape->head_dim, row, s->rows->kv_lengths[row] - 1,
                         all * share / STORE_ITEMS, all * (share + 1) / STORE_ITEMS,
                         s->q + (int64_t)row * shape->num_q_heads * shape->head_dim);
    }
    phase_wait(at, total);
}

static void attend_rows(const step *s, const decode_layer *layer, int index, const linear_job *o) {
    const heads *shape = &s->model->shape;
    decode_job job = {s->ctx, s->kv, s->rows, shape, index, layer->window, s->parts, s->q, s->partial, s->scratch, s->tiers};
    if (s->tiers) tier_partials(&job, phase_of(s, index, PHASE_TIERS), omp_get_thread_num());
    else decode_partials(&job, phase_of(s, index, PHASE_ATTENTION), omp_get_thread_num());
    phase *at = phase_of(s, index, PHASE_MERGE);
    float merged[shape->num_q_heads * shape->head_dim];
    PHASE_ITEMS(at, row, s->rows->num_sequences) {
        for (int h = 0; h < shape->num_q_heads; h++) {
            if (s->tiers) tier_merge(&job, row, h, merged + h * shape->head_dim);
            else decode_merge(&job, row, h, merged + h * shape->head_dim);
        }
        if (s->tiers) tier_stats(&job, row);
        linear_prepare(s->ctx, o, merged, row);
    }
    phase_wait(at, s->rows->num_sequences);
}

static void activate_rows(const step *s, phase *at, const linear_job *down) {
    int n = s->model->ffn;
    float product[n];
    PHASE_ITEMS(at, row, s->rows->num_sequences) {
        const float *gate = s->wide + (int64_t)row * 2 * n;
        s->ctx->ops->act_mul(s->model->act, gate, gate + n, n, product);
        linear_prepare(s->ctx, down, product, row);
    }
    phase_wait(at, s->rows->num_sequences);
}

static void run_layer(step *s, int index) {
    const decode_model *model = s->model;
    const decode_layer *layer = &model->layers[index], *previous = index ? layer - 1 : NULL;
    int64_t columns = (int64_t)(model->shape.num_q_heads + 2 * model->shape.num_kv_heads) * model->shape.head_dim;
    linear_job qkv = job_for(s, layer->qkv, layer->qkv_parts, layer->qkv_bias, s->wide, columns);
    linear_job o = job_for(s, &layer->o, 1, layer->o_bias, s->branch, model->hidden);
    linear_job gate_up = job_for(s, layer->gate_up, layer->gate_up_parts, NULL, s->wide, 2 * (int64_t)model->ffn);
    linear_job down = job_for(s, &layer->down, 1, NULL, s->branch, model->hidden);
    add_norm_prepare(s, phase_of(s, index, PHASE_NORM), index > 0, previous ? previous->post_ffn_norm : NULL,
                     layer->input_norm, &qkv);
    if (atomic_load_explicit(&s->stopped, memory_order_relaxed)) return;
    linear_run(s->ctx, &qkv, phase_of(s, index, PHASE_QKV));
    store_rows(s, layer, index);
    attend_rows(s, layer, index, &o);
    linear_run(s->ctx, &o, phase_of(s, index, PHASE_O));
    add_norm_prepare(s, phase_of(s, index, PHASE_FFN_NORM), 1, layer->post_attn_norm, layer->ffn_norm, &gate_up);
    linear_run(s->ctx, &gate_up, phase_of(s, index, PHASE_GATE_UP));
    activate_rows(s, phase_of(s, index, PHASE_ACTIVATE), &down);
    linear_run(s->ctx, &down, phase_of(s, index, PHASE_DOWN));
}

static void run_step(step *s) {
    const decode_model *model = s->model;
    for (int index = 0; index < model->num_layers; index++) {
        run_layer(s, index);
        if (atomic_load_explicit(&s->stopped, memory_order_relaxed)) return;
    }
    linear_job head = job_for(s, &model->head, 1, NULL, s->logits, model->head.rows);
    const float *post_norm = model->layers[model->num_layers - 1].post_ffn_norm;
    add_norm_prepare(s, phase_of(s, model->num_layers, PHASE_NORM), 1, post_norm, model->final_norm, &head);
    linear_run(s->ctx, &head, phase_of(s, model->num_layers, PHASE_QKV));
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Hand out pieces of one allocation; with `memory` NULL only count its bytes. */
static int64_t lay_out(step *s, uint8_t *memory) {
    const decode_model *model = s->model;
    const heads *shape = &model->shape;
    int64_t rows = s->rows->num_sequences, q_columns = (int64_t)shape->num_q_heads * shape->head_dim;
    int64_t columns = q_columns + 2 * (int64_t)shape->num_kv_heads * shape->head_dim, used = 0;
    int widest = (int)larger(larger(model->hidden, model->ffn), q_columns);
    int64_t sizes[] = {
        4 * rows * larger(columns, 2 * (int64_t)model->ffn), 4 * rows * model->hidden, 2 * rows * q_columns,
        prepared_bytes(widest, (int)rows), prepared_bytes(widest, (int)rows),
        s->rows->closed ? 0 : 4 * decode_scratch_floats(s->rows, shape, s->parts), align64(attention_scratch_bytes(shape)) * s->ctx->threads,
        (int64_t)sizeof(phase) * (model->num_layers + 1) * PHASES,
        s->rows->closed ? tier_bytes(s->rows, shape, s->ctx->threads) : 0};
    void **places[] = {(void **)&s->wide, (void **)&s->branch, (void **)&s->q, (void **)&s->prepared[0],
                       (void **)&s->prepared[1], (void **)&s->partial, (void **)&s->scratch, (void **)&s->phases,
                       (void **)&s->tiers};
    for (int i = 0; i < 9; i++) {
        if (memory) *places[i] = memory + used;
        used += align64(sizes[i]);
    }
    return used;
}

EXPORT int pk_decode_step(const context *ctx, const decode_model *model, const pool *kv, const batch *rows, float *x,
                   float *logits, const volatile int32_t *cancel) {
    int64_t positions = model->layers[0].angles.max_positions;
    for (int i = 1; i < model->num_layers; i++)
        if (model->layers[i].angles.max_positions < positions) positions = model->layers[i].angles.max_positions;
    if (!decode_batch_is_valid(rows, kv, positions)) return STATUS_BAD_BATCH;
    for (int i = 0; i < model->num_layers; i++)
        if (!window_is_kept(rows, model->layers[i].window)) return STATUS_BAD_BATCH;
    step s = {.ctx = ctx, .model = model, .kv = kv, .rows = rows, .cancel = cancel, .x = x, .logits = logits};
    s.parts = decode_parts(rows);
    uint8_t *memory = aligned_alloc(64, (size_t)lay_out(&s, NULL));
    if (!memory) return STATUS_NO_MEMORY;
    lay_out(&s, memory);
    if (rows->closed) tier_open(rows, &model->shape, ctx->threads, s.tiers);
    else s.tiers = NULL;
    memset(s.phases, 0, sizeof(phase) * (size_t)(model->num_layers + 1) * PHASES);
#pragma omp parallel num_threads(ctx->threads)
    run_step(&s);
    free(memory);
    return s.stopped ? STATUS_CANCELLED : STATUS_OK;
}
