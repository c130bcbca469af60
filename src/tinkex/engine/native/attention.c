/* Causal attention over packed rows or pages of a cache, forward and backward.

   A query's result depends on the query and on the keys and values up to its position alone: scores add up the numbers
   of a head in order, the softmax runs over all keys at once, and the mixed values add up the keys in order. So trainer
   and sampler get the same bits, whatever stands beside a row and wherever its keys lie.

   All products are built from one: rows of A, one cell at a time, times packed B. A cell is 32 bits: one float32, or
   two bfloat16 that are multiplied and added together. Sums are float32. In bfloat16 the weights are rounded before
   they meet the values.

   Shapes: H query heads, G key-value heads, R = H / G, E numbers of a head, a multiple of 16. */

#include <limits.h>
#include <stdlib.h>

#include "lanes.h"
#include "scratch.h"
#include "transpose.h"

#if defined(__AVX512F__)
#define WIDE 4 /* vectors of a block: with ROWS rows, as many sums as there are registers for */
#else
#define WIDE 2
#endif
#define ROWS 6
#define TILE 64 /* keys that are packed together */
#define LINE 16 /* cells of a cache line */
#define FEW 6   /* rows of a unit up to which its keys and values are read only once, as in a step of sampling */

typedef uint32_t cell;
typedef cell cells __attribute__((vector_size(4 * LANES)));

/* -- the product ---------------------------------------------------------------------------- */

INLINE lanes add_cell(lanes sum, cell a, cells b, const int half) {
#if defined(__AVX512BF16__)
    if (half)
        return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#endif
    if (half) {
        cells wide = a - (cells){};
        sum += (lanes)(wide << 16) * (lanes)(b << 16);
        return sum + (lanes)(wide & 0xffff0000u) * (lanes)(b & 0xffff0000u);
    }
    return multiplied(sum, from_bits(a), (lanes)b);
}

/* c (+)= a b: `steps` cells of each row of a; b holds `steps` rows of vectors. Strides count cells, of b vectors. */
typedef struct {
    const cell *a;
    long a_row, a_step;
    const cells *b;
    long b_step;
    float *c;
    long c_row, steps;
    int add;
} Product;

INLINE void block(const Product *p, const int rows, const int wide, const int half) {
    lanes sums[ROWS][WIDE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < wide; w++)
            sums[r][w] = p->add ? ((const lanes *)(p->c + r * p->c_row))[w] : (lanes){};
    for (long s = 0; s < p->steps; s++) {
        cells b[WIDE];
        UNROLL for (int w = 0; w < wide; w++)
            b[w] = p->b[s * p->b_step + w];
        UNROLL for (int r = 0; r < rows; r++) {
            cell a = p->a[r * p->a_row + s * p->a_step];
            UNROLL for (int w = 0; w < wide; w++)
                sums[r][w] = add_cell(sums[r][w], a, b[w], half);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < wide; w++)
            ((lanes *)(p->c + r * p->c_row))[w] = sums[r][w];
}

#define BLOCK(R, W) \
    static void block_##R##_##W(const Product *p, int half) { \
        if (half) \
            block(p, R, W, 1); \
        else \
            block(p, R, W, 0); \
    }
#if WIDE == 4
#define BLOCKS(R) BLOCK(R, 1) BLOCK(R, 2) BLOCK(R, 3) BLOCK(R, 4)
#define NAMES(R) {block_##R##_1, block_##R##_2, block_##R##_3, block_##R##_4}
#else
#define BLOCKS(R) BLOCK(R, 1) BLOCK(R, 2)
#define NAMES(R) {block_##R##_1, block_##R##_2}
#endif
BLOCKS(1) BLOCKS(2) BLOCKS(3) BLOCKS(4) BLOCKS(5) BLOCKS(6)
static void (*const BLOCK_OF[ROWS][WIDE])(const Product *, int) = {NAMES(1), NAMES(2), NAMES(3), NAMES(4), NAMES(5), NAMES(6)};

/* A product of `rows` rows and `wide` vectors. */
static void multiply(Product p, long rows, long wide, int half) {
    for (long w = 0; w < wide; w += WIDE)
        for (long r = 0; r < rows; r += ROWS) {
            Product part = p;
            part.a += r * p.a_row;
            part.b += w;
            part.c += r * p.c_row + w * LANES;
            BLOCK_OF[MIN(rows - r, ROWS) - 1][MIN(wide - w, WIDE) - 1](&part, half);
        }
}

/* -- packing -------------------------------------------------------------------------------- */

/* Where the keys or values of a sequence and head lie: in adjacent rows, or in pages. */
typedef struct {
    const char *base;
    long stride, first, page; /* bytes from row to row; the first row, or 0 with pages of so many rows */
    const int64_t *table;
} Source;

INLINE const void *row_of(const Source *source, long position) {
    long row = source->page ? source->table[position / source->page] * source->page + position % source->page
                            : source->first + position;
    return source->base + row * source->stride;
}

/* Rows from `position` on that lie one after another. */
INLINE long adjacent(const Source *source, long position) {
    return source->page ? source->page - position % source->page : LONG_MAX;
}

/* Fetch the rows `begin` to `end`, `width` cells each: keys and values of a sampler are mostly in no cache. */
static void fetch(const Source *source, long begin, long end, long width) {
    while (begin < end) {
        long count = MIN(end - begin, adjacent(source, begin));
        const char *row = row_of(source, begin);
        for (long i = 0; i < count; i++, row += source->stride)
            for (long c = 0; c < width; c += LINE)
                __builtin_prefetch(row + 4 * c, 0, 2);
        begin += count;
    }
}

/* Pack rows side by side, for products with their transpose: out[c][i] is cell c of row i; missing rows are zero. */
static void pack_across(const Source *source, long begin, long count, long width, cell *out) {
    for (long i = 0; i < count; i += LANES) {
        const cell *rows[LANES] = {0};
        for (long j = 0; j < MIN(LANES, count - i);) {
            long together = j + adjacent(source, begin + i + j);
            const char *row = row_of(source, begin + i + j);
            for (; j < MIN(MIN(LANES, count - i), together); j++, row += source->stride)
                rows[j] = (const cell *)row;
        }
        long c = 0;
#if defined(HAS_SQUARES)
        for (; c + LANES <= width; c += LANES) {
            square r[LANES];
            UNROLL for (int j = 0; j < LANES; j++)
                r[j] = rows[j] ? load_side(rows[j] + c) : (square){};
            transpose_square(r);
            UNROLL for (int j = 0; j < LANES; j++)
                memcpy(out + (c + j) * TILE + i, r + j, sizeof *r);
        }
#endif
        for (; c < width; c++)
            for (long j = 0; j < LANES; j++)
                out[c * TILE + i + j] = rows[j] ? rows[j][c] : 0;
    }
}

/* Pack rows one after another, for products with themselves: bfloat16 in pairs of rows, the last with zeros. */
static void pack_along(const Source *source, long begin, long count, long size, cell *out, int half) {
    if (!half) {
        for (long i = 0; i < count; i++)
            memcpy(out + i * size, row_of(source, begin + i), 4 * (size_t)size);
        return;
    }
    for (long i = 0; i < count; i += 2) {
        const uint16_t *low = row_of(source, begin + i), *high = i + 1 < count ? row_of(source, begin + i + 1) : 0;
        cell *to = out + i / 2 * size;
        if (high)
            for (long e = 0; e < size; e++)
                to[e] = (cell)low[e] | (cell)high[e] << 16;
        else
            for (long e = 0; e < size; e++)
                to[e] = low[e];
    }
}

/* The next part of the memory of a thread, from a cache line on. */
INLINE void *take(char **from, long numbers) {
    void *taken = *from;
    *from += (4 * numbers + 63) / 64 * 64;
    return taken;
}

/* -- softmax -------------------------------------------------------------------------------- */

/* Round two rows to bfloat16, side by side: cells of one number each. `count` is a multiple of 16. */
INLINE void pair_rows(const float *low, const float *high, cell *to, long count) {
#if defined(__AVX512BF16__)
    for (long j = 0; j < count; j += LANES) {
        __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(low + j)));
        __m512i second = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(high + j)));
        _mm512_store_si512(to + j, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
    }
#else
#pragma omp simd
    for (long j = 0; j < count; j++)
        to[j] = (cell)rounded(low[j]) | (cell)rounded(high[j]) << 16;
#endif
}

/* What turns the scores of a query into weights: exp(score - largest) * scale. */
typedef struct { float largest, scale; } Softmax;

/* Turn `count` scores into weights; the others up to `all` are zero. */
static Softmax softmax(float *scores, long count, long all) {
    float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
    for (long j = 0; j < count; j++)
        largest = scores[j] > largest ? scores[j] : largest;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < count; j++) {
        scores[j] = exponential(scores[j] - largest);
        sum += scores[j];
    }
    float scale = 1.0f / sum;
#pragma omp simd
    for (long j = 0; j < count; j++)
        scores[j] *= scale;
    memset(scores + count, 0, 4 * (size_t)(all - count));
    return (Softmax){largest, scale};
}

/* -- rotation ------------------------------------------------------------------------------- */

/* Rotate the numbers of a head by the angles of its position, times `scale`; back with sign -1. */
INLINE void rotate_head(const float *x, const float *cos, const float *sin, float scale, float sign, float *out,
                        long size) {
    long part = size / 2;
#pragma omp simd
    for (long e = 0; e < part; e++) {
        float low = x[e], high = x[part + e];
        out[e] = (low * cos[e] - high * (sin[e] * sign)) * scale;
        out[part + e] = (high * cos[part + e] + low * (sin[part + e] * sign)) * scale;
    }
}

#define LARGEST 512 /* numbers of a head at most */

/* Rows of queries, keys and values: queries rotated and scaled, keys rotated, values as they are. With a `cache`, keys and
   values also go there; `written` says where, for each row and head in units of a head. */
EXPORT void tinkex_rotate(int threads, int half, const void *qkv, const float *cos, const float *sin, float scale,
                          void *out, long heads, long groups, long size, long rows, void *cache,
                          const int64_t *written) {
    long width = (heads + 2 * groups) * size;
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long n = 0; n < rows; n++) {
        float x[LARGEST], turned[LARGEST];
        for (long h = 0; h < heads + groups; h++) {
            const void *from = at(qkv, n * width + h * size, half);
            void *to = at(out, n * width + h * size, half);
            if (half)
                for (long e = 0; e < size; e++)
                    x[e] = get(from, e, 1);
            else
                memcpy(x, from, 4 * (size_t)size);
            rotate_head(x, cos + n * size, sin + n * size, h < heads ? scale : 1.0f, 1.0f, turned, size);
            if (half)
                round_row(turned, to, size);
            else
                memcpy(to, turned, 4 * (size_t)size);
        }
        long values = n * width + (heads + groups) * size, keys = n * width + heads * size;
        memcpy(at(out, values, half), at(qkv, values, half), (size_t)(groups * size * (half ? 2 : 4)));
        for (long g = 0; g < 2 * groups && cache; g++)
            memcpy(at(cache, written[n * 2 * groups + g] * size, half), at(out, keys + g * size, half),
                   (size_t)(size * (half ? 2 : 4)));
    }
}

/* -- forward -------------------------------------------------------------------------------- */

/* Queries in adjacent rows. Keys and values lie in adjacent rows from `keys`, or in the pages from table[keys]. */
typedef struct { int64_t row, count, first, keys; } Sequence;

/* Queries and their heads, and where the keys and values are. Strides count numbers. */
typedef struct {
    const void *q, *k, *v;
    int64_t q_stride, k_stride, k_group, page;
    const int64_t *table;
    int64_t heads, groups, size;
} Heads;

typedef struct { long sequence, head, begin, count; } Unit;

static Source source_of(const Heads *heads, const Sequence *sequence, const void *base, long group, int half) {
    long number = half ? 2 : 4;
    return (Source){(const char *)base + group * heads->k_group * number, heads->k_stride * number,
                    heads->page ? 0 : sequence->keys, heads->page, heads->page ? heads->table + sequence->keys : 0};
}

/* Queries of a block. Scores of all its rows stay in the cache: 768 kB. The choice changes no bit. */
static long block_of(long keys, long rows_per_query) {
    long fitting = 196608 / (keys * rows_per_query);
    return MAX(2, MIN(32, fitting));
}

/* Whether the product can read values where they are. */
INLINE int in_place(const Source *values, int half) {
    return !half && ((uintptr_t)values->base | (uintptr_t)values->stride) % sizeof(cells) == 0;
}

static void attend_unit(const Heads *heads, const Sequence *sequence, const Unit *unit, void *out, Softmax *kept,
                        int half) {
    long R = heads->heads / heads->groups, E = heads->size, number = half ? 2 : 4, width = half ? E / 2 : E;
    long first = sequence->first + unit->begin, keys = first + unit->count, rows = unit->count * R;
    long padded = (keys + TILE - 1) / TILE * TILE, per = half ? 2 : 1;
    int few = rows <= FEW;
    char *space = (char *)scratch(rows * (2 * padded + 2 * E) + 2 * TILE * E + 256);
    float *scores = take(&space, rows * padded), *sums = take(&space, rows * E);
    cell *weights = half ? take(&space, rows * padded / 2) : (cell *)scores;
    cell *queries = take(&space, rows * width), *tile = take(&space, TILE * E);
    Source k = source_of(heads, sequence, heads->k, unit->head, half);
    Source v = source_of(heads, sequence, heads->v, unit->head, half);
    for (long i = 0; i < unit->count; i++) { /* the heads of a query are adjacent */
        long row = sequence->row + unit->begin + i;
        memcpy(queries + i * R * width, (const char *)heads->q + (row * heads->q_stride + unit->head * R * E) * number,
               (size_t)(R * E * number));
    }
    for (long t = 0; t < keys; t += TILE) {
        long some = MIN(TILE, keys - t), skipped = MAX(0, t - first) * R; /* queries before the tile do not see it */
        if (few)
            fetch(&k, t + TILE, MIN(t + 2 * TILE, keys), width);
        pack_across(&k, t, some, width, tile);
        multiply((Product){queries + skipped * width, width, 1, (cells *)tile, TILE / LANES,
                           scores + skipped * padded + t, padded, width, 0},
                 rows - skipped, (some + LANES - 1) / LANES, half);
    }
    if (few)
        fetch(&v, 0, MIN(TILE, keys), width);
    for (long r = 0; r < rows; r++) {
        Softmax found = softmax(scores + r * padded, first + r / R + 1, padded);
        if (kept)
            kept[(sequence->row + unit->begin + r / R) * heads->heads + unit->head * R + r % R] = found;
        if (half)
            round_row(scores + r * padded, (uint16_t *)(weights + r * padded / 2), padded);
    }
    memset(sums, 0, (size_t)(4 * rows * E));
    for (long t = 0, some; t < keys; t += some) {
        long skipped = MAX(0, t - first) * R, step = E / LANES;
        const cells *values = (cells *)tile;
        some = MIN(TILE, keys - t);
        if (few && in_place(&v, half)) {
            some = MIN(some, adjacent(&v, t));
            values = row_of(&v, t);
            step = v.stride / (long)sizeof *values;
        }
        if (few)
            fetch(&v, t + TILE, MIN(t + TILE + some, keys), width);
        if (values == (const cells *)tile)
            pack_along(&v, t, some, E, tile, half);
        multiply((Product){weights + (skipped * padded + t) / per, padded / per, 1, values, step, sums + skipped * E, E,
                           (some + per - 1) / per, 1},
                 rows - skipped, E / LANES, half);
    }
    for (long i = 0; i < unit->count; i++) {
        long to = (sequence->row + unit->begin + i) * heads->heads * E + unit->head * R * E;
        if (half)
            round_row(sums + i * R * E, at(out, to, 1), R * E);
        else
            memcpy(at(out, to, 0), sums + i * R * E, (size_t)(4 * R * E));
    }
}

/* Mixed values of every query, rows of H E numbers. Queries are rotated and scaled, keys rotated. `kept`, if given,
   receives H numbers of each query for the backward pass. */
EXPORT void tinkex_attend(int threads, int half, const Heads *heads, const Sequence *sequences, long count, void *out,
                          Softmax *kept) {
    long R = heads->heads / heads->groups, units = 0, work = 0;
    for (long s = 0; s < count; s++) {
        long keys = sequences[s].first + sequences[s].count, size = block_of(keys, R);
        units += (sequences[s].count + size - 1) / size * heads->groups;
        work += keys * sequences[s].count;
    }
    Unit *list = malloc((size_t)(units + 1) * sizeof *list);
    if (!list)
        abort();
    long made = 0;
    for (long s = 0; s < count; s++) {
        long size = block_of(sequences[s].first + sequences[s].count, R);
        for (long b = (sequences[s].count - 1) / size * size; b >= 0; b -= size) /* the longest first */
            for (long g = 0; g < heads->groups; g++)
                list[made++] = (Unit){s, g, b, MIN(size, sequences[s].count - b)};
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (work * heads->heads * heads->size > SMALL)
    for (long u = 0; u < units; u++)
        attend_unit(heads, sequences + list[u].sequence, list + u, out, kept, half);
    free(list);
}

/* -- backward ------------------------------------------------------------------------------- */

#define LONG 1024 /* positions from which on the queries of a head are divided in two, for two threads */

static long chunks_of(long T) { return T >= LONG ? 2 : 1; }

/* The first query of a chunk. Both halves have as many pairs of a query and a key. */
static long chunk_begin(long T, long chunk) {
    return chunk == 0 ? 0 : chunk == chunks_of(T) ? T : (long)((double)T * 0.7071) / TILE * TILE;
}

/* What all heads of all sequences have in common. `g` and `mixed` are rows of H E numbers. */
typedef struct {
    const Heads *heads;
    const void *g, *mixed;
    const Softmax *kept;
    const float *cos, *sin;
    float scale;
    void *qkv_g;
} Back;

/* Turn scores and gradients of weights of one query into weights and gradients of scores, `count` keys of a tile. */
INLINE void weights_back(float *scores, float *weights_g, Softmax kept, float along, long count) {
#pragma omp simd
    for (long j = 0; j < TILE; j++) {
        float weight = exponential(scores[j] - kept.largest) * kept.scale;
        float gradient = weight * (weights_g[j] - along);
        scores[j] = j < count ? weight : 0.0f;
        weights_g[j] = j < count ? gradient : 0.0f;
    }
}

/* Queries `first` to `last` of one head and sequence in adjacent rows. `packed` holds, for each tile, keys across,
   values across and keys along. Sets the gradients of the queries and, as far as these queries contribute, of keys and
   values: T x E. */
static void attend_back_unit(const Back *back, const Sequence *sequence, long head, long first, long last,
                             const cell *packed, float *k_g, float *v_g, int half) {
    const Heads *heads = back->heads;
    long E = heads->size, number = half ? 2 : 4, width = half ? E / 2 : E;
    long T = sequence->count, per = half ? 2 : 1, lines = heads->heads * E;
    char *space = (char *)scratch(TILE * (5 * TILE + 6 * E) + 1024);
    float *weights = take(&space, TILE * TILE), *weights_g = take(&space, TILE * TILE);
    cell *across = half ? take(&space, TILE * TILE / 2) : (cell *)weights; /* weights by pairs of queries */
    cell *across_g = half ? take(&space, TILE * TILE / 2) : (cell *)weights_g;
    cell *rounded_g = half ? take(&space, TILE * TILE / 2) : (cell *)weights_g;
    cell *queries = take(&space, TILE * width), *outputs_g = take(&space, TILE * width);
    cell *queries_along = take(&space, TILE * E), *outputs_along = take(&space, TILE * E);
    float *q_g = take(&space, TILE * E);
    Source q = {(const char *)heads->q + head * E * number, heads->q_stride * number, sequence->row, 0, 0};
    Source o = {(const char *)back->g + head * E * number, lines * number, sequence->row, 0, 0};
    memset(k_g, 0, (size_t)(4 * T * E));
    memset(v_g, 0, (size_t)(4 * T * E));
    for (long begin = first; begin < last; begin += TILE) {
        long rows = MIN(TILE, last - begin), pairs = (rows + per - 1) / per;
        float along[TILE];
        for (long i = 0; i < rows; i++) {
            long row = sequence->row + begin + i;
            const void *mixed = at(back->mixed, row * lines + head * E, half), *own = row_of(&o, begin + i);
            memcpy(queries + i * width, row_of(&q, begin + i), (size_t)(E * number));
            memcpy(outputs_g + i * width, own, (size_t)(E * number));
            float sum = 0; /* of weights times their gradients */
#pragma omp simd reduction(+ : sum)
            for (long e = 0; e < E; e++)
                sum += get(mixed, e, half) * get(own, e, half);
            along[i] = sum;
        }
        pack_along(&q, begin, rows, E, queries_along, half);
        pack_along(&o, begin, rows, E, outputs_along, half);
        memset(q_g, 0, (size_t)(4 * rows * E));
        for (long t = 0; t < begin + rows; t += TILE) {
            long some = MIN(TILE, T - t), wide = (some + LANES - 1) / LANES;
            const cell *keys_across = packed + t * 3 * width, *values_across = keys_across + TILE * width;
            const cell *keys_along = values_across + TILE * width;
            multiply((Product){queries, width, 1, (cells *)keys_across, TILE / LANES, weights, TILE, width, 0}, rows,
                     wide, half);
            multiply((Product){outputs_g, width, 1, (cells *)values_across, TILE / LANES, weights_g, TILE, width, 0},
                     rows, wide, half);
            for (long i = 0; i < rows; i++)
                weights_back(weights + i * TILE, weights_g + i * TILE,
                             back->kept[(sequence->row + begin + i) * heads->heads + head], along[i],
                             MIN(TILE, begin + i + 1 - t));
            if (half) {
                if (rows % 2) { /* the last pair of queries has only one */
                    memset(weights + rows * TILE, 0, 4 * TILE);
                    memset(weights_g + rows * TILE, 0, 4 * TILE);
                }
                for (long i = 0; i < rows; i += 2) {
                    pair_rows(weights + i * TILE, weights + (i + 1) * TILE, across + i / 2 * TILE, TILE);
                    pair_rows(weights_g + i * TILE, weights_g + (i + 1) * TILE, across_g + i / 2 * TILE, TILE);
                }
                round_row(weights_g, (uint16_t *)rounded_g, rows * TILE);
            }
            multiply((Product){rounded_g, TILE / per, 1, (cells *)keys_along, E / LANES, q_g, E,
                               (some + per - 1) / per, 1}, rows, E / LANES, half);
            multiply((Product){across, 1, TILE, (cells *)outputs_along, E / LANES, v_g + t * E, E, pairs, 1}, some,
                     E / LANES, half);
            multiply((Product){across_g, 1, TILE, (cells *)queries_along, E / LANES, k_g + t * E, E, pairs, 1}, some,
                     E / LANES, half);
        }
        for (long i = 0; i < rows; i++) {
            long row = sequence->row + begin + i;
            float turned[LARGEST], *found = q_g + i * E;
            if (back->cos) {
                rotate_head(found, back->cos + row * E, back->sin + row * E, back->scale, -1.0f, turned, E);
                found = turned;
            }
            void *to = at(back->qkv_g, row * heads->q_stride + head * E, half);
            if (half)
                round_row(found, to, E);
            else
                memcpy(to, found, 4 * (size_t)E);
        }
    }
}

/* Add up the gradients of a key and value over the query heads of a group and their chunks, in order; `step` is from
   head to head, `chunk` from chunk to chunk. */
static void add_heads(const float *from, long R, long step, long chunks, long chunk, long E, float *sum) {
    memset(sum, 0, 4 * (size_t)E);
    for (long r = 0; r < R; r++)
        for (long c = 0; c < chunks; c++)
            for (long e = 0; e < E; e++)
                sum[e] += from[r * step + c * chunk + e];
}

/* Gradients of queries, keys and values before their rotation (if `cos` is given), given those of the mixed values.
   Sequences lie in adjacent rows of queries, keys and values. `space` holds 2 x H x rows x E numbers, twice as many if
   a sequence is long, and 3 x TILE x E for each tile of keys and group. */
EXPORT void tinkex_attend_back(int threads, int half, const Heads *heads, const Sequence *sequences, long count,
                               const void *mixed, const Softmax *kept, const void *g, const float *cos,
                               const float *sin, float scale, void *qkv_g, float *space, long rows) {
    long H = heads->heads, G = heads->groups, E = heads->size, R = H / G, width = half ? E / 2 : E;
    long step = rows * E, chunk = H * step, most = 1, units = 0, tiles = 0;
    for (long s = 0; s < count; s++) {
        most = MAX(most, chunks_of(sequences[s].count));
        units += chunks_of(sequences[s].count) * H;
        tiles += (sequences[s].count + TILE - 1) / TILE;
    }
    float *k_g = space, *v_g = space + most * chunk;
    cell *packed = (cell *)(v_g + most * chunk);
    long group_size = tiles * TILE * 3 * width;
    Back back = {heads, g, mixed, kept, cos, sin, scale, qkv_g};
#pragma omp parallel num_threads(threads)
    {
        for (long s = 0, tile = 0; s < count; tile += (sequences[s++].count + TILE - 1) / TILE) {
            long T = sequences[s].count, own = (T + TILE - 1) / TILE;
#pragma omp for nowait
            for (long u = 0; u < own * G; u++) {
                long group = u / own, t = u % own * TILE, some = MIN(TILE, T - t);
                Source k = source_of(heads, sequences + s, heads->k, group, half);
                Source v = source_of(heads, sequences + s, heads->v, group, half);
                cell *to = packed + group * group_size + (tile * TILE + t) * 3 * width;
                pack_across(&k, t, some, width, to);
                pack_across(&v, t, some, width, to + TILE * width);
                pack_along(&k, t, some, E, to + 2 * TILE * width, half);
            }
        }
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (long u = 0; u < units; u++) {
            long s = 0, tile = 0, left = u;
            while (left >= chunks_of(sequences[s].count) * H) {
                left -= chunks_of(sequences[s].count) * H;
                tile += (sequences[s++].count + TILE - 1) / TILE;
            }
            const Sequence *sequence = sequences + s;
            long head = left % H, part = left / H, own = part * chunk + head * step + sequence->row * E;
            attend_back_unit(&back, sequence, head, chunk_begin(sequence->count, part),
                             chunk_begin(sequence->count, part + 1),
                             packed + head / R * group_size + tile * TILE * 3 * width, k_g + own, v_g + own, half);
        }
        for (long s = 0; s < count; s++) {
            long chunks = chunks_of(sequences[s].count), start = sequences[s].row;
#pragma omp for nowait
            for (long n = start; n < start + sequences[s].count; n++)
                for (long group = 0; group < G; group++) {
                    float key[LARGEST], value[LARGEST], turned[LARGEST], *found = key;
                    long from = group * R * step + n * E;
                    add_heads(k_g + from, R, step, chunks, chunk, E, key);
                    add_heads(v_g + from, R, step, chunks, chunk, E, value);
                    if (cos) {
                        rotate_head(key, cos + n * E, sin + n * E, 1.0f, -1.0f, turned, E);
                        found = turned;
                    }
                    void *to_key = at(qkv_g, n * heads->q_stride + (H + group) * E, half);
                    void *to_value = at(qkv_g, n * heads->q_stride + (H + G + group) * E, half);
                    if (half) {
                        round_row(found, to_key, E);
                        round_row(value, to_value, E);
                    } else {
                        memcpy(to_key, found, 4 * (size_t)E);
                        memcpy(to_value, value, 4 * (size_t)E);
                    }
                }
        }
    }
}
