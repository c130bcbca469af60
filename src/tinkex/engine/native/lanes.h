/* As many float32 numbers as a register of this processor holds. */

#ifndef TINKEX_LANES_H
#define TINKEX_LANES_H

#include "numbers.h"
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));

INLINE lanes load(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE lanes multiplied(lanes sum, float a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (lanes)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

#endif
