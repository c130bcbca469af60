/* Transposing squares of cells of 4 bytes in registers: sixteen by sixteen with AVX-512, eight by eight with AVX2. */

#ifndef TINKEX_TRANSPOSE_H
#define TINKEX_TRANSPOSE_H

#include "numbers.h"
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
INLINE void transpose(__m512i *r) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
#endif

#if defined(__AVX2__)
INLINE void transpose_8(__m256i *r) {
    __m256i t[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++)
        r[i] = t[i];
}
#endif

/* A square as wide as the registers of this processor: so many of these, LANES of `lanes.h`. */
#if defined(__AVX512F__)
#define HAS_SQUARES
typedef __m512i square;
INLINE void transpose_square(square *r) { transpose(r); }
#elif defined(__AVX2__) && defined(__FMA__)
#define HAS_SQUARES
typedef __m256i square;
INLINE void transpose_square(square *r) { transpose_8(r); }
#endif

#ifdef HAS_SQUARES
INLINE square load_side(const void *from) {
    square side;
    memcpy(&side, from, sizeof side);
    return side;
}
#endif

#endif
