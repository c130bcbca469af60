/* Products of bfloat16 rows and frozen bfloat16 weights, with the adapters of the rows, for CPUs with AVX-512 BF16.

   Weights keep PyTorch's layout, so that one copy serves this product, the backward pass and the embedding. Every number
   of the result adds up the pairs of inputs of its row in order, wherever it is computed. So the bits of a row do not
   depend on the other rows, on their number, or on the number of threads, and a NaN stays in its row.

   A few rows: the memory is the limit. Weights are read as squares of 16 x 16 pairs that are transposed in registers, so
   that each lane is one output, and the sums of all rows stay in registers. More rows: sixteen of them are packed side by
   side, so that each lane is one row.

   Shapes: M rows, K inputs, N outputs, R columns of an adapter's factors. K and R are even. */

#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__)

#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "transpose.h"

#define LANES 16   /* rows of a tile */
#define FEW 16     /* rows whose sums stay in registers */
#define TOGETHER 16 /* of few rows: blocks of LANES outputs that are summed before their adapters are added */
#define TILES 4    /* tiles that are worked on together */
#define WIDE (LANES * TILES)
#define CHUNK 96   /* outputs between two roundings: a multiple of all blocks below */
#define DEEP 1024  /* pairs of inputs that are worked on together, so that they stay in the cache */

typedef uint16_t half;
typedef uint32_t pair;

/* Outputs up to `end` use the columns `first` to `last` of the factors, both even: B is block-diagonal. Their rows of B
   begin at `b`, `stride` numbers apart. */
typedef struct {
    long end, first, last, stride;
    const half *b;
} Span;

/* Adjacent rows with one adapter, whose A is R x K. `inner`, if given, receives the rows between the factors. */
typedef struct {
    long begin, end, rank;
    const half *a;
    long spans;
    const Span *span;
    half *inner;
} Group;

/* What the threads work on together. Packed rows are in tiles of `side` rows: pair k of row i at [k * side + i], each tile
   after the other. `inner` are the rows between the factors, with as many columns as the widest adapter. */
typedef struct {
    const half *w, *bias;
    void *y;
    int wide;
    long M, N, K;
    const Group *groups;
    long count;
    const pair *x;
    pair *inner;
    long side, widest;
    int finished; /* threads whose part of `inner` is complete */
} Product;

INLINE __mmask16 first_lanes(long count) { return (__mmask16)((1u << count) - 1); }

/* Pack the inputs k to `end` of up to sixteen rows into a tile; missing rows are zero. */
static void pack(const half *x, long rows, long K, long k, long end, long side, pair *out) {
    for (; k < end; k += 2 * LANES) {
        __m512i r[16];
        long left = MIN((K - k) / 2, LANES);
        UNROLL for (int i = 0; i < 16; i++)
            r[i] = i < rows ? _mm512_maskz_loadu_epi32(first_lanes(left), x + i * K + k) : _mm512_setzero_si512();
        transpose(r);
        for (long i = 0; i < left; i++)
            _mm512_mask_storeu_epi32(out + (k / 2 + i) * side, first_lanes(side), r[i]);
    }
}

INLINE __m512bh both(const void *pairs, long k) { return (__m512bh)_mm512_set1_epi32(((const int32_t *)pairs)[k]); }

/* Round sums to bfloat16 and store them: as float32 again if `wide`. */
INLINE void store_rounded(__m512 sums, void *y, int wide, long place, __mmask16 some) {
    __m256i halves = (__m256i)_mm512_cvtneps_pbh(sums);
    if (wide)
        _mm512_mask_storeu_epi32((float *)y + place, some, _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    else
        _mm256_mask_storeu_epi16((half *)y + place, some, halves);
}

/* -- a few rows ------------------------------------------------------------------------------ */

/* What one call works on: `pairs` pairs of inputs of packed rows, and `outputs` rows of weights, `stride` pairs apart. The
   weights that are needed next, from `ahead` on, are fetched meanwhile. */
typedef struct {
    const pair *x;
    long side, pairs, outputs, stride;
    const half *w, *ahead;
    float *sums; /* LANES of each row */
} Few;

/* Add the products of one pair of inputs and sixteen pairs of weights. GCC spends a second instruction on reading the pair:
   then 8 to 16 rows take 4 to 9 % longer. */
INLINE __m512 added(__m512 sums, __m512i weights, const pair *x) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*x));
    return sums;
}

/* Add the products of up to LANES outputs and all pairs of inputs to the sums of `rows` rows. */
INLINE void few(const Few *f, const int rows) {
    const __mmask16 some = first_lanes(f->outputs);
    const pair *w = (const pair *)f->w, *x = f->x;
    __m512 sums[FEW];
    UNROLL for (int r = 0; r < rows; r++)
        sums[r] = _mm512_maskz_loadu_ps(some, f->sums + r * LANES);
    for (long k = 0; k < f->pairs; k += LANES) {
        __m512i turned[16];
        long left = f->pairs - k;
        const half *ahead = f->ahead + 2 * k * LANES;
        if (f->outputs == LANES && left >= LANES) {
            UNROLL for (int i = 0; i < 16; i++)
                turned[i] = _mm512_loadu_si512(w + i * f->stride + k);
            transpose(turned);
            UNROLL for (int i = 0; i < 16; i++, x += f->side) {
                _mm_prefetch((const char *)(ahead + 2 * i * LANES), _MM_HINT_T0);
                UNROLL for (int r = 0; r < rows; r++)
                    sums[r] = added(sums[r], turned[i], x + r);
            }
        } else {
            __m512i edge[16];
            left = MIN(left, LANES);
            UNROLL for (int i = 0; i < 16; i++)
                turned[i] = _mm512_maskz_loadu_epi32(i < f->outputs ? first_lanes(left) : 0, w + i * f->stride + k);
            transpose(turned);
            memcpy(edge, turned, sizeof edge);
            for (long i = 0; i < left; i++, x += f->side) {
                _mm_prefetch((const char *)(ahead + 2 * i * LANES), _MM_HINT_T0);
                UNROLL for (int r = 0; r < rows; r++)
                    sums[r] = added(sums[r], edge[i], x + r);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(f->sums + r * LANES, some, sums[r]);
}

#define OF_FEW(R) \
    static void few_##R(const Few *f) { few(f, R); }
#define EACH(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15) F(16)
EACH(OF_FEW)
#define NAMED(R) few_##R,

static void add_few(Few f, long rows) {
    static void (*const of[FEW])(const Few *) = {EACH(NAMED)};
    if (rows > 0)
        of[rows - 1](&f);
}

/* A part of the rows between the factors: those of one tile and group, LANES columns from r on. */
typedef struct {
    const Group *group;
    long tile, r;
} Part;

INLINE const half *part_of_a(const Product *p, Part part) { return part.group->a + part.r * p->K; }

static void inner_part(const Product *p, Part part, const half *ahead) {
    const Group *group = part.group;
    long first = part.tile * LANES, begin = MAX(group->begin, first), rows = MIN(group->end, first + LANES) - begin;
    long columns = MIN(group->rank - part.r, LANES);
    pair *inner = p->inner + part.tile * p->widest / 2 * LANES + part.r / 2 * p->side + begin - first;
    float sums[LANES * LANES] __attribute__((aligned(64))) = {0};
    add_few((Few){p->x + part.tile * p->K / 2 * LANES + begin - first, p->side, p->K / 2, columns, p->K / 2,
                  part_of_a(p, part), ahead, sums},
            rows);
    for (long i = 0; i < rows; i++) {
        pair found[LANES / 2];
        _mm256_storeu_si256((__m256i *)found, (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(sums + i * LANES)));
        for (long j = 0; j < columns / 2; j++)
            inner[j * p->side + i] = found[j];
        if (group->inner)
            memcpy(group->inner + (begin - group->begin + i) * group->rank + part.r, found, 2 * (size_t)columns);
    }
}

/* All of the inner rows: their parts shared out among the threads. `ahead` are the weights that are needed then. */
static void inner_rows(Product *p, const half *ahead, int id, int all) {
    Part last = {0};
    long work = 0;
    for (const Group *group = p->groups; group < p->groups + p->count; group++)
        for (long tile = group->begin / LANES; tile * LANES < group->end; tile++)
            for (long r = 0; r < group->rank; r += LANES)
                if (work++ % all == id) {
                    Part part = {group, tile, r};
                    if (last.group)
                        inner_part(p, last, part_of_a(p, part));
                    last = part;
                }
    if (last.group)
        inner_part(p, last, ahead);
    __atomic_add_fetch(&p->finished, 1, __ATOMIC_RELEASE);
}

/* Wait for the other threads' inner rows, most likely finished by now. */
static void await_inner(const Product *p, int all) {
    while (p->count && __atomic_load_n(&p->finished, __ATOMIC_ACQUIRE) < all)
        sched_yield();
}

/* Add B times the inner rows of the group to the sums of `count` outputs from n on. */
static void add_few_update(const Product *p, const Group *group, long n, long count, float *sums) {
    long top = 0;
    for (const Span *span = group->span; span < group->span + group->spans; top = span++->end) {
        long begin = MAX(n, top), end = MIN(n + count, span->end);
        if (begin < end)
            add_few((Few){p->inner + span->first / 2 * p->side + group->begin, p->side, (span->last - span->first) / 2,
                          end - begin, span->stride / 2, span->b + (begin - top) * span->stride,
                          span->b + (end - top) * span->stride, sums + group->begin * LANES + begin - n},
                    group->end - group->begin);
    }
}

/* The products of all rows with the outputs n to n + count; the bias is the first number of each sum. */
static void few_sums(const Product *p, long n, long count, long next, float *sums) {
    __m512i bias = _mm512_setzero_si512();
    if (p->bias)
        bias = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), p->bias + n)), 16);
    for (long r = 0; r < p->M; r++)
        _mm512_store_si512(sums + r * LANES, bias);
    add_few((Few){p->x, p->side, p->K / 2, count, p->K / 2, p->w + n * p->K, p->w + next * p->K, sums}, p->M);
}

/* The outputs `begin` to `end` of all rows. Many outputs are summed before the adapters are added: by then the other threads
   have finished their inner rows, even if they began later. */
static void few_rows(const Product *p, long begin, long end, int all) {
    for (long first = begin; first < end; first += TOGETHER * LANES) {
        long last = MIN(end, first + TOGETHER * LANES);
        float sums[TOGETHER][FEW * LANES] __attribute__((aligned(64)));
        for (long n = first; n < last; n += LANES)
            few_sums(p, n, MIN(end - n, LANES), n + LANES < end ? n + LANES : n, sums[(n - first) / LANES]);
        await_inner(p, all);
        for (long n = first; n < last; n += LANES) {
            long count = MIN(end - n, LANES);
            float *of_rows = sums[(n - first) / LANES];
            for (long g = 0; g < p->count; g++)
                add_few_update(p, p->groups + g, n, count, of_rows);
            for (long r = 0; r < p->M; r++)
                store_rounded(_mm512_load_ps(of_rows + r * LANES), p->y, p->wide, r * p->N + n, first_lanes(count));
        }
    }
}

/* -- many rows ------------------------------------------------------------------------------- */

/* What one call of a block works on: `pairs` pairs of inputs of packed rows, and rows of `w`, `stride` pairs apart. */
typedef struct {
    const pair *x;
    long tile, stride, pairs;
    const half *w;
    float *out; /* block x WIDE sums */
} Block;

/* Add the products of `nb` rows of weights and `mv` tiles to the sums. */
INLINE void block(const Block *b, const int nb, const int mv) {
    const char *ahead = (const char *)(b->w + 2 * b->stride * nb); /* the next block */
    long lines = nb * 4;
    __m512 sums[12][TILES];
    UNROLL for (int n = 0; n < nb; n++)
        UNROLL for (int m = 0; m < mv; m++)
            sums[n][m] = _mm512_load_ps(b->out + n * WIDE + m * LANES);
    for (long k = 0; k < b->pairs; k++) {
        __m512bh x[TILES];
        if (nb >= 12 || k % 2 == 0)
            _mm_prefetch(ahead + k * lines, _MM_HINT_T1);
        UNROLL for (int m = 0; m < mv; m++)
            x[m] = (__m512bh)_mm512_load_si512(b->x + m * b->tile + k * LANES);
        UNROLL for (int n = 0; n < nb; n++) {
            __m512bh w = both(b->w, n * b->stride + k);
            UNROLL for (int m = 0; m < mv; m++)
                sums[n][m] = _mm512_dpbf16_ps(sums[n][m], x[m], w);
        }
    }
    UNROLL for (int n = 0; n < nb; n++)
        UNROLL for (int m = 0; m < mv; m++)
            _mm512_store_ps(b->out + n * WIDE + m * LANES, sums[n][m]);
}

#define BLOCK(NB, MV) \
    static void block_##NB##_##MV(const Block *b) { block(b, NB, MV); }
BLOCK(12, 2) BLOCK(8, 3) BLOCK(6, 4)
BLOCK(4, 2) BLOCK(4, 3) BLOCK(3, 4)
BLOCK(1, 2) BLOCK(1, 3) BLOCK(1, 4)

/* Add the products of `count` rows of weights to the sums of two tiles or more, as many at a time as there are registers for. */
static void blocks(Block b, long count, int tiles) {
    static void (*const run[3][3])(const Block *) = {
        {block_12_2, block_8_3, block_6_4}, {block_4_2, block_4_3, block_3_4}, {block_1_2, block_1_3, block_1_4}};
    static const long size[3][3] = {{12, 8, 6}, {4, 4, 3}, {1, 1, 1}};
    int kind = tiles - 2;
    while (count > 0) {
        int step = count >= size[0][kind] ? 0 : count >= size[1][kind] ? 1 : 2;
        run[step][kind](&b);
        b.w += size[step][kind] * b.stride * 2;
        b.out += size[step][kind] * WIDE;
        count -= size[step][kind];
    }
}

/* The lanes of a tile, which begins at row `first`, that belong to a group. */
INLINE __mmask16 lanes_of(const Group *group, long first) {
    long begin = MAX(group->begin - first, 0), end = MIN(group->end - first, LANES);
    return begin >= end ? 0 : first_lanes(end) & (__mmask16)~first_lanes(begin);
}

/* Add B times the inner rows of some lanes of a tile, `nb` outputs at a time. The mask is that of the store: of the mask of a
   bfloat16 product some versions of GCC take half. */
INLINE void update(const Block *b, __mmask16 some, const int nb) {
    __m512 sums[8];
    UNROLL for (int n = 0; n < nb; n++)
        sums[n] = _mm512_load_ps(b->out + n * WIDE);
    for (long k = 0; k < b->pairs; k++) {
        __m512bh x = (__m512bh)_mm512_load_si512(b->x + k * LANES);
        UNROLL for (int n = 0; n < nb; n++)
            sums[n] = _mm512_dpbf16_ps(sums[n], x, both(b->w, n * b->stride + k));
    }
    UNROLL for (int n = 0; n < nb; n++)
        _mm512_mask_store_ps(b->out + n * WIDE, some, sums[n]);
}

/* Add B times the inner rows of the group, for the outputs n to n + count of `tiles` tiles from row `first`. */
static void add_update(const Group *group, const pair *inner, long tile, long first, long rows, int tiles,
                       long n, long count, float *out) {
    int whole = group->begin <= first && group->end >= MIN(first + tiles * LANES, rows);
    long begin = n;
    for (long s = 0; s < group->spans && begin < n + count; s++) {
        const Span *span = group->span + s;
        long end = MIN(span->end, n + count), from = span->first / 2;
        long top = s ? span[-1].end : 0;
        if (begin >= end)
            continue;
        Block b = {inner + from * LANES, tile, span->stride / 2, span->last / 2 - from,
                   span->b + (begin - top) * span->stride, out + (begin - n) * WIDE};
        if (whole) {
            blocks(b, end - begin, tiles);
        } else {
            for (int t = 0; t < tiles; t++) {
                __mmask16 some = lanes_of(group, first + t * LANES);
                Block one = b;
                one.x += t * tile;
                one.out += t * LANES;
                for (long left = some ? end - begin : 0; left > 0;) {
                    long done = left >= 8 ? 8 : 1;
                    if (done == 8)
                        update(&one, some, 8);
                    else
                        update(&one, some, 1);
                    one.w += done * one.stride * 2;
                    one.out += done * WIDE;
                    left -= done;
                }
            }
        }
        begin = end;
    }
}

/* Round sums to bfloat16 and store them as rows: as float32 again if `wide`. */
static void store(const float *out, void *y, int wide, long rows, long N, long n, long count) {
    for (long i = 0; i < count; i += LANES) {
        __m512i r[16];
        __mmask16 some = first_lanes(MIN(count - i, LANES));
        UNROLL for (int j = 0; j < 16; j++)
            r[j] = _mm512_load_si512(out + (i + j) * WIDE);
        transpose(r);
        for (long m = 0; m < rows; m++)
            store_rounded((__m512)r[m], y, wide, m * N + n + i, some);
    }
}

/* The outputs `begin` to `end` of all rows. */
static void many_rows(const Product *p, long begin, long end, int all) {
    long M = p->M, N = p->N, K = p->K, tiles = (M + LANES - 1) / LANES, tile = K / 2 * LANES, inner = p->widest / 2 * LANES;
    float out[CHUNK * WIDE] __attribute__((aligned(64)));
    for (long t = 0; t < tiles;) {
        int together = tiles - t <= TILES ? (int)(tiles - t) : tiles - t == TILES + 1 ? TILES - 1 : TILES;
        long first = t * LANES;
        for (long n = begin; n < end; n += CHUNK) {
            long some = MIN(end - n, CHUNK);
            for (long i = 0; i < some; i++) {
                uint32_t bits = p->bias ? (uint32_t)p->bias[n + i] << 16 : 0;
                for (int m = 0; m < together; m++)
                    _mm512_store_si512(out + i * WIDE + m * LANES, _mm512_set1_epi32((int)bits));
            }
            for (long k = 0; k < K / 2; k += DEEP) {
                long deep = MIN(K / 2 - k, DEEP);
                blocks((Block){p->x + t * tile + k * LANES, tile, K / 2, deep, p->w + n * K + 2 * k, out}, some, together);
            }
            await_inner(p, all);
            for (const Group *group = p->groups; group < p->groups + p->count; group++)
                if (group->begin < first + together * LANES && group->end > first)
                    add_update(group, p->inner + t * inner, inner, first, M, together, n, some, out);
            for (int m = 0; m < together; m++) {
                long top = first + m * LANES;
                void *to = (char *)p->y + top * N * (p->wide ? 4 : 2);
                store(out + m * LANES, to, p->wide, MIN(M - top, LANES), N, n, some);
            }
        }
        t += together;
    }
}

/* y = x W' + bias + B A x, rounded to bfloat16; stored as float32 if `wide`. `space` holds (M + 15) / 16 * 8 * (K + R) pairs. */
EXPORT void tinkex_product(
    int threads, const half *x, const half *w, const half *bias, void *y, int wide, long M, long N, long K,
    const Group *groups, long count, pair *space) {
    /* A single row is packed as it is. */
    Product p = {w, bias, y, wide, M, N, K, groups, count, .x = M == 1 ? (const pair *)x : space, .side = MIN(M, LANES)};
    long tiles = (M + LANES - 1) / LANES, units = (N + LANES - 1) / LANES, squares = (K / 2 + LANES - 1) / LANES;
    p.inner = space + tiles * LANES * K / 2;
    for (long g = 0; g < count; g++)
        p.widest = MAX(p.widest, groups[g].rank);
#pragma omp parallel num_threads(threads)
    {
        int id = omp_get_thread_num(), all = omp_get_num_threads();
        long begin = units * id / all * LANES, end = MIN(units * (id + 1) / all * LANES, N);
        /* What is read first comes while the rows are packed. */
        const half *start = w + begin * K, *early = count && id * LANES < groups->rank ? groups->a + id * LANES * K : start;
        for (long k = 0; k < LANES * K; k += 2 * LANES)
            _mm_prefetch((const char *)(early + k), _MM_HINT_T0);
        if (M > FEW)
            for (long t = id; t < tiles; t += all)
                pack(x + t * LANES * K, MIN(M - t * LANES, LANES), K, 0, K, LANES, space + t * LANES * K / 2);
        else if (M > 1)
            pack(x, M, K, squares * id / all * 2 * LANES, MIN(squares * (id + 1) / all * 2 * LANES, K), M, space);
        if (M > 1) {
#pragma omp barrier
        }
        if (count)
            inner_rows(&p, start, id, all);
        if (M <= FEW)
            few_rows(&p, begin, end, all);
        else
            many_rows(&p, begin, end, all);
    }
}

#endif
