/* Choice of the CPU level, and the linear that stands alone. A context is made once and never changes. */
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels.h"

#define TILES_PER_ITEM_BYTES 32768 /* weight bytes that a thread takes at a time */

#if defined(__x86_64__)
static const kernel_ops *best_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bf16"))
        return &ops_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &ops_avx2;
    return &ops_portable;
}
#elif defined(__aarch64__) && defined(__linux__)
static const kernel_ops *best_level(void) {
    int has_dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0, has_bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
    return has_dot && has_bf16 ? &ops_neon : &ops_portable;
}
#else
static const kernel_ops *best_level(void) { return &ops_portable; }
#endif

/* `level`: 0 portable, 1 AVX2, 2 AVX-512 (on Arm, NEON with bf16 and dot products); the best that the CPU has where it is lower. */
EXPORT void pk_init(context *ctx, int threads, int level) {
    const kernel_ops *best = level <= 0 ? &ops_portable : best_level();
#if defined(__x86_64__)
    if (level == 1 && best == &ops_avx512) best = &ops_avx2;
#endif
    *ctx = (context){best, threads};
}

EXPORT const char *pk_level(const context *ctx) { return ctx->ops->name; }

int linear_items(const packed *weight) {
    int64_t bytes = weight->kind == KIND_BF16 ? 32 * (int64_t)weight->cols
                                              : (weight->kind == KIND_Q4 ? 10 : 17) * (int64_t)weight->cols;
    int64_t per = TILES_PER_ITEM_BYTES / bytes;
    if (per < 1) per = 1;
    return (int)((weight->tiles + per - 1) / per);
}

/* One phase: returns when all of the product is there. */
void linear_run(const context *ctx, const linear_job *job, phase *at) {
    int total = 0, items[MAX_PARTS];
    for (int p = 0; p < job->parts; p++) total += items[p] = linear_items(&job->weights[p]);
    PHASE_ITEMS(at, i, total) {
        int part = 0, column = 0, item = i;
        while (item >= items[part]) {
            item -= items[part];
            column += job->weights[part++].rows;
        }
        const packed *weight = &job->weights[part];
        int begin = (int)((int64_t)weight->tiles * item / items[part]);
        int end = (int)((int64_t)weight->tiles * (item + 1) / items[part]);
        ctx->ops->linear(weight, begin, end, job->prepared[weight->kind == KIND_BF16], job->rows,
                         job->bias ? job->bias + column : NULL, job->out + column, job->stride);
    }
    phase_wait(at, total);
}

void linear_prepare(const context *ctx, const linear_job *job, const float *x, int row) {
    int done[2] = {0, 0}, cols = job->weights[0].cols;
    for (int p = 0; p < job->parts; p++) {
        int form = job->weights[p].kind == KIND_BF16;
        if (!done[form]++) ctx->ops->prepare(job->weights[p].kind, x, cols, row, job->rows, job->prepared[form]);
    }
}

int64_t prepared_bytes(int cols, int rows) { return ((int64_t)8 * cols + 64) * rows; }

EXPORT int pk_linear(const context *ctx, const packed *weights, int parts, const void *x, int x_bf16, int rows,
              const float *bias, float *out) {
    int cols = weights[0].cols, columns = 0;
    int64_t bytes = (prepared_bytes(cols, rows) + 63) / 64 * 64;
    for (int p = 0; p < parts; p++) columns += weights[p].rows;
    uint8_t *memory = aligned_alloc(64, (size_t)(2 * bytes));
    if (!memory) return STATUS_NO_MEMORY;
    linear_job job = {weights, {memory, memory + bytes}, bias, out, columns, parts, rows};
    phase prepare = {0}, product = {0};
#pragma omp parallel num_threads(ctx->threads)
    {
        float copy[cols];
        PHASE_ITEMS(&prepare, row, rows) {
            const float *in = (const float *)x + (int64_t)row * cols;
            if (x_bf16) ctx->ops->to_float((const uint16_t *)x + (int64_t)row * cols, cols, copy);
            linear_prepare(ctx, &job, x_bf16 ? copy : in, row);
        }
        phase_wait(&prepare, rows);
        linear_run(ctx, &job, &product);
    }
    free(memory);
    return STATUS_OK;
}
