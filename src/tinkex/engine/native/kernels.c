/* Fused operations between the matrix products, for CPUs.

   Each does in one pass over memory what takes several operations of PyTorch, which remain the reference and the
   fallback (engine/kernels.py). Rows are independent: a result does not depend on the other rows or on the number of
   threads.

   `half` says whether the inputs and outputs of the matrix products are bfloat16 (1) or float32 (0). Everything
   else, and all arithmetic, is float32. A parallel region uses the OpenMP runtime of PyTorch. */

#include "numbers.h"

/* -- norms and residual sums ---------------------------------------------------------------- */

INLINE float rms_scale(const float *x, long width, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < width; i++)
        squares += x[i] * x[i];
    return 1.0f / sqrtf(squares / (float)width + eps);
}

INLINE void norm_row(const float *x, const float *weight, float eps, void *out, long width, int half) {
    float scale = rms_scale(x, width, eps);
#pragma omp simd
    for (long i = 0; i < width; i++)
        put(out, i, x[i] * scale * weight[i], half);
}

INLINE void add_row(const float *x, const void *delta, float *sum, long width, int half) {
#pragma omp simd
    for (long i = 0; i < width; i++)
        sum[i] = x[i] + get(delta, i, half);
}

/* out = norm(x), rounded. With `delta`: sum = x + delta first, and out = norm(sum). Without `out`: only the sum. */
EXPORT void tinkex_norm(int threads, int half, const float *x, const void *delta, float *sum, const float *weight,
                        float eps, void *out, int out_half, long rows, long width) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long n = 0; n < rows; n++) {
        const float *row = x + n * width;
        if (delta) {
            if (half)
                add_row(row, at(delta, n * width, 1), sum + n * width, width, 1);
            else
                add_row(row, at(delta, n * width, 0), sum + n * width, width, 0);
            row = sum + n * width;
        }
        if (out && out_half)
            norm_row(row, weight, eps, at(out, n * width, 1), width, 1);
        else if (out)
            norm_row(row, weight, eps, at(out, n * width, 0), width, 0);
    }
}

INLINE void norm_back_row(float *g, const float *x, const void *normed_g, const float *weight, float eps,
                          void *g_rounded, long width, int half) {
    float scale = rms_scale(x, width, eps), along = 0;
#pragma omp simd reduction(+ : along)
    for (long i = 0; i < width; i++)
        along += get(normed_g, i, half) * weight[i] * x[i];
    along *= scale * scale * scale / -(float)width;
#pragma omp simd
    for (long i = 0; i < width; i++) {
        g[i] += get(normed_g, i, half) * weight[i] * scale + x[i] * along;
        if (half)
            put(g_rounded, i, g[i], 1);
    }
}

/* Add the gradient of a norm's input to g. In bfloat16, g_rounded becomes g for the next product. */
EXPORT void tinkex_norm_back(int threads, int half, float *g, const float *x, const void *normed_g,
                             const float *weight, float eps, void *g_rounded, long rows, long width) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long n = 0; n < rows; n++) {
        long o = n * width;
        if (half)
            norm_back_row(g + o, x + o, at(normed_g, o, 1), weight, eps, at(g_rounded, o, 1), width, 1);
        else
            norm_back_row(g + o, x + o, at(normed_g, o, 0), weight, eps, 0, width, 0);
    }
}

/* -- silu(gate) * up ------------------------------------------------------------------------ */

#define BLOCK 128 /* numbers that are rounded at once */

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE void gated_row(const void *gate_up, void *out, long width, int half) {
    for (long begin = 0; begin < width; begin += BLOCK) {
        long count = width - begin < BLOCK ? width - begin : BLOCK;
        float exact[BLOCK], *found = half ? exact : (float *)out + begin;
#pragma omp simd
        for (long i = 0; i < count; i++) {
            float gate = get(gate_up, begin + i, half), up = get(gate_up, width + begin + i, half);
            found[i] = gate * sigmoid(gate) * up;
        }
        if (half)
            round_row(exact, at(out, begin, 1), count);
    }
}

EXPORT void tinkex_gated(int threads, int half, const void *gate_up, void *out, long rows, long width) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long n = 0; n < rows; n++)
        if (half)
            gated_row(at(gate_up, 2 * n * width, 1), at(out, n * width, 1), width, 1);
        else
            gated_row(at(gate_up, 2 * n * width, 0), at(out, n * width, 0), width, 0);
}

INLINE void gated_back_row(const void *gate_up, const void *g, void *gate_up_g, void *out, long width, int half) {
    for (long begin = 0; begin < width; begin += BLOCK) {
        long count = width - begin < BLOCK ? width - begin : BLOCK;
        float exact[3][BLOCK], *gate_g = half ? exact[0] : (float *)gate_up_g + begin;
        float *up_g = half ? exact[1] : (float *)gate_up_g + width + begin, *found = half ? exact[2] : (float *)out + begin;
#pragma omp simd
        for (long i = 0; i < count; i++) {
            float gate = get(gate_up, begin + i, half), up = get(gate_up, width + begin + i, half);
            float here = get(g, begin + i, half), part = sigmoid(gate), silu = gate * part;
            gate_g[i] = here * up * part * (1.0f + gate * (1.0f - part));
            up_g[i] = here * silu;
            found[i] = silu * up;
        }
        if (half) {
            round_row(exact[0], at(gate_up_g, begin, 1), count);
            round_row(exact[1], at(gate_up_g, width + begin, 1), count);
            round_row(exact[2], at(out, begin, 1), count);
        }
    }
}

/* The gradient of gate and up, and silu(gate) * up again. */
EXPORT void tinkex_gated_back(int threads, int half, const void *gate_up, const void *g, void *gate_up_g, void *out,
                              long rows, long width) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long n = 0; n < rows; n++)
        if (half)
            gated_back_row(at(gate_up, 2 * n * width, 1), at(g, n * width, 1), at(gate_up_g, 2 * n * width, 1),
                           at(out, n * width, 1), width, 1);
        else
            gated_back_row(at(gate_up, 2 * n * width, 0), at(g, n * width, 0), at(gate_up_g, 2 * n * width, 0),
                           at(out, n * width, 0), width, 0);
}

/* -- logprobs over a vocabulary ------------------------------------------------------------- */

#define PART 512 /* numbers whose exponentials are added up in float32 */

INLINE float log_sum_exp(const void *logits, long width, int half) {
    float largest = -INFINITY;
    double sum = 0; /* of parts, so that it is as exact however the compiler adds up numbers of one part */
#pragma omp simd reduction(max : largest)
    for (long i = 0; i < width; i++) {
        float value = get(logits, i, half);
        largest = value > largest ? value : largest;
    }
    for (long begin = 0; begin < width; begin += PART) {
        long end = MIN(begin + PART, width);
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (long i = begin; i < end; i++)
            part += exponential(get(logits, i, half) - largest);
        sum += part;
    }
    return (float)(largest + log(sum));
}

/* totals: the logarithm of the sum of exp(logits) of each row. */
EXPORT void tinkex_log_sum_exp(int threads, int half, const void *logits, float *totals, long rows, long width) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long n = 0; n < rows; n++)
        totals[n] = half ? log_sum_exp(at(logits, n * width, 1), width, 1)
                         : log_sum_exp(at(logits, n * width, 0), width, 0);
}

INLINE void logits_back_row(void *logits, float total, const int64_t *targets, const float *g, long count, long width,
                            int half) {
    float sum = 0, target = get(logits, targets[0], half);
    for (long k = 0; k < count; k++)
        sum += g[k];
    if (sum == 0) {
        memset(logits, 0, (size_t)width * (half ? 2 : 4));
    } else {
#pragma omp simd
        for (long i = 0; i < width; i++)
            put(logits, i, exponential(get(logits, i, half) - total) * -sum, half);
    }
    if (count == 1) /* from the logit, so that the gradient is rounded only once */
        put(logits, targets[0], g[0] - exponential(target - total) * sum, half);
    else
        for (long k = 0; k < count; k++)
            put(logits, targets[k], get(logits, targets[k], half) + g[k], half);
}

/* Overwrite logits with the gradient that their targets' logprobs give them. */
EXPORT void tinkex_logits_back(int threads, int half, void *logits, const float *totals, const int64_t *targets,
                               const float *g, long count, long rows, long width) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long n = 0; n < rows; n++)
        if (half)
            logits_back_row(at(logits, n * width, 1), totals[n], targets + n * count, g + n * count, count, width, 1);
        else
            logits_back_row(at(logits, n * width, 0), totals[n], targets + n * count, g + n * count, count, width, 0);
}
