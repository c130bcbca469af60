/* The adapters of float32 rows. A row adds up its inputs and then its columns in order, so its bits do not depend on the
   other rows, on their number, or on the number of threads, and a NaN stays in its row. */

#include <omp.h>

#include "adapters.h"
#include "lanes.h"

/* Vectors of a panel, and rows that are worked on together: as many sums as there are registers for. */
#define COLUMNS 16 /* of a panel of A */
#define OUTPUTS 32 /* of a panel of B */
#define WIDE_A (COLUMNS / LANES)
#define WIDE_B (OUTPUTS / LANES)
#if defined(__AVX512F__)
#define ROWS_A 8
#define ROWS_B 8
#elif LANES == 8
#define ROWS_A 6
#define ROWS_B 3
#else
#define ROWS_A 3
#define ROWS_B 1
#endif
#define LINE (16 / LANES) /* vectors of a cache line */
#define AHEAD (64 * LINE) /* vectors: factors are fetched from end to end, across panels */

/* c (+)= a b: `steps` numbers of each row of a times a panel b. Strides count numbers. */
typedef struct {
    const float *a;
    long a_row;
    const lanes *b;
    float *c;
    long c_row, steps;
} Product;

INLINE void block(const Product *p, const int rows, const int wide, const int add) {
    lanes sums[ROWS_A > ROWS_B ? ROWS_A : ROWS_B][WIDE_B];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < wide; w++)
            sums[r][w] = add ? load(p->c + r * p->c_row + w * LANES) : (lanes){};
    for (long s = 0; s < p->steps; s++) {
        lanes b[WIDE_B];
        UNROLL for (int w = 0; w < wide; w += LINE)
            __builtin_prefetch(p->b + s * wide + w + AHEAD);
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

/* `together` rows at a time. */
INLINE void multiply(Product p, long rows, const int together, const int wide, const int add) {
    while (rows > 0) {
        long some = rows >= together ? together : rows >= 2 ? 2 : 1;
        if (some == together)
            block(&p, together, wide, add);
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
    if (count == OUTPUTS) {
        multiply(p, rows, ROWS_B, WIDE_B, 1);
        return;
    }
    for (long m = 0; m < rows; m++) { /* the last outputs of a span do not fill a panel */
        float full[OUTPUTS] = {0};
        Product one = p;
        memcpy(full, p.c + m * p.c_row, 4 * (size_t)count);
        one.a += m * p.a_row;
        one.c = full;
        block(&one, 1, WIDE_B, 1);
        memcpy(p.c + m * p.c_row, full, 4 * (size_t)count);
    }
}

void tinkex_adapt_inner(const Adapters *adapters, const float *x, long K, long id, long all) {
    for (long g = 0; g < adapters->count; g++) {
        const Group *group = adapters->groups + g;
        long rows = group->end - group->begin, blocks = (rows + ROWS_A - 1) / ROWS_A;
        long units = blocks * group->panels;
        for (long u = units * id / all; u < units * (id + 1) / all; u++) {
            long panel = u / blocks, first = u % blocks * ROWS_A, row = group->begin + first;
            multiply((Product){x + row * K, K, (const lanes *)(group->a + panel * K * COLUMNS),
                               adapters->inner + row * adapters->stride + panel * COLUMNS, adapters->stride, K},
                     MIN(ROWS_A, rows - first), ROWS_A, WIDE_A, 0);
        }
    }
}

void tinkex_adapt_outer(const Adapters *adapters, float *y, long N, long id, long all) {
    const long panel = OUTPUTS, stride = adapters->stride;
    for (long g = 0; g < adapters->count; g++) {
        const Group *group = adapters->groups + g;
        const float *inner = adapters->inner + group->begin * stride;
        long rows = group->end - group->begin, units = 0, unit = 0, begin = 0;
        for (long s = 0; s < group->spans; begin = group->span[s++].end)
            units += (group->span[s].end - begin + panel - 1) / panel;
        begin = 0;
        for (long s = 0; s < group->spans; begin = group->span[s++].end) {
            const Span *span = group->span + s;
            const float *b = span->b;
            for (long n = begin; n < span->end; n += panel, unit++, b += span->count * panel)
                if (unit >= units * id / all && unit < units * (id + 1) / all)
                    add_panel((Product){inner + span->first, stride, (const lanes *)b, y + group->begin * N + n, N,
                                        span->count},
                              rows, MIN(panel, span->end - n));
        }
    }
}

EXPORT void tinkex_adapt(
    int threads, const float *x, float *y, long N, long K, const Group *groups, long count, float *inner, long stride) {
    const Adapters adapters = {groups, count, inner, stride};
#pragma omp parallel num_threads(threads)
    {
        long id = omp_get_thread_num(), all = omp_get_num_threads();
        tinkex_adapt_inner(&adapters, x, K, id, all);
#pragma omp barrier
        tinkex_adapt_outer(&adapters, y, N, id, all);
    }
}
