/* Row-wise operations of prefill over a batch: norm, activation, residual, rotation with KV store. */
#include <omp.h>
#include <string.h>

#include "kernels.h"

#define STATIC_ROWS(rows)                                                                                       \
    int64_t per = ((rows) + omp_get_num_threads() - 1) / omp_get_num_threads();                                 \
    int64_t begin = per * omp_get_thread_num(), end = begin + per < (rows) ? begin + per : (rows)

/* A row as floats: itself, or converted into `copy`. */
static const float *as_float(const kernel_ops *ops, const void *x, int is_bf16, int64_t row, int64_t n, float *copy) {
    if (!is_bf16) return (const float *)x + row * n;
    ops->to_float((const uint16_t *)x + row * n, n, copy);
    return copy;
}

EXPORT void pk_rms_norm(const context *ctx, const void *x, int x_bf16, const float *weight, int64_t rows, int n, float eps,
                 float offset, void *out, int out_bf16) {
    const kernel_ops *ops = ctx->ops;
#pragma omp parallel num_threads(ctx->threads) if (rows > 8)
    {
        float copy[n], normed[n];
        STATIC_ROWS(rows);
        for (int64_t row = begin; row < end; row++) {
            const float *in = as_float(ops, x, x_bf16, row, n, copy);
            ops->rms_norm(in, weight, n, eps, offset, out_bf16 ? normed : (float *)out + row * n);
            if (out_bf16) ops->to_bf16(normed, n, (uint16_t *)out + row * n);
        }
    }
}

/* residual += delta (normed by `post_norm` first, if given); out = the new residual, normed by `weight`. */
EXPORT void pk_add_norm(const context *ctx, float *residual, const void *delta, int delta_bf16, const float *post_norm,
                 const float *weight, int64_t rows, int n, float eps, void *out, int out_bf16) {
    const kernel_ops *ops = ctx->ops;
#pragma omp parallel num_threads(ctx->threads) if (rows > 8)
    {
        float copy[n], normed[n];
        STATIC_ROWS(rows);
        for (int64_t row = begin; row < end; row++) {
            float *sum = residual + row * n;
            const float *in = as_float(ops, delta, delta_bf16, row, n, copy);
            if (post_norm) ops->rms_norm(in, post_norm, n, eps, 0.0f, normed);
            ops->add(post_norm ? normed : in, n, sum);
            ops->rms_norm(sum, weight, n, eps, 0.0f, out_bf16 ? normed : (float *)out + row * n);
            if (out_bf16) ops->to_bf16(normed, n, (uint16_t *)out + row * n);
        }
    }
}

EXPORT void pk_gated_act(const context *ctx, const void *gate_up, int is_bf16, int64_t rows, int n, int act, void *out) {
    const kernel_ops *ops = ctx->ops;
#pragma omp parallel num_threads(ctx->threads) if (rows > 8)
    {
        float copy[2 * n], product[n];
        STATIC_ROWS(rows);
        for (int64_t row = begin; row < end; row++) {
            const float *in = as_float(ops, gate_up, is_bf16, row, 2 * (int64_t)n, copy);
            ops->act_mul(act, in, in + n, n, is_bf16 ? product : (float *)out + row * n);
            if (is_bf16) ops->to_bf16(product, n, (uint16_t *)out + row * n);
        }
    }
}

static void store_k(const kernel_ops *ops, const float *k, int dim, int slot, uint16_t *block) {
    uint16_t rounded[dim];
    ops->to_bf16(k, dim, rounded);
    for (int d = 0; d < dim; d += 2) memcpy(block + d * BLOCK_TOKENS + 2 * slot, rounded + d, 4);
}

static void store_v(const kernel_ops *ops, const float *v, int dim, int slot, uint16_t *block) {
    uint16_t rounded[dim], *out = block + slot / 2 * 2 * dim + slot % 2;
    ops->to_bf16(v, dim, rounded);
    for (int d = 0; d < dim; d++) out[2 * d] = rounded[d];
}

void rope_store_heads(const rope_job *job, float *qkv, int sequence, int position, int begin, int end, uint16_t *q_out) {
    const heads *shape = job->shape;
    int dim = shape->head_dim, nq = shape->num_q_heads, nk = shape->num_kv_heads, slot = position % BLOCK_TOKENS;
    int32_t block = job->rows->block_tables[(int64_t)sequence * job->rows->max_blocks + position / BLOCK_TOKENS];
    const float *cos = job->angles->cos + (int64_t)position * (dim / 2);
    const float *sin = job->angles->sin + (int64_t)position * (dim / 2);
    for (int h = begin; h < end; h++) {
        float *x = qkv + (int64_t)h * dim;
        if (h >= nq + nk) {
            store_v(job->ops, x, dim, slot, (uint16_t *)kv_half(job->kv, job->layer, 1, block, h - nq - nk));
            continue;
        }
        const float *weight = !job->norm ? NULL : h < nq ? job->norm->q_weight : job->norm->k_weight;
        if (weight) job->ops->rms_norm(x, weight, dim, job->norm->eps, job->norm->offset, x);
        job->ops->rotate(x, cos, sin, dim / 2);
        if (h < nq) job->ops->to_bf16(x, dim, q_out + (int64_t)h * dim);
        else store_k(job->ops, x, dim, slot, (uint16_t *)kv_half(job->kv, job->layer, 0, block, h - nq));
    }
}

EXPORT int pk_rope_store(const context *ctx, const void *qkv, int is_bf16, const heads *shape, const rope *angles,
                  const qk_norm *norm, const pool *kv, int layer, const batch *rows, uint16_t *q_out) {
    if (!batch_is_valid(rows, kv, angles->max_positions)) return STATUS_BAD_BATCH;
    int dim = shape->head_dim, all = shape->num_q_heads + 2 * shape->num_kv_heads, columns = all * dim;
    rope_job job = {ctx->ops, kv, rows, shape, angles, norm, layer};
    int64_t total = rows->cu_q[rows->num_sequences];
#pragma omp parallel num_threads(ctx->threads) if (total > 8)
    {
        float copy[columns];
        int sequence = 0;
        STATIC_ROWS(total);
        for (int64_t row = begin; row < end; row++) {
            while (row >= rows->cu_q[sequence + 1]) sequence++;
            int position = rows->kv_lengths[sequence] - rows->cu_q[sequence + 1] + (int)row;
            if (is_bf16) ctx->ops->to_float((const uint16_t *)qkv + row * columns, columns, copy);
            else memcpy(copy, (const float *)qkv + row * columns, sizeof copy);
            rope_store_heads(&job, copy, sequence, position, 0, all, q_out + row * shape->num_q_heads * dim);
        }
    }
    return STATUS_OK;
}
