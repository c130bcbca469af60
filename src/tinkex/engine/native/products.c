/* Products of bfloat16 rows and frozen bfloat16 weights, with the adapters of the rows, for CPUs with AVX-512 BF16.

   Weights keep PyTorch's layout, so that one copy serves this product, the backward pass and the embedding. The rows
   are packed instead: sixteen rows side by side, one per lane. A lane adds up the pairs of numbers of its row in order,
   whatever stands in the other lanes. So the bits of a row do not depend on the other rows, on their number, or on the
   number of threads, and a NaN stays in its row.

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
#define TILES 4    /* tiles that are worked on together */
#define WIDE (LANES * TILES)
#define CHUNK 96   /* outputs between two roundings: a multiple of all blocks below */
#define COLUMNS 8  /* of an adapter's first factor that are worked on together */
#define DEEP 1024  /* pairs of inputs that are worked on together, so that they stay in the cache */

typedef uint16_t half;
typedef uint32_t pair;

/* Outputs up to `end` use the columns `first` to `last` of the factors, both even: B is block-diagonal. Their rows of B
   begin at `b`, `stride` numbers apart. */
typedef struct {
    long end, first, last, stride;
    const half *b;
} Span;

/* Adjacent rows with one adapter. A is R x K; a sampler's is packed in panels, the pairs of 16 columns side by side.
   `inner`, if given, receives the rows between the factors. */
typedef struct {
    long begin, end, rank, packed;
    const half *a;
    long spans;
    const Span *span;
    half *inner;
} Group;

/* Pack up to sixteen rows: pair k of row i to out[k * LANES + i]; missing rows are zero. */
static void pack(const half *x, long rows, long K, pair *out) {
    for (long k = 0; k < K; k += 2 * LANES) {
        __m512i r[16];
        long left = (K - k) / 2 < LANES ? (K - k) / 2 : LANES;
        __mmask16 some = (__mmask16)((1u << left) - 1);
        UNROLL for (int i = 0; i < 16; i++)
            r[i] = i < rows ? _mm512_maskz_loadu_epi32(some, x + i * K + k) : _mm512_setzero_si512();
        transpose(r);
        for (long i = 0; i < left; i++)
            _mm512_store_si512(out + (k / 2 + i) * LANES, r[i]);
    }
}

INLINE __m512bh both(const half *w, long k) {
    return (__m512bh)_mm512_set1_epi32(((const int32_t *)w)[k]);
}

/* What one call of a block works on: `pairs` pairs of inputs of packed rows, and rows of `w`, `stride` pairs apart. */
typedef struct {
    const pair *x;
    long tile, stride, pairs;
    const half *w;
    float *out; /* block x WIDE sums */
} Block;

/* Add the products of `nb` rows of weights and `mv` tiles to the sums; `narrow` if only eight lanes are in use. */
INLINE void block(const Block *b, const int nb, const int mv, const int narrow) {
    const char *ahead = (const char *)(b->w + 2 * b->stride * nb);
    long lines = nb * 4;
    if (narrow) {
        __m256 sums[16];
        UNROLL for (int n = 0; n < nb; n++)
            sums[n] = _mm256_load_ps(b->out + n * WIDE);
        for (long k = 0; k < b->pairs; k++) {
            _mm_prefetch(ahead + k * lines, _MM_HINT_T1);
            __m256bh x = (__m256bh)_mm256_load_si256((const void *)(b->x + k * LANES));
            UNROLL for (int n = 0; n < nb; n++) {
                int32_t w = ((const int32_t *)b->w)[n * b->stride + k];
                sums[n] = _mm256_dpbf16_ps(sums[n], x, (__m256bh)_mm256_set1_epi32(w));
            }
        }
        UNROLL for (int n = 0; n < nb; n++)
            _mm256_store_ps(b->out + n * WIDE, sums[n]);
        return;
    }
    __m512 sums[16][TILES];
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

#define BLOCK(NB, MV, NARROW) \
    static void block_##NB##_##MV##_##NARROW(const Block *b) { block(b, NB, MV, NARROW); }
BLOCK(16, 1, 1) BLOCK(16, 1, 0) BLOCK(12, 2, 0) BLOCK(8, 3, 0) BLOCK(6, 4, 0)
BLOCK(8, 1, 1) BLOCK(8, 1, 0) BLOCK(4, 2, 0) BLOCK(4, 3, 0) BLOCK(3, 4, 0)
BLOCK(1, 1, 1) BLOCK(1, 1, 0) BLOCK(1, 2, 0) BLOCK(1, 3, 0) BLOCK(1, 4, 0)

/* Add the products of `count` rows of weights to the sums, as many at a time as there are registers for. */
static void blocks(Block b, long count, int tiles, int narrow) {
    static void (*const run[3][5])(const Block *) = {
        {block_16_1_1, block_16_1_0, block_12_2_0, block_8_3_0, block_6_4_0},
        {block_8_1_1, block_8_1_0, block_4_2_0, block_4_3_0, block_3_4_0},
        {block_1_1_1, block_1_1_0, block_1_2_0, block_1_3_0, block_1_4_0}};
    static const long size[3][5] = {{16, 16, 12, 8, 6}, {8, 8, 4, 4, 3}, {1, 1, 1, 1, 1}};
    int kind = narrow ? 0 : tiles;
    while (count > 0) {
        int step = count >= size[0][kind] ? 0 : count >= size[1][kind] ? 1 : 2;
        run[step][kind](&b);
        b.w += size[step][kind] * b.stride * 2;
        b.out += size[step][kind] * WIDE;
        count -= size[step][kind];
    }
}

/* The lanes of a tile, which begins at row `first`, that belong to a group. */
INLINE __mmask16 lanes(const Group *group, long first) {
    long begin = group->begin - first, end = group->end - first;
    begin = begin < 0 ? 0 : begin;
    end = end > LANES ? LANES : end;
    return begin >= end ? 0 : (__mmask16)(((1u << end) - 1) & ~((1u << begin) - 1));
}

/* Add B times the inner rows of some lanes of a tile, `nb` outputs at a time. */
INLINE void update(const Block *b, __mmask16 some, const int nb) {
    __m512 sums[8];
    UNROLL for (int n = 0; n < nb; n++)
        sums[n] = _mm512_load_ps(b->out + n * WIDE);
    for (long k = 0; k < b->pairs; k++) {
        __m512bh x = (__m512bh)_mm512_load_si512(b->x + k * LANES);
        UNROLL for (int n = 0; n < nb; n++)
            sums[n] = _mm512_mask_dpbf16_ps(sums[n], some, x, both(b->w, n * b->stride + k));
    }
    UNROLL for (int n = 0; n < nb; n++)
        _mm512_store_ps(b->out + n * WIDE, sums[n]);
}

/* Add B times the inner rows of the group, for the outputs n to n + count of `tiles` tiles from row `first`. */
static void add_update(const Group *group, const pair *inner, long tile, long first, long rows, int tiles, int narrow,
                       long n, long count, float *out) {
    int whole = group->begin <= first && group->end >= (first + tiles * LANES < rows ? first + tiles * LANES : rows);
    long begin = n;
    for (long s = 0; s < group->spans && begin < n + count; s++) {
        const Span *span = group->span + s;
        long end = span->end < n + count ? span->end : n + count, from = span->first / 2;
        long top = s ? span[-1].end : 0;
        if (begin >= end)
            continue;
        Block b = {inner + from * LANES, tile, span->stride / 2, span->last / 2 - from,
                   span->b + (begin - top) * span->stride, out + (begin - n) * WIDE};
        if (whole) {
            blocks(b, end - begin, tiles, narrow);
        } else {
            for (int t = 0; t < tiles; t++) {
                __mmask16 some = lanes(group, first + t * LANES);
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
        long left = count - i < LANES ? count - i : LANES;
        __mmask16 some = (__mmask16)((1u << left) - 1);
        UNROLL for (int j = 0; j < 16; j++)
            r[j] = _mm512_load_si512(out + (i + j) * WIDE);
        transpose(r);
        for (long m = 0; m < rows; m++) {
            long at = m * N + n + i;
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)r[m]);
            if (wide)
                _mm512_mask_storeu_epi32((float *)y + at, some, _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
            else
                _mm256_mask_storeu_epi16((half *)y + at, some, rounded);
        }
    }
}

/* The rows of one tile and group between the factors, columns r to r + count. */
static void compute_inner(
    const Group *group, const pair *x, long K, long first, long r, long count, int narrow, pair *inner) {
    float out[COLUMNS * WIDE] __attribute__((aligned(64)));
    __mmask16 some = lanes(group, first);
    memset(out, 0, sizeof out);
    blocks((Block){x, 0, K / 2, K / 2, group->a + r * K, out}, count, 1, narrow);
    for (long i = 0; i < count; i += 2) {
        __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(out + i * WIDE)));
        __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(out + (i + 1) * WIDE)));
        __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
        _mm512_mask_storeu_epi32(inner + (r + i) / 2 * LANES, some, pairs);
        if (group->inner) {
            pair values[LANES];
            _mm512_storeu_si512(values, pairs);
            for (int lane = 0; lane < LANES; lane++)
                if (some >> lane & 1)
                    memcpy(group->inner + (first + lane - group->begin) * group->rank + r + i, values + lane, 4);
        }
    }
}

/* `rows` rows between the factors, 16 columns of a panel: the pairs of inputs in order, as in `block`. `kept`, if given,
   receives them too, in rows of `rank` numbers. */
INLINE void panel_rows(const pair *x, const half *panel, long pairs, long columns, const int rows, pair *inner,
                       half *kept, long rank) {
    __m512 sums[16];
    UNROLL for (int i = 0; i < rows; i++)
        sums[i] = _mm512_setzero_ps();
    for (long k = 0; k < pairs; k++) {
        __m512bh a = (__m512bh)_mm512_load_si512(panel + 2 * k * LANES);
        UNROLL for (int i = 0; i < rows; i++)
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_set1_epi32((int)x[k * LANES + i]), a);
    }
    UNROLL for (int i = 0; i < rows; i++) {
        pair found[LANES / 2];
        _mm256_storeu_si256((__m256i *)found, (__m256i)_mm512_cvtneps_pbh(sums[i]));
        for (long j = 0; j < columns / 2; j++)
            inner[j * LANES + i] = found[j];
        if (kept)
            memcpy(kept + i * rank, found, 2 * (size_t)columns);
    }
}

/* The rows of one tile and group between the packed factors, the columns of a panel from r on. */
static void packed_inner(const Group *group, const pair *x, long K, long first, long r, pair *inner) {
    long begin = group->begin > first ? group->begin - first : 0;
    long end = group->end - first < LANES ? group->end - first : LANES;
    long columns = group->rank - r < LANES ? group->rank - r : LANES;
    const half *panel = group->a + r * K;
    pair *to = inner + r / 2 * LANES;
    while (begin < end) {
        long left = end - begin, done = left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        half *kept = group->inner ? group->inner + (first + begin - group->begin) * group->rank + r : 0;
        switch (done) {
        case 16: panel_rows(x + begin, panel, K / 2, columns, 16, to + begin, kept, group->rank); break;
        case 8: panel_rows(x + begin, panel, K / 2, columns, 8, to + begin, kept, group->rank); break;
        case 4: panel_rows(x + begin, panel, K / 2, columns, 4, to + begin, kept, group->rank); break;
        case 2: panel_rows(x + begin, panel, K / 2, columns, 2, to + begin, kept, group->rank); break;
        default: panel_rows(x + begin, panel, K / 2, columns, 1, to + begin, kept, group->rank);
        }
        begin += done;
    }
}

/* All of the inner rows: tiles, groups and columns shared out among the threads. */
static void inner_rows(const Group *groups, long count, const pair *x, long K, long widest, int narrow, pair *inner,
                       int id, int all) {
    long work = 0;
    for (long g = 0; g < count; g++)
        for (long t = groups[g].begin / LANES; t * LANES < groups[g].end; t++)
            for (long r = 0; r < groups[g].rank; r += groups[g].packed ? LANES : COLUMNS)
                if (work++ % all != id) {
                    continue;
                } else if (groups[g].packed) {
                    packed_inner(groups + g, x + t * K / 2 * LANES, K, t * LANES, r, inner + t * widest / 2 * LANES);
                } else {
                    long some = groups[g].rank - r < COLUMNS ? groups[g].rank - r : COLUMNS;
                    compute_inner(groups + g, x + t * K / 2 * LANES, K, t * LANES, r, some, narrow,
                                  inner + t * widest / 2 * LANES);
                }
}

/* y = x W' + bias + B A x, rounded to bfloat16; stored as float32 if `wide`. `space` holds (M + 15) / 16 * 8 * (K + R) pairs. */
EXPORT void tinkex_product(
    int threads, const half *x, const half *w, const half *bias, void *y, int wide, long M, long N, long K,
    const Group *groups, long count, pair *space) {
    long tiles = (M + LANES - 1) / LANES, tile = K / 2 * LANES, widest = 0;
    int narrow = M <= LANES / 2, finished = 0;
    pair *inner = space + tiles * tile;
    for (long g = 0; g < count; g++)
        widest = groups[g].rank > widest ? groups[g].rank : widest;
#pragma omp parallel num_threads(threads)
    {
        int id = omp_get_thread_num(), all = omp_get_num_threads(), waited = count == 0;
        for (long t = id; t < tiles; t += all)
            pack(x + t * LANES * K, M - t * LANES < LANES ? M - t * LANES : LANES, K, space + t * tile);
#pragma omp barrier
        if (count) {
            inner_rows(groups, count, space, K, widest, narrow, inner, id, all);
            __atomic_add_fetch(&finished, 1, __ATOMIC_RELEASE);
        }
        long units = (N + LANES - 1) / LANES;
        long begin = units * id / all * LANES, end = units * (id + 1) / all * LANES;
        end = end > N ? N : end;
        float out[CHUNK * WIDE] __attribute__((aligned(64)));
        for (long t = 0; t < tiles;) {
            int together = tiles - t <= TILES ? (int)(tiles - t) : tiles - t == TILES + 1 ? TILES - 1 : TILES;
            long first = t * LANES;
            for (long n = begin; n < end; n += CHUNK) {
                long some = end - n < CHUNK ? end - n : CHUNK;
                for (long i = 0; i < some; i++) {
                    uint32_t bits = bias ? (uint32_t)bias[n + i] << 16 : 0;
                    for (int m = 0; m < together; m++)
                        _mm512_store_si512(out + i * WIDE + m * LANES, _mm512_set1_epi32((int)bits));
                }
                for (long k = 0; k < K / 2; k += DEEP) {
                    long deep = K / 2 - k < DEEP ? K / 2 - k : DEEP;
                    const pair *from = space + t * tile + k * LANES;
                    blocks((Block){from, tile, K / 2, deep, w + n * K + 2 * k, out}, some, together, narrow);
                }
                while (!waited) { /* the other threads' inner rows, most likely finished by now */
                    waited = __atomic_load_n(&finished, __ATOMIC_ACQUIRE) == all;
                    if (!waited)
                        sched_yield();
                }
                for (long g = 0; g < count; g++)
                    if (groups[g].begin < first + together * LANES && groups[g].end > first)
                        add_update(groups + g, inner + t * widest / 2 * LANES, widest / 2 * LANES, first, M, together,
                                   narrow, n, some, out);
                for (int m = 0; m < together; m++) {
                    long top = first + m * LANES, left = M - top;
                    void *to = (char *)y + top * N * (wide ? 4 : 2);
                    store(out + m * LANES, to, wide, left < LANES ? left : LANES, N, n, some);
                }
            }
            t += together;
        }
    }
}

#endif
