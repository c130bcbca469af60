/* Products of float32 rows and frozen float32 weights, for CPUs with AVX-512, or with AVX2 and FMA.

   y = x W' + bias, or with `across` y = x W: then the weights are read down their columns, as the backward pass needs it.
   One copy of the weights, in PyTorch's layout, serves both. A second, small product of the same rows may run beside it: the
   first factor of an adapter.

   Every number of y adds up its inputs in order with fused multiply-adds, wherever it is computed. So the bits of a row do
   not depend on the other rows, on their number, or on the number of threads, and a NaN stays in its row.

   A few rows: the memory is the limit. Weights are read as squares of LANES x LANES numbers that are transposed in
   registers, and the sums of all rows stay in registers. More rows: a panel of PANEL outputs and DEEP inputs of the weights
   is packed into the first cache and multiplied with all rows, ROWS at a time.

   Shapes: M rows, K inputs, N outputs. */

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))

#include <omp.h>
#include <stdlib.h>

#include "transpose.h"

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8    /* with WIDE vectors each: 24 sums of 32 registers */
#define WIDE 3
#define DEEP 576
#define FEW 12    /* rows whose sums stay in registers */
#define TRANSPOSE transpose
typedef __m512i square;
#else
#define LANES 8
#define ROWS 6
#define WIDE 2
#define DEEP 384
#define FEW 6
#define TRANSPOSE transpose_8
typedef __m256i square;
#endif
#define PANEL (LANES * WIDE)
#define LINES (PANEL / 16) /* cache lines of a panel for one input */
#define SIDE 8     /* rows that are packed side by side; at least ROWS */
#define FETCHING 16 /* blocks of rows up to which the memory is so slow beside the products that a panel fetches the next one */
#define MANY 64   /* rows whose inputs all stay in the second cache */
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef float lanes __attribute__((vector_size(4 * LANES)));

INLINE lanes load(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE lanes multiplied(lanes sum, float a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)sum);
#else
    return (lanes)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)sum);
#endif
}

/* The weights of a product, `row` numbers from output to output and `step` from input to input, one of them 1; and the
   result, N numbers a row. */
typedef struct {
    const float *w, *bias;
    long row, step;
    float *y;
    long N;
} Target;

/* A square of the weights, transposed: LANES outputs side by side for each of LANES inputs. */
INLINE void turn(const float *w, long row, lanes *out) {
    square r[LANES];
    UNROLL for (int i = 0; i < LANES; i++)
        memcpy(r + i, w + i * row, sizeof(square));
    TRANSPOSE(r);
    UNROLL for (int i = 0; i < LANES; i++)
        memcpy(out + i, r + i, sizeof(square));
}

/* The same at an edge, with `count` outputs and `deep` inputs; missing outputs are zero. */
static void turn_edge(const float *w, long row, long count, long deep, lanes *out) {
    for (long k = 0; k < deep; k++)
        for (long n = 0; n < LANES; n++)
            out[k][n] = n < count ? w[n * row + k] : 0;
}

/* -- a few rows ------------------------------------------------------------------------------ */

/* LANES outputs of `rows` rows over all inputs. Weights are fetched four cache lines ahead. */
INLINE void few(const float *x, const float *w, const float *bias, float *y, long N, long K, long count, const int rows) {
    lanes sums[FEW], first = {}, turned[LANES];
    if (bias)
        memcpy(&first, bias, 4 * (size_t)count);
    UNROLL for (int r = 0; r < rows; r++)
        sums[r] = first;
    for (long k = 0; k < K; k += LANES) {
        long deep = MIN(K - k, LANES);
        UNROLL for (int i = 0; i < LANES; i++)
            _mm_prefetch((const char *)(w + i * K + k + 64), _MM_HINT_T0);
        if (count == LANES && deep == LANES) {
            turn(w + k, K, turned);
            UNROLL for (int i = 0; i < LANES; i++)
                UNROLL for (int r = 0; r < rows; r++)
                    sums[r] = multiplied(sums[r], x[r * K + k + i], turned[i]);
        } else {
            turn_edge(w + k, K, count, deep, turned);
            for (long i = 0; i < deep; i++)
                UNROLL for (int r = 0; r < rows; r++)
                    sums[r] = multiplied(sums[r], x[r * K + k + i], turned[i]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        memcpy(y + r * N, sums + r, 4 * (size_t)count);
}

typedef void (*Few)(const float *x, const float *w, const float *bias, float *y, long N, long K, long count);
#define OF_FEW(R) \
    static void few_##R(const float *x, const float *w, const float *bias, float *y, long N, long K, long count) { \
        few(x, w, bias, y, N, K, count, R); \
    }
OF_FEW(1) OF_FEW(2) OF_FEW(3) OF_FEW(4) OF_FEW(5) OF_FEW(6)
#if FEW == 12
OF_FEW(7) OF_FEW(8) OF_FEW(9) OF_FEW(10) OF_FEW(11) OF_FEW(12)
static const Few FEW_OF[FEW] = {few_1, few_2, few_3, few_4, few_5, few_6, few_7, few_8, few_9, few_10, few_11, few_12};
#else
static const Few FEW_OF[FEW] = {few_1, few_2, few_3, few_4, few_5, few_6};
#endif

/* -- many rows ------------------------------------------------------------------------------- */

INLINE long panels_of(const Target *target) { return (target->N + PANEL - 1) / PANEL; }

/* Memory of this thread for packed rows. It is kept for the next product: fresh memory costs a page fault per 4 KB. */
static float *scratch(long count) {
    static _Thread_local float *kept;
    static _Thread_local long size;
    if (count > size) {
        free(kept);
        kept = aligned_alloc(64, (size_t)(count + 15) / 16 * 64);
        if (!kept)
            abort();
        size = count;
    }
    return kept;
}

/* Pack a panel: PANEL outputs side by side for each of `deep` inputs; missing outputs are zero. */
static void pack(const float *w, long row, long step, long count, long deep, lanes *out) {
    if (row == 1) {
        for (long k = 0; k < deep; k++) {
            if (count < PANEL)
                memset(out + k * WIDE, 0, sizeof(lanes) * WIDE);
            memcpy(out + k * WIDE, w + k * step, 4 * (size_t)count);
        }
        return;
    }
    for (long v = 0; v * LANES < count; v++)
        for (long k = 0; k < deep; k += LANES) {
            const float *from = w + v * LANES * row + k;
            long outputs = MIN(count - v * LANES, LANES), inputs = MIN(deep - k, LANES);
            lanes turned[LANES];
            if (outputs == LANES && inputs == LANES)
                turn(from, row, turned);
            else
                turn_edge(from, row, outputs, inputs, turned);
            for (long i = 0; i < inputs; i++)
                out[(k + i) * WIDE + v] = turned[i];
        }
}

/* Pack rows of x, so that they are read from end to end: SIDE rows side by side for each of `deep` inputs. */
static void pack_rows(const float *x, long row, long rows, long deep, float *out) {
    for (long k = 0; k < deep; k += SIDE) {
        __m256i r[SIDE];
        long inputs = MIN(deep - k, SIDE);
        if (inputs == SIDE) {
            UNROLL for (int i = 0; i < SIDE; i++)
                _mm_prefetch((const char *)(x + i * row + k + 64), _MM_HINT_T0);
            UNROLL for (int i = 0; i < SIDE; i++)
                r[i] = i < rows ? _mm256_loadu_si256((const __m256i *)(x + i * row + k)) : _mm256_setzero_si256();
            transpose_8(r);
            UNROLL for (int i = 0; i < SIDE; i++)
                _mm256_storeu_si256((__m256i *)(out + (k + i) * SIDE), r[i]);
        } else {
            for (long i = 0; i < inputs; i++)
                for (long j = 0; j < rows; j++)
                    out[(k + i) * SIDE + j] = x[j * row + k + i];
        }
    }
}

/* What one call works on: `deep` inputs of packed rows, a packed panel, and the sums so far: those in y, or at the first
   inputs one row for all. `next` are the sums that are needed after these, or null. `ahead` are the weights of the next
   panel, `ahead_row` numbers from output to output; for each input, `lines` of their LINES cache lines are fetched. */
typedef struct {
    const float *x;
    const lanes *panel;
    const float *from;
    long from_row;
    float *y;
    long y_row, deep;
    const float *next, *ahead;
    long ahead_row, lines;
} Block;

/* One input of a block. */
INLINE void add_input(const float *x, const lanes *panel, const int rows, const int wide, lanes sums[ROWS][WIDE]) {
    lanes w[WIDE];
    UNROLL for (int v = 0; v < wide; v++)
        w[v] = panel[v];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < wide; v++)
            sums[r][v] = multiplied(sums[r][v], x[r], w[v]);
}

INLINE void block(const Block *b, const int rows, const int wide, const int lines) {
    lanes sums[ROWS][WIDE];
    const float *x = b->x;
    const lanes *panel = b->panel;
    long k = 0, fetched = lines ? PANEL : 0;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < wide; v++)
            sums[r][v] = load(b->from + r * b->from_row + v * LANES);
    if (b->next)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < wide; v++)
                _mm_prefetch((const char *)(b->next + r * b->y_row + v * LANES), _MM_HINT_T0);
    for (long n = 0; n < fetched; n++) {
        const float *ahead = b->ahead + n * b->ahead_row;
        _Pragma("GCC unroll 4") for (long end = k + b->deep / PANEL; k < end; k++, x += SIDE, panel += WIDE, ahead += PANEL) {
            UNROLL for (int line = 0; line < lines; line++)
                _mm_prefetch((const char *)(ahead + line * 16), _MM_HINT_T1);
            add_input(x, panel, rows, wide, sums);
        }
    }
    _Pragma("GCC unroll 4") for (; k < b->deep; k++, x += SIDE, panel += WIDE)
        add_input(x, panel, rows, wide, sums);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < wide; v++)
            memcpy(b->y + r * b->y_row + v * LANES, &sums[r][v], sizeof(lanes));
}

#define OF_BLOCK(R) \
    static void block_##R(const Block *b, long wide) { \
        if (wide == 1) \
            block(b, R, 1, 0); \
        else if (wide < WIDE) \
            block(b, R, 2, 0); \
        else if (b->lines == 2) \
            block(b, R, WIDE, 2); \
        else if (b->lines == 1) \
            block(b, R, WIDE, 1); \
        else \
            block(b, R, WIDE, 0); \
    }
OF_BLOCK(1) OF_BLOCK(2) OF_BLOCK(3) OF_BLOCK(4) OF_BLOCK(5) OF_BLOCK(6)
#if ROWS == 8
OF_BLOCK(7) OF_BLOCK(8)
static void (*const BLOCK_OF[ROWS])(const Block *, long) = {
    block_1, block_2, block_3, block_4, block_5, block_6, block_7, block_8};
#else
static void (*const BLOCK_OF[ROWS])(const Block *, long) = {block_1, block_2, block_3, block_4, block_5, block_6};
#endif

/* `rows` rows times a panel of which only `count` outputs exist. */
static void multiply_edge(Block b, long rows, long count) {
    float edge[ROWS * PANEL] = {0}, *y = b.y;
    long y_row = b.y_row;
    if (b.from_row) {
        for (long r = 0; r < rows; r++)
            memcpy(edge + r * PANEL, y + r * y_row, 4 * (size_t)count);
        b.from = edge;
        b.from_row = PANEL;
    }
    b.y = edge;
    b.y_row = PANEL;
    b.next = 0;
    BLOCK_OF[rows - 1](&b, (count + LANES - 1) / LANES);
    for (long r = 0; r < rows; r++)
        memcpy(y + r * y_row, edge + r * PANEL, 4 * (size_t)count);
}

/* One panel of the result, for the inputs from k on that are packed in `x`. Its blocks fetch the next panel between them. */
static void panel(
    const Target *target, long p, long rows, long k, long deep, const float *x, long x_block, const float *ahead) {
    lanes packed[DEEP * WIDE];
    long n = p * PANEL, N = target->N, count = MIN(PANEL, N - n), blocks = (rows + ROWS - 1) / ROWS;
    const float *w = target->w + n * target->row + k * target->step;
    float bias_or_zero[PANEL] = {0};
    if (target->bias)
        memcpy(bias_or_zero, target->bias + n, 4 * (size_t)count);
    pack(w, target->row, target->step, count, deep, packed);
    for (long i = 0; i < blocks; i++) {
        long top = rows * i / blocks, bottom = rows * (i + 1) / blocks;
        long line = LINES * i / blocks, lines = LINES * (i + 1) / blocks - line;
        float *y = target->y + top * N + n;
        Block b = {x + i * x_block, packed, k ? y : bias_or_zero, k ? N : 0, y, N, deep,
                   k && i + 1 < blocks ? y + (bottom - top) * N : 0,
                   ahead + line * 16, target->row, target->step == 1 && blocks <= FETCHING ? lines : 0};
        if (count == PANEL)
            BLOCK_OF[bottom - top - 1](&b, WIDE);
        else
            multiply_edge(b, bottom - top, count);
    }
}

/* The panels `first` to `last` of one result after the other, for some rows. */
static void panels(const float *x, const Target *targets, long rows, long K, long first, long last) {
    /* Rows whose inputs all stay in the second cache are packed at once: then the weights are read from end to end. */
    int whole = rows <= MANY && targets->step == 1;
    long blocks = (rows + ROWS - 1) / ROWS, slab = whole ? K : MIN(DEEP, K), most = panels_of(targets);
    float *packed = scratch(blocks * slab * SIDE);
    for (long begin = 0; begin < K; begin += slab) {
        long end = MIN(begin + slab, K);
        for (long i = 0; i < blocks; i++)
            pack_rows(x + rows * i / blocks * K + begin, K, rows * (i + 1) / blocks - rows * i / blocks, end - begin,
                      packed + i * slab * SIDE);
        for (long p = first; p < last; p++) {
            const Target *target = targets + (p >= most);
            long own = p >= most ? p - most : p;
            const float *w = target->w + own * PANEL * target->row;
            for (long k = begin; k < end; k += DEEP) {
                long next = k + DEEP < end ? (k + DEEP) * target->step : PANEL * target->row + begin * target->step;
                panel(target, own, rows, k, MIN(DEEP, end - k), packed + (k - begin) * SIDE, slab * SIDE, w + next);
            }
        }
    }
}

/* A part of the rows, for one thread of those that share them. */
INLINE Target from_row(Target target, long row) {
    target.y += row * target.N;
    return target;
}

/* y = x W' + bias or x W, and beside it y2 = x W2' or x W2, if N2 is not 0. */
EXPORT void tinkex_float_product(
    int threads, const float *x, const float *w, const float *bias, float *y, long M, long N, long K, int across,
    const float *w2, float *y2, long N2) {
    if (M == 0)
        return;
    int many = across || M > FEW || N2;
    Target targets[2] = {{w, bias, across ? 1 : K, across ? N : 1, y, N}, {w2, 0, across ? 1 : K, across ? N2 : 1, y2, N2}};
    long units = many ? panels_of(targets) + panels_of(targets + 1) : (N + LANES - 1) / LANES;
#pragma omp parallel num_threads(threads)
    {
        long id = omp_get_thread_num(), all = omp_get_num_threads(), parts = 1;
        /* Threads share the rows too if there are too few panels to keep them equally busy. */
        while (many && all % (2 * parts) == 0 && units * parts < 4 * all && M >= 2 * MANY * parts)
            parts *= 2;
        if (many) {
            long part = id % parts, own = id / parts, among = all / parts;
            long top = M * part / parts, rows = M * (part + 1) / parts - top;
            Target parted[2] = {from_row(targets[0], top), from_row(targets[1], top)};
            panels(x + top * K, parted, rows, K, units * own / among, units * (own + 1) / among);
        } else {
            for (long u = units * id / all; u < units * (id + 1) / all; u++)
                FEW_OF[M - 1](x, w + u * LANES * K, bias ? bias + u * LANES : 0, y + u * LANES, N, K,
                              MIN(LANES, N - u * LANES));
        }
    }
}

#endif
