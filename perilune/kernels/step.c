/* One decode step of a whole model inside one parallel region: a token for each of up to 16 sequences.
 *
 * Phases are separated by barriers; inside a phase threads take items from a counter, so a thread that the system holds
 * up delays nobody. Row-wise phases are split by row.
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

enum { PHASE_QKV, PHASE_ATTENTION, PHASE_O, PHASE_GATE_UP, PHASE_DOWN, PHASES };

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
    uint8_t *scratch;
    atomic_int *next;
    int32_t parts;
    int32_t stopped; /* written by one thread between barriers */
} step;

static linear_job job_for(const step *s, const packed *weights, int parts, const float *bias, float *out, int64_t stride) {
    return (linear_job){weights, {s->prepared[0], s->prepared[1]}, bias, out, stride, parts, s->rows->num_sequences};
}

/* Add the branch (if there is one) to the rows of this thread, norm them and prepare them for `job`. */
static void add_norm_prepare(const step *s, int has_branch, const float *post_norm, const float *norm, const linear_job *job) {
    const kernel_ops *ops = s->ctx->ops;
    int n = s->model->hidden;
    float normed[n];
    for (int row = omp_get_thread_num(); row < s->rows->num_sequences; row += omp_get_num_threads()) {
        float *x = s->x + (int64_t)row * n, *branch = s->branch + (int64_t)row * n;
        if (has_branch && post_norm) ops->rms_norm(branch, post_norm, n, s->model->eps, 0.0f, branch);
        if (has_branch) ops->add(branch, n, x);
        ops->rms_norm(x, norm, n, s->model->eps, 0.0f, normed);
        linear_prepare(s->ctx, job, normed, row);
    }
#pragma omp barrier
}

static void run_linear(const step *s, const linear_job *job, int layer, int phase) {
    linear_run(s->ctx, job, &s->next[layer * PHASES + phase]);
#pragma omp barrier
}

/* Rotation and KV store, split by row and head. */
static void store_rows(const step *s, const decode_layer *layer, int index) {
    const heads *shape = &s->model->shape;
    int all = shape->num_q_heads + 2 * shape->num_kv_heads, units = all * s->rows->num_sequences;
    rope_job job = {s->ctx->ops, s->kv, s->rows, shape, &layer->angles, layer->has_qk_norm ? &layer->norm : NULL, index};
    int threads = omp_get_num_threads(), thread = omp_get_thread_num();
    int begin = units * thread / threads, end = units * (thread + 1) / threads;
    for (int unit = begin; unit < end;) {
        int row = unit / all, head = unit % all, stop = end - unit < all - head ? head + end - unit : all;
        rope_store_heads(&job, s->wide + (int64_t)row * all * shape->head_dim, row, s->rows->kv_lengths[row] - 1, head,
                         stop, s->q + (int64_t)row * shape->num_q_heads * shape->head_dim);
        unit += stop - head;
    }
#pragma omp barrier
}

static void attend_rows(const step *s, const decode_layer *layer, int index, const linear_job *o) {
    const heads *shape = &s->model->shape;
    decode_job job = {s->ctx, s->kv, s->rows, shape, index, layer->window, s->parts, s->q, s->partial, s->scratch};
    decode_partials(&job, &s->next[index * PHASES + PHASE_ATTENTION], omp_get_thread_num());
#pragma omp barrier
    float merged[shape->num_q_heads * shape->head_dim];
    for (int row = omp_get_thread_num(); row < s->rows->num_sequences; row += omp_get_num_threads()) {
        for (int h = 0; h < shape->num_q_heads; h++) decode_merge(&job, row, h, merged + h * shape->head_dim);
        linear_prepare(s->ctx, o, merged, row);
    }
#pragma omp barrier
}

static void activate_rows(const step *s, const linear_job *down) {
    int n = s->model->ffn;
    float product[n];
    for (int row = omp_get_thread_num(); row < s->rows->num_sequences; row += omp_get_num_threads()) {
        const float *gate = s->wide + (int64_t)row * 2 * n;
        s->ctx->ops->act_mul(s->model->act, gate, gate + n, n, product);
        linear_prepare(s->ctx, down, product, row);
    }
#pragma omp barrier
}

static void run_layer(const step *s, int index) {
    const decode_model *model = s->model;
    const decode_layer *layer = &model->layers[index], *previous = index ? layer - 1 : NULL;
    int64_t columns = (int64_t)(model->shape.num_q_heads + 2 * model->shape.num_kv_heads) * model->shape.head_dim;
    linear_job qkv = job_for(s, layer->qkv, layer->qkv_parts, layer->qkv_bias, s->wide, columns);
    linear_job o = job_for(s, &layer->o, 1, layer->o_bias, s->branch, model->hidden);
    linear_job gate_up = job_for(s, layer->gate_up, layer->gate_up_parts, NULL, s->wide, 2 * (int64_t)model->ffn);
    linear_job down = job_for(s, &layer->down, 1, NULL, s->branch, model->hidden);
    add_norm_prepare(s, index > 0, previous ? previous->post_ffn_norm : NULL, layer->input_norm, &qkv);
    run_linear(s, &qkv, index, PHASE_QKV);
    store_rows(s, layer, index);
    attend_rows(s, layer, index, &o);
    run_linear(s, &o, index, PHASE_O);
    add_norm_prepare(s, 1, layer->post_attn_norm, layer->ffn_norm, &gate_up);
    run_linear(s, &gate_up, index, PHASE_GATE_UP);
    activate_rows(s, &down);
    run_linear(s, &down, index, PHASE_DOWN);
}

static void run_step(step *s) {
    const decode_model *model = s->model;
    for (int index = 0; index < model->num_layers; index++) {
#pragma omp single
        s->stopped = s->cancel && *s->cancel;
        if (s->stopped) return;
        run_layer(s, index);
    }
    linear_job head = job_for(s, &model->head, 1, NULL, s->logits, model->head.rows);
    add_norm_prepare(s, 1, model->layers[model->num_layers - 1].post_ffn_norm, model->final_norm, &head);
    run_linear(s, &head, model->num_layers, 0);
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
        4 * decode_scratch_floats(s->rows, shape, s->parts), align64(attention_scratch_bytes(shape)) * s->ctx->threads,
        (int64_t)sizeof(atomic_int) * (model->num_layers + 1) * PHASES};
    void **places[] = {(void **)&s->wide, (void **)&s->branch, (void **)&s->q, (void **)&s->prepared[0],
                       (void **)&s->prepared[1], (void **)&s->partial, (void **)&s->scratch, (void **)&s->next};
    for (int i = 0; i < 8; i++) {
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
    if (!batch_is_valid(rows, kv, positions)) return STATUS_BAD_BATCH;
    step s = {.ctx = ctx, .model = model, .kv = kv, .rows = rows, .cancel = cancel, .x = x, .logits = logits};
    s.parts = decode_parts(ctx, rows, &model->shape);
    uint8_t *memory = aligned_alloc(64, (size_t)lay_out(&s, NULL));
    if (!memory) return STATUS_NO_MEMORY;
    lay_out(&s, memory);
    for (int i = 0; i < (model->num_layers + 1) * PHASES; i++) atomic_init(&s.next[i], 0);
#pragma omp parallel num_threads(ctx->threads)
    run_step(&s);
    free(memory);
    return s.stopped ? STATUS_CANCELLED : STATUS_OK;
}
