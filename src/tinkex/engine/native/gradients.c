/* The backward pass of an adapter: the gradients of its factors, and its part of the gradients of the rows.

   A number of a factor's gradient adds up the rows in order, in float32, DEEP at a time, and belongs to one thread. A number of a row's
   gradient depends on its row alone. So no bit depends on the number of threads.

   A cell is 32 bits: one float32, or two bfloat16 that are multiplied and added together. bfloat16 needs the instruction
   that does this; without it PyTorch computes.

   Shapes: M rows, K inputs, N outputs, R columns of all pairs of a projection. */

#include <omp.h>

#include "lanes.h"
#include "scratch.h"

#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define HAS_HALF 1
#endif

/* Columns of a factor, and vectors of a row, that are worked on together: their sums stay in registers. */
#if defined(__AVX512F__)
#define RANKS 8
#else
#define RANKS 4
#endif
#define WIDE 2
#define STRIP (WIDE * LANES)
#define DEEP 256 /* rows whose cells of a factor stay in the first cache; even */

typedef uint32_t cell;

/* The factors of one layer of a projection: its first column and its columns, its first output and its outputs, and the
   gradients: A is rank x inputs, B is outputs x rank. */
typedef struct {
    int64_t column, rank, output, outputs;
    float *a, *b;
} Pair;

INLINE lanes add_cell(lanes sum, cell a, lanes b, const int half) {
#if HAS_HALF
    if (half)
        return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#endif
    return multiplied(sum, from_bits(a), b);
}

/* -- the gradients of the factors ----------------------------------------------------------- */

/* Cells of up to RANKS columns of all rows: of one row, or in bfloat16 of two; missing ones are zero. */
INLINE void pack_columns(const void *x, long row, long rows, long columns, cell *out, const int half) {
    memset(out, 0, (size_t)(4 * RANKS * (half ? (rows + 1) / 2 : rows)));
    for (long n = 0; n < rows; n++)
        for (long r = 0; r < columns; r++)
            if (half)
                ((uint16_t *)out)[(n / 2 * RANKS + r) * 2 + n % 2] = ((const uint16_t *)x)[n * row + r];
            else
                out[n * RANKS + r] = ((const cell *)x)[n * row + r];
}

/* `count` numbers of a row; missing ones are zero. */
INLINE void read_strip(const void *x, long count, void *out, const int half) {
    const int vectors = half ? 1 : WIDE;
    if (count == STRIP) {
        UNROLL for (int v = 0; v < vectors; v++)
            ((lanes *)out)[v] = load((const float *)x + v * LANES);
    } else {
        memset(out, 0, (size_t)vectors * sizeof(lanes));
        memcpy(out, x, (size_t)count * (half ? 2 : 4));
    }
}

#if HAS_HALF
/* Cells of the numbers of two strips. */
INLINE void pair_up(__m512i low, __m512i high, lanes cells[WIDE]) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    cells[0] = (lanes)_mm512_permutex2var_epi16(low, first, high);
    cells[1] = (lanes)_mm512_permutex2var_epi16(low, _mm512_add_epi16(first, _mm512_set1_epi16(LANES)), high);
}
#endif

/* The cells of a strip: of one row, or in bfloat16 of two, the second of which may be missing. */
INLINE void read_cells(const void *x, long row, int both, long count, lanes cells[WIDE], const int half) {
#if HAS_HALF
    if (half) {
        __m512i low, high = _mm512_setzero_si512();
        read_strip(x, count, &low, 1);
        if (both)
            read_strip(at(x, row, 1), count, &high, 1);
        pair_up(low, high, cells);
        return;
    }
#endif
    read_strip(x, count, cells, 0);
}

/* sums[r] = the products of column r and a strip of `count` numbers, over all rows. */
INLINE void add_rows(const cell *columns, const void *x, long row, long rows, long count, float sums[RANKS][STRIP],
                     const int half) {
    lanes found[RANKS][WIDE] = {0};
    for (long n = 0; n < rows; n += half ? 2 : 1, columns += RANKS) {
        lanes cells[WIDE];
        /* The next strip, which begins in another cache line of every row: the processor does not foresee this. */
        const char *ahead = at(x, n * row + STRIP, half);
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + (half ? 2 * row : 64));
        read_cells(at(x, n * row, half), row, n + 1 < rows, count, cells, half);
        UNROLL for (int r = 0; r < RANKS; r++)
            UNROLL for (int w = 0; w < WIDE; w++)
                found[r][w] = add_cell(found[r][w], columns[r], cells[w], half);
    }
    memcpy(sums, found, sizeof found);
}

/* Rows in memory: `width` numbers of each, `row` numbers from row to row. */
typedef struct {
    const void *first;
    long row, width;
} Rows;

/* Where the gradient of a column and a number is: distances in numbers. */
typedef struct {
    float *first;
    long column, number;
} Gradient;

/* gradient += scale * columns' x, for the strips of thread `id` of `all`. */
INLINE void add_gradient(Rows columns, Rows x, long M, float scale, Gradient gradient, long id, long all, const int half) {
    cell packed[DEEP * RANKS];
    float sums[RANKS][STRIP];
    long strips = (x.width + STRIP - 1) / STRIP, begin = strips * id / all * STRIP;
    long end = MIN(strips * (id + 1) / all * STRIP, x.width);
    for (long c = 0; c < columns.width; c += RANKS)
        for (long n = 0; n < M; n += DEEP) {
            long rows = MIN(DEEP, M - n), together = MIN(RANKS, columns.width - c);
            pack_columns(at(columns.first, n * columns.row + c, half), columns.row, rows, together, packed, half);
            for (long i = begin; i < end; i += STRIP) {
                long count = MIN(STRIP, end - i);
                const void *strip = at(x.first, n * x.row + i, half);
                if (count == STRIP)
                    add_rows(packed, strip, x.row, rows, STRIP, sums, half);
                else
                    add_rows(packed, strip, x.row, rows, count, sums, half);
                for (long k = 0; k < count; k++)
                    for (long j = 0; j < together; j++)
                        gradient.first[(c + j) * gradient.column + (i + k) * gradient.number] += scale * sums[j][k];
            }
        }
}

INLINE void add_gradients(const void *g, const void *x, const void *inner, const void *inner_g, float scale, long M,
                          long N, long K, long R, const Pair *pairs, long count, long id, long all, const int half) {
    for (const Pair *pair = pairs; pair < pairs + count; pair++) {
        add_gradient((Rows){at(inner_g, pair->column, half), R, pair->rank}, (Rows){x, K, K}, M, 1,
                     (Gradient){pair->a, K, 1}, id, all, half);
        add_gradient((Rows){at(inner, pair->column, half), R, pair->rank},
                     (Rows){at(g, pair->output, half), N, pair->outputs}, M, scale, (Gradient){pair->b, 1, pair->rank},
                     id, all, half);
    }
}

/* Add the gradients of the factors to those of the pairs: inner_g' x to that of A, scale g' inner to that of B. */
EXPORT void tinkex_factor_gradients(int threads, int half, const void *g, const void *x, const void *inner,
                                    const void *inner_g, float scale, long M, long N, long K, long R, const Pair *pairs,
                                    long count) {
#pragma omp parallel num_threads(threads)
    {
        long id = omp_get_thread_num(), all = omp_get_num_threads();
        if (half)
            add_gradients(g, x, inner, inner_g, scale, M, N, K, R, pairs, count, id, all, 1);
        else
            add_gradients(g, x, inner, inner_g, scale, M, N, K, R, pairs, count, id, all, 0);
    }
}

/* -- the gradients of the rows, in bfloat16 ------------------------------------------------- */

#if HAS_HALF

#define ROWS 8    /* that are worked on together */
#define OUTPUTS 4 /* of RANKS columns of B: a vector */

typedef uint16_t half;

/* Outputs up to `end`, from the end of the span before, use the columns `first` to `last`. */
typedef struct { int64_t end, first, last; } Span;

/* Vectors of B. */
static long vectors_of(const Span *spans, long count) {
    long vectors = 0, output = 0;
    for (const Span *span = spans; span < spans + count; output = span++->end)
        vectors += (span->last - span->first + RANKS - 1) / RANKS * ((span->end - output + OUTPUTS - 1) / OUTPUTS);
    return vectors;
}

/* OUTPUTS rows of B, RANKS columns of each; missing ones are zero. The numbers of a column are side by side: they meet
   four numbers of a row of g, in two lanes. */
INLINE __m512i turned(const half *b, long R, long outputs, long columns) {
    const __m512i order = _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3, 26,
                                           18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
    __mmask8 some = (__mmask8)((1u << columns) - 1);
    __m512i rows = _mm512_zextsi128_si512(_mm_maskz_loadu_epi16(some, b));
    if (outputs > 1)
        rows = _mm512_inserti32x4(rows, _mm_maskz_loadu_epi16(some, b + R), 1);
    if (outputs > 2)
        rows = _mm512_inserti32x4(rows, _mm_maskz_loadu_epi16(some, b + 2 * R), 2);
    if (outputs > 3)
        rows = _mm512_inserti32x4(rows, _mm_maskz_loadu_epi16(some, b + 3 * R), 3);
    return _mm512_permutexvar_epi16(order, rows);
}

/* B by span, RANKS columns and OUTPUTS outputs: the vectors of thread `id` of `all`. */
static void pack_b(const half *b, long R, const Span *spans, long count, __m512i *out, long id, long all) {
    long unit = 0, output = 0;
    for (const Span *span = spans; span < spans + count; output = span++->end)
        for (long c = span->first; c < span->last; c += RANKS)
            for (long o = output; o < span->end; o += OUTPUTS, unit++)
                if (unit % all == id)
                    out[unit] = turned(b + o * R + c, R, span->end - o, MIN(RANKS, span->last - c));
}

/* A by strip and two columns: the strips of thread `id` of `all`. */
static void pack_a(const half *a, long K, long R, lanes *out, long id, long all) {
    for (long i = id * STRIP; i < K; i += all * STRIP)
        for (long r = 0; r < R; r += 2)
            read_cells(a + r * K + i, K, 1, MIN(STRIP, K - i), out + (i / STRIP * R / 2 + r / 2) * WIDE, 1);
}

/* inner_g = g B for up to ROWS rows. */
INLINE void back_to_inner(const half *const g[ROWS], long rows, const Span *spans, long count, long R, const __m512i *b,
                          half *inner_g) {
    long output = 0;
    for (const Span *span = spans; span < spans + count; output = span++->end)
        for (long c = span->first; c < span->last; c += RANKS) {
            __m512 sums[ROWS] = {0};
            long o = output;
            for (; o + OUTPUTS <= span->end; o += OUTPUTS, b++)
                UNROLL for (int i = 0; i < ROWS; i++) {
                    int64_t numbers;
                    memcpy(&numbers, g[i] + o, sizeof numbers);
                    sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_set1_epi64(numbers), (__m512bh)*b);
                }
            if (o < span->end) {
                UNROLL for (int i = 0; i < ROWS; i++) {
                    int64_t numbers = 0;
                    memcpy(&numbers, g[i] + o, 2 * (size_t)(span->end - o));
                    sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_set1_epi64(numbers), (__m512bh)*b);
                }
                b++;
            }
            __mmask16 some = (__mmask16)((1u << MIN(RANKS, span->last - c)) - 1);
            for (long i = 0; i < rows; i++) { /* a column is two lanes */
                __m512 even = _mm512_maskz_compress_ps(0x5555, sums[i]);
                __m512 sum = _mm512_add_ps(even, _mm512_maskz_compress_ps(0xaaaa, sums[i]));
                _mm256_mask_storeu_epi16(inner_g + i * R + c, some, (__m256i)_mm512_cvtneps_pbh(sum));
            }
        }
}

/* x_g += inner_g A for one strip of up to ROWS rows. */
INLINE void back_to_strip(const half *inner_g, long rows, long K, long R, const lanes *a, half *x_g, long numbers) {
    lanes sums[ROWS][WIDE];
    UNROLL for (int n = 0; n < ROWS; n++) {
        __m512i strip;
        read_strip(x_g + MIN(n, rows - 1) * K, numbers, &strip, 1);
        sums[n][0] = (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(strip)), 16);
        sums[n][1] = (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(strip, 1)), 16);
    }
    for (long r = 0; r < R; r += 2, a += WIDE)
        UNROLL for (int n = 0; n < ROWS; n++) {
            cell both;
            memcpy(&both, inner_g + MIN(n, rows - 1) * R + r, sizeof both);
            UNROLL for (int w = 0; w < WIDE; w++)
                sums[n][w] = add_cell(sums[n][w], both, a[w], 1);
        }
    UNROLL for (int n = 0; n < ROWS; n++)
        if (n < rows) {
            __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)sums[n][1], (__m512)sums[n][0]);
            memcpy(x_g + n * K, &rounded, 2 * (size_t)numbers);
        }
}

INLINE void back_to_rows(const half *inner_g, long rows, long K, long R, const lanes *a, half *x_g) {
    for (long i = 0; i < K; i += STRIP, a += R / 2 * WIDE)
        if (rows == ROWS && K - i >= STRIP)
            back_to_strip(inner_g, ROWS, K, R, a, x_g + i, STRIP);
        else
            back_to_strip(inner_g, rows, K, R, a, x_g + i, MIN(STRIP, K - i));
}

/* inner_g = g B and x_g += inner_g A. R is even; columns of inner_g outside all spans stay as they are. */
EXPORT void tinkex_adapted_back(int threads, const half *g, half *x_g, half *inner_g, const half *a, const half *b,
                                const Span *spans, long count, long M, long N, long K, long R) {
    long of_b = vectors_of(spans, count), of_a = (K + STRIP - 1) / STRIP * (R / 2) * WIDE;
    float *packed_b = scratch((of_b + of_a) * LANES), *packed_a = packed_b + of_b * LANES;
#pragma omp parallel num_threads(threads)
    {
        long id = omp_get_thread_num(), all = omp_get_num_threads(), blocks = (M + ROWS - 1) / ROWS;
        pack_b(b, R, spans, count, (__m512i *)packed_b, id, all);
        pack_a(a, K, R, (lanes *)packed_a, id, all);
#pragma omp barrier
        for (long n = blocks * id / all * ROWS; n < MIN(M, blocks * (id + 1) / all * ROWS); n += ROWS) {
            long rows = MIN(ROWS, M - n);
            const half *own[ROWS];
            for (long i = 0; i < ROWS; i++) /* a missing row is the last one again */
                own[i] = g + MIN(n + i, M - 1) * N;
            back_to_inner(own, rows, spans, count, R, (const __m512i *)packed_b, inner_g + n * R);
            back_to_rows(inner_g + n * R, rows, K, R, (const lanes *)packed_a, x_g + n * K);
        }
    }
}

#endif
