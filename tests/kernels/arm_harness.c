/* Runs the kernels on arrays read from a file and writes what they make: how test_arm.py reaches another CPU's build.
 *
 * usage: harness LEVEL IN OUT. Both files hold arrays one after another, each an int64 size in bytes and the bytes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

void pk_init(context *ctx, int threads, int level);
const char *pk_level(const context *ctx);
void pk_rms_norm(const context *ctx, const void *x, int x_bf16, const float *weight, int64_t rows, int n, float eps,
                 float offset, void *out, int out_bf16);
void pk_gated_act(const context *ctx, const void *gate_up, int is_bf16, int64_t rows, int n, int act, void *out);
int pk_linear(const context *ctx, const packed *weights, int parts, const void *x, int x_bf16, int rows,
              const float *bias, float *out);
int pk_attention(const context *ctx, const pool *kv, int layer, const batch *rows, const heads *shape, int window,
                 const uint16_t *q, uint16_t *out, const volatile int32_t *cancel);
int pk_decode_attention(const context *ctx, const pool *kv, int layer, const batch *rows, const heads *shape, int window,
                        const uint16_t *q, uint16_t *out);
int pk_close_records(const context *ctx, const pool *source, const int32_t *blocks, const segment_pool *slots, int slot,
                     int first, int count);

enum { /* the arrays of IN */
    NUMBERS, SCALE, POOL, CLOSE_TABLES, LAYOUT, POLICY, BLOCK_TABLE, SLOTS, Q, X, Q4, INT8, BF16, NORM, INPUTS
};

typedef struct numbers { /* of NUMBERS, in this order */
    int32_t q_heads, kv_heads, dim, layers, blocks, length, rows, segments, x_rows, cols, weight_rows;
} numbers;

static void stop(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(1);
}

static void *take(int64_t bytes) {
    void *memory = aligned_alloc(64, (size_t)((bytes + 127) / 64 * 64));
    if (!memory) stop("no memory");
    memset(memory, 0, (size_t)bytes);
    return memory;
}

static void *read_array(FILE *file) {
    int64_t bytes;
    if (fread(&bytes, 8, 1, file) != 1) stop("the input is cut short");
    void *memory = take(bytes);
    if (fread(memory, 1, (size_t)bytes, file) != (size_t)bytes) stop("the input is cut short");
    return memory;
}

static void write_array(FILE *file, const void *data, int64_t bytes) {
    if (fwrite(&bytes, 8, 1, file) != 1 || fwrite(data, 1, (size_t)bytes, file) != (size_t)bytes) stop("can't write");
}

static void check(int status, const char *what) {
    if (status != STATUS_OK) stop(what);
}

static void run_rows(const context *ctx, void *const *in, const numbers *n, FILE *out) {
    int tiles = (n->weight_rows + ROW_TILE - 1) / ROW_TILE, half = n->cols / 2;
    float *y = take(4 * (int64_t)n->x_rows * (n->cols > n->weight_rows ? n->cols : n->weight_rows));
    for (int kind = KIND_Q4; kind <= KIND_BF16; kind++) {
        packed weight = {in[Q4 + kind], kind, n->weight_rows, n->cols, tiles};
        check(pk_linear(ctx, &weight, 1, in[X], 0, n->x_rows, NULL, y), "linear failed");
        write_array(out, y, 4 * (int64_t)n->x_rows * n->weight_rows);
    }
    pk_rms_norm(ctx, in[X], 0, in[NORM], n->x_rows, n->cols, 1e-5f, 0.0f, y, 0);
    write_array(out, y, 4 * (int64_t)n->x_rows * n->cols);
    pk_gated_act(ctx, in[X], 0, n->x_rows, half, ACT_SILU, y);
    write_array(out, y, 4 * (int64_t)n->x_rows * half);
}

static void run_attention(const context *ctx, void *const *in, const numbers *n, FILE *out) {
    int64_t half = (int64_t)n->kv_heads * n->dim * BLOCK_TOKENS * 2, records = (int64_t)n->layers * n->kv_heads;
    pool kv = {in[POOL], n->blocks, 2 * n->layers * half, half, n->kv_heads, n->dim};
    heads shape = {n->q_heads, n->kv_heads, n->dim, *(const float *)in[SCALE]};
    const record_layout *at = in[LAYOUT];
    int64_t summaries = n->segments * records * at->summary_bytes, payload = records * at->payload_bytes;
    int64_t *payloads = take(8 * n->segments), bytes = (int64_t)n->rows * n->q_heads * n->dim * 2;
    segment_pool slots = {take(summaries), payloads, *at, n->segments, n->layers, n->kv_heads, n->dim};
    uint16_t *attended = take(bytes);
    for (int s = 0; s < n->segments; s++) {
        const int32_t *blocks = (const int32_t *)in[CLOSE_TABLES] + s * SEGMENT_BLOCKS;
        payloads[s] = (int64_t)(intptr_t)take(payload);
        check(pk_close_records(ctx, &kv, blocks, &slots, s, 0, (int)records), "closing failed");
        write_array(out, (const void *)(intptr_t)payloads[s], payload);
    }
    write_array(out, slots.summaries, summaries);
    segments closed = {slots, in[SLOTS], &n->segments, in[POLICY], NULL, NULL, NULL, NULL, n->segments};
    int32_t cu_q[] = {0, n->rows}, one[] = {0, 1}, max_blocks = (n->length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    batch rows = {cu_q, &n->length, in[BLOCK_TABLE], 1, max_blocks, &closed};
    for (int tiers = 0; tiers < 2; tiers++) {
        rows.closed = tiers ? &closed : NULL;
        rows.cu_q = cu_q;
        check(pk_attention(ctx, &kv, n->layers - 1, &rows, &shape, 0, in[Q], attended, NULL), "prefill failed");
        write_array(out, attended, bytes);
        rows.cu_q = one;
        check(pk_decode_attention(ctx, &kv, n->layers - 1, &rows, &shape, 0, in[Q], attended), "decode failed");
        write_array(out, attended, bytes / n->rows);
    }
}

int main(int count, char **arguments) {
    if (count != 4) stop("usage: harness LEVEL IN OUT");
    FILE *from = fopen(arguments[2], "rb"), *to = fopen(arguments[3], "wb");
    if (!from || !to) stop("can't open the files");
    void *in[INPUTS];
    for (int i = 0; i < INPUTS; i++) in[i] = read_array(from);
    context ctx;
    pk_init(&ctx, 2, atoi(arguments[1]));
    printf("%s\n", pk_level(&ctx));
    run_rows(&ctx, in, in[NUMBERS], to);
    run_attention(&ctx, in, in[NUMBERS], to);
    if (fclose(to)) stop("can't write");
    return 0;
}
