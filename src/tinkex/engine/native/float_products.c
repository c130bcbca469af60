/* Products of float32 rows and frozen weights, for CPUs with AVX-512, or with AVX2 and FMA.

   y = x W' + bias, or with `across` y = x W: then the weights are read down their columns, as the backward pass needs it.
   With `add` the product is added to what y holds, as for the second factor of an adapter.
   One copy of the weights, in PyTorch's layout, serves both. A second, small product of the same rows may run beside it: the
   first factor of an adapter.

   Weights are float32, or the bfloat16 (`half`) in which most models are published. The latter become float32 in registers, which
   loses nothing, so both have the same results; but half as much memory is read, and half as much is transposed.

   Every number of y adds up its inputs in order with fused multiply-adds, wherever it is computed. So the bits of a row do
   not depend on the other rows, on their number, or on the number of threads, and a NaN stays in its row.

   A few rows: the memory is the limit. Weights are read as squares of LANES x LANES cells of 4 bytes that are transposed in
   registers, and the sums of all rows stay in registers. More rows: a panel of PANEL outputs and DEEP inputs of the weights
   is packed, stays in the nearer caches, and is multiplied with all rows, ROWS at a time.

   Shapes: M rows, K inputs, N outputs. */

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))

#include <omp.h>

#include "adapters.h"
#include "lanes.h"
#include "scratch.h"
#include "transpose.h"

#if defined(__AVX512F__)
#define ROWS 8    /* with WIDE vectors each: 24 sums of 32 registers */
#define WIDE 3
#define DEEP 576
#define FEW 16    /* rows whose sums stay in registers */
#else
#define ROWS 6
#define WIDE 2
#define DEEP 384
#define FEW 6
#endif
#define PANEL (LANES * WIDE)
#define LINES (PANEL / 16) /* cache lines of a panel for one input */
#define SIDE 8     /* rows that are packed side by side; at least ROWS */
#define FETCHING 16 /* blocks of rows up to which the memory is so slow beside the products that a panel fetches the next one */
#define MANY 64   /* rows whose inputs are packed at once; those of a model of SmolLM2's width stay in the second cache */

typedef uint32_t cell_lanes __attribute__((vector_size(4 * LANES)));

/* The weights of a product, `row` numbers from output to output and `step` from input to input, one of them 1; and the
   result, N numbers a row. */
typedef struct {
    const void *w;
    int half, add;
    const float *bias;
    long row, step;
    float *y;
    long N;
} Target;

/* Inputs of a square of weights: a cell of 4 bytes holds one number, or two of bfloat16. */
INLINE long across_square(const int half) { return half ? 2 * LANES : LANES; }

/* The numbers of a cell of two: the first in the lower bits, as they are in memory. */
INLINE lanes first_of(square cells) { return (lanes)((cell_lanes)cells << 16); }
INLINE lanes second_of(square cells) { return (lanes)((cell_lanes)cells & 0xffff0000u); }

/* A square of the weights, transposed: cells of LANES outputs side by side. */
INLINE void turn(const void *w, long row, square *r, const int half) {
    UNROLL for (int i = 0; i < LANES; i++)
        r[i] = load_side(at(w, i * row, half));
    transpose_square(r);
}

/* Weights at an edge, transposed, with `count` outputs and `deep` inputs; missing outputs are zero. */
static void turn_edge(const void *w, long row, long count, long deep, lanes *out, int half) {
    for (long k = 0; k < deep; k++)
        for (long n = 0; n < LANES; n++)
            out[k][n] = n < count ? get(w, n * row + k, half) : 0;
}

/* LANES weights that follow each other in memory. */
INLINE lanes load_weights(const void *w, const int half) {
    lanes value;
    if (half) {
#if defined(__AVX512F__)
        value = (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(w)), 16);
#else
        value = (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(w)), 16);
#endif
    } else {
        memcpy(&value, w, sizeof value);
    }
    return value;
}

/* -- a few rows ------------------------------------------------------------------------------ */

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

/* Add one input of all rows. */
INLINE void add_few(const float *low, const float *high, lanes w, const int rows, lanes *sums) {
    UNROLL for (int r = 0; r < rows; r++)
        sums[r] = multiplied(sums[r], r < SIDE ? low[r] : high[r - SIDE], w);
}

/* LANES outputs of `rows` rows over all inputs. The rows are packed, SIDE side by side; a single one is as it is. The weights
   that are needed next, from `ahead` on, are fetched meanwhile. */
INLINE void few(const float *x, const void *w, const void *ahead, const float *bias, float *y, long N, long K, long count,
                const int rows, const int half) {
    const long side = across_square(half), packed = rows == 1 ? 1 : SIDE;
    lanes sums[FEW], first = {}, edge[2 * LANES];
    square turned[LANES];
    if (bias)
        memcpy(&first, bias, 4 * (size_t)count);
    UNROLL for (int r = 0; r < rows; r++)
        sums[r] = first;
    for (long k = 0; k < K; k += side) {
        long deep = MIN(K - k, side);
        const float *low = x + k * packed, *high = low + K * SIDE;
        if (count == LANES && deep == side) {
            turn(at(w, k, half), K, turned, half);
            UNROLL for (int i = 0; i < LANES; i++) {
                _mm_prefetch((const char *)at(ahead, k * LANES, half) + i * 4 * LANES, _MM_HINT_T0);
                add_few(low, high, half ? first_of(turned[i]) : (lanes)turned[i], rows, sums);
                low += packed, high += packed;
                if (half) {
                    add_few(low, high, second_of(turned[i]), rows, sums);
                    low += packed, high += packed;
                }
            }
        } else {
            turn_edge(at(w, k, half), K, count, deep, edge, half);
            for (long i = 0; i < deep; i++, low += packed, high += packed)
                add_few(low, high, edge[i], rows, sums);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        memcpy(y + r * N, sums + r, 4 * (size_t)count);
}

typedef void (*Few)(const float *x, const void *w, const void *ahead, const float *bias, float *y, long N, long K, long count);
#define OF_FEW(R) \
    static void few_##R(const float *x, const void *w, const void *ahead, const float *bias, float *y, long N, long K, \
                        long count) { \
        few(x, w, ahead, bias, y, N, K, count, R, 0); \
    } \
    static void few_half_##R(const float *x, const void *w, const void *ahead, const float *bias, float *y, long N, long K, \
                             long count) { \
        few(x, w, ahead, bias, y, N, K, count, R, 1); \
    }
#if FEW == 16
#define EACH(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15) F(16)
#else
#define EACH(F) F(1) F(2) F(3) F(4) F(5) F(6)
#endif
EACH(OF_FEW)
#define NAMED(R) few_##R,
#define NAMED_HALF(R) few_half_##R,
static const Few FEW_OF[2][FEW] = {{EACH(NAMED)}, {EACH(NAMED_HALF)}};

/* The outputs of the units `first` to `last`, LANES each, for up to FEW rows. */
static void few_rows(const Target *target, const float *x, long rows, long K, long first, long last) {
    const Few few = FEW_OF[target->half][rows - 1];
    if (rows > 1) {
        float *packed = scratch(2 * SIDE * K);
        for (long r = 0; r < rows; r += SIDE)
            pack_rows(x + r * K, K, MIN(SIDE, rows - r), K, packed + r * K);
        x = packed;
    }
    for (long u = first; u < last; u++) {
        const void *w = at(target->w, u * LANES * K, target->half);
        few(x, w, u + 1 < last ? at(w, LANES * K, target->half) : w, target->bias ? target->bias + u * LANES : 0,
            target->y + u * LANES, target->N, K, MIN(LANES, target->N - u * LANES));
    }
}

/* -- many rows ------------------------------------------------------------------------------- */

INLINE long panels_of(const Target *target) { return (target->N + PANEL - 1) / PANEL; }

/* Pack a panel: PANEL outputs side by side for each of `deep` inputs; missing outputs are zero. */
INLINE void pack_of(const void *w, long row, long step, long count, long deep, lanes *out, const int half) {
    if (row == 1) {
        for (long k = 0; k < deep; k++, out += WIDE)
            UNROLL for (int v = 0; v < WIDE; v++) {
                long n = v * LANES;
                if (n + LANES <= count)
                    out[v] = load_weights(at(w, k * step + n, half), half);
                else
                    for (long lane = 0; lane < LANES; lane++)
                        out[v][lane] = n + lane < count ? get(w, k * step + n + lane, half) : 0;
            }
        return;
    }
    const long side = across_square(half);
    for (long v = 0; v * LANES < count; v++)
        for (long k = 0; k < deep; k += side) {
            const void *from = at(w, v * LANES * row + k, half);
            long outputs = MIN(count - v * LANES, LANES), inputs = MIN(deep - k, side);
            lanes *to = out + k * WIDE + v;
            if (outputs == LANES && inputs == side) {
                square turned[LANES];
                turn(from, row, turned, half);
                UNROLL for (int i = 0; i < LANES; i++) {
                    if (half) {
                        to[2 * i * WIDE] = first_of(turned[i]);
                        to[(2 * i + 1) * WIDE] = second_of(turned[i]);
                    } else {
                        to[i * WIDE] = (lanes)turned[i];
                    }
                }
            } else {
                lanes edge[2 * LANES];
                turn_edge(from, row, outputs, inputs, edge, half);
                for (long i = 0; i < inputs; i++)
                    to[i * WIDE] = edge[i];
            }
        }
}

static void pack(const Target *target, const void *w, long count, long deep, lanes *out) {
    if (target->half)
        pack_of(w, target->row, target->step, count, deep, out, 1);
    else
        pack_of(w, target->row, target->step, count, deep, out, 0);
}

/* What one call works on: `deep` inputs of packed rows, a packed panel, and the sums so far: those in y, or at the first
   inputs one row for all. `next` are the sums that are needed after these, or null. `ahead` are the weights of the next
   panel, `ahead_row` bytes from output to output, of which `ahead_lines` times LINES cache lines are needed, `lines` of each
   LINES by this call. */
typedef struct {
    const float *x;
    const lanes *panel;
    const float *from;
    long from_row;
    float *y;
    long y_row, deep;
    const float *next;
    const char *ahead;
    long ahead_row, ahead_lines, lines;
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
        const char *ahead = b->ahead + n * b->ahead_row;
        _Pragma("GCC unroll 4") for (long end = k + b->ahead_lines; k < end; k++, x += SIDE, panel += WIDE, ahead += 64 * LINES) {
            UNROLL for (int line = 0; line < lines; line++)
                _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
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
    const Target *target, long p, long rows, long k, long deep, const float *x, long x_block, const char *ahead) {
    lanes packed[DEEP * WIDE];
    int add = target->add || k;
    long n = p * PANEL, N = target->N, count = MIN(PANEL, N - n), blocks = (rows + ROWS - 1) / ROWS;
    const void *w = at(target->w, n * target->row + k * target->step, target->half);
    long width = target->half ? 2 : 4;
    float bias_or_zero[PANEL] = {0};
    if (target->bias)
        memcpy(bias_or_zero, target->bias + n, 4 * (size_t)count);
    pack(target, w, count, deep, packed);
    for (long i = 0; i < blocks; i++) {
        long top = rows * i / blocks, bottom = rows * (i + 1) / blocks;
        long line = LINES * i / blocks, lines = LINES * (i + 1) / blocks - line;
        float *y = target->y + top * N + n;
        Block b = {x + i * x_block, packed, add ? y : bias_or_zero, add ? N : 0, y, N, deep,
                   add && i + 1 < blocks ? y + (bottom - top) * N : 0,
                   ahead + line * 64, target->row * width, deep * width / (64 * LINES),
                   target->step == 1 && blocks <= FETCHING ? lines : 0};
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
            for (long k = begin; k < end; k += DEEP) {
                long next = k + DEEP < end ? (k + DEEP) * target->step : PANEL * target->row + begin * target->step;
                panel(target, own, rows, k, MIN(DEEP, end - k), packed + (k - begin) * SIDE, slab * SIDE,
                      at(target->w, own * PANEL * target->row + next, target->half));
            }
        }
    }
}

/* A part of the rows, for one thread of those that share them. */
INLINE Target from_row(Target target, long row) {
    target.y += row * target.N;
    return target;
}

/* y = x W' + bias or x W, or with `add` y + x W' or y + x W, and beside it y2 = x W2' or x W2, if N2 is not 0; then
   y += B A x for the adapters of `groups`. W is bfloat16 if `half`, all else float32. */
EXPORT void tinkex_float_product(
    int threads, const float *x, const void *w, int half, const float *bias, float *y, long M, long N, long K, int across, int add,
    const float *w2, float *y2, long N2, const Group *groups, long count, float *inner, long stride) {
    const Adapters adapters = {groups, count, inner, stride};
    if (M == 0)
        return;
    int many = across || add || M > FEW || N2;
    Target targets[2] = {
        {w, half, add, bias, across ? 1 : K, across ? N : 1, y, N}, {w2, 0, 0, 0, across ? 1 : K, across ? N2 : 1, y2, N2}};
    long units = many ? panels_of(targets) + panels_of(targets + 1) : (N + LANES - 1) / LANES;
#pragma omp parallel num_threads(threads)
    {
        long id = omp_get_thread_num(), all = omp_get_num_threads(), parts = 1;
        /* Threads share the rows too if there are too few panels to keep them equally busy. */
        while (many && all % (2 * parts) == 0 && units * parts < 4 * all && M >= 2 * MANY * parts)
            parts *= 2;
        tinkex_adapt_inner(&adapters, x, K, id, all);
        if (many) {
            long part = id % parts, own = id / parts, among = all / parts;
            long top = M * part / parts, rows = M * (part + 1) / parts - top;
            Target parted[2] = {from_row(targets[0], top), from_row(targets[1], top)};
            panels(x + top * K, parted, rows, K, units * own / among, units * (own + 1) / among);
        } else {
            few_rows(targets, x, M, K, units * id / all, units * (id + 1) / all);
        }
        if (count) {
#pragma omp barrier
            tinkex_adapt_outer(&adapters, y, N, id, all);
        }
    }
}

#endif
