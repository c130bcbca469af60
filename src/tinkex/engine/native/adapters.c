/* The adapters of float32 rows: y += B A x, where rows may use different factors.

   Both factors are packed when an adapter is first used, so that they are read from end to end: A in panels of 16
   columns, B in panels of 32 outputs. A row adds up its inputs and then its columns in order, so its bits do not
   depend on the other rows, on their number, or on the number of threads, and a NaN stays in its row.

   Shapes: K inputs, N outputs. */

#include <omp.h>

#include "numbers.h"
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

#define LANES 16
#define WIDE 2 /* vectors of a panel of B */
#if defined(__AVX512F__)
#define TOGETHER 8 /* rows whose sums fit into the registers */
#else
#define TOGETHER 3
#endif
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef float lanes __attribute__((vector_size(4 * LANES)));

/* Outputs up to `end` use `count` columns from `first` on; their part of B begins at `b`. */
typedef struct { int64_t end, first, count; const float *b; } Span;

/* Adjacent rows with one adapter. */
typedef struct {
    int64_t begin, end, panels, spans;
    const float *a;
    const Span *span;
} Group;

INLINE lanes multiplied(lanes sum, float a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    union { lanes all; __m256 half[2]; } s = {sum}, f = {b};
    s.half[0] = _mm256_fmadd_ps(_mm256_set1_ps(a), f.half[0], s.half[0]);
    s.half[1] = _mm256_fmadd_ps(_mm256_set1_ps(a), f.half[1], s.half[1]);
    return s.all;
#else
    return sum + a * b;
#endif
}

/* c (+)= a b: `steps` numbers of each row of a times a panel b. Strides count numbers. */
typedef struct {
    const float *a;
    long a_row;
    const lanes *b;
    float *c;
    long c_row, steps;
} Product;

INLINE lanes load(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void block(const Product *p, const int rows, const int wide, const int add) {
    lanes sums[TOGETHER][WIDE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < wide; w++)
            sums[r][w] = add ? load(p->c + r * p->c_row + w * LANES) : (lanes){};
    for (long s = 0; s < p->steps; s++) {
        lanes b[WIDE];
        UNROLL for (int w = 0; w < wide; w++)
            b[w] = p->b[s * wide + w];
        UNROLL for (int r = 0; r < rows; r++) {
            float a = p->a[r * p->a_row + s];
            UNROLL for (int w = 0; w < wide; w++)
                sums[r][w] = multiplied(sums[r][w], a, b[w]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < wide; w++)
            memcpy(p->c + r * p->c_row + w * LANES, &sums[r][w], sizeof(lanes));
}

/* As many rows at a time as there are registers for. */
INLINE void multiply(Product p, long rows, const int wide, const int add) {
    while (rows > 0) {
        long some = rows >= TOGETHER ? TOGETHER : rows >= 2 ? 2 : 1;
        if (some == TOGETHER)
            block(&p, TOGETHER, wide, add);
        else if (some == 2)
            block(&p, 2, wide, add);
        else
            block(&p, 1, wide, add);
        p.a += some * p.a_row;
        p.c += some * p.c_row;
        rows -= some;
    }
}

/* Add the update of a panel to `count` outputs of all rows of a group. */
static void add_panel(Product p, long rows, long count) {
    if (count == WIDE * LANES) {
        multiply(p, rows, WIDE, 1);
        return;
    }
    for (long m = 0; m < rows; m++) { /* the last outputs of a span do not fill a panel */
        float full[WIDE * LANES] = {0};
        Product one = p;
        memcpy(full, p.c + m * p.c_row, 4 * (size_t)count);
        one.a += m * p.a_row;
        one.c = full;
        block(&one, 1, WIDE, 1);
        memcpy(p.c + m * p.c_row, full, 4 * (size_t)count);
    }
}

/* `inner` holds as many rows as x, of `stride` numbers: the rows between the factors. */
EXPORT void tinkex_adapt(
    int threads, const float *x, float *y, long N, long K, const Group *groups, long count, float *inner, long stride) {
#pragma omp parallel num_threads(threads)
    {
        long id = omp_get_thread_num(), all = omp_get_num_threads();
        for (long g = 0; g < count; g++) {
            const Group *group = groups + g;
            long rows = group->end - group->begin, blocks = (rows + TOGETHER - 1) / TOGETHER;
            long units = blocks * group->panels;
            for (long u = units * id / all; u < units * (id + 1) / all; u++) {
                long panel = u / blocks, first = u % blocks * TOGETHER, row = group->begin + first;
                multiply((Product){x + row * K, K, (const lanes *)(group->a + panel * K * LANES),
                                   inner + row * stride + panel * LANES, stride, K},
                         MIN(TOGETHER, rows - first), 1, 0);
            }
        }
#pragma omp barrier
        for (long g = 0; g < count; g++) {
            const Group *group = groups + g;
            long rows = group->end - group->begin, units = 0, unit = 0, begin = 0, panel = WIDE * LANES;
            for (long s = 0; s < group->spans; begin = group->span[s++].end)
                units += (group->span[s].end - begin + panel - 1) / panel;
            begin = 0;
            for (long s = 0; s < group->spans; begin = group->span[s++].end) {
                const Span *span = group->span + s;
                const float *b = span->b;
                for (long n = begin; n < span->end; n += panel, unit++, b += span->count * panel)
                    if (unit >= units * id / all && unit < units * (id + 1) / all)
                        add_panel((Product){inner + group->begin * stride + span->first, stride, (const lanes *)b,
                                            y + group->begin * N + n, N, span->count},
                                  rows, MIN(panel, span->end - n));
            }
        }
    }
}
