/* Numbers of the kernels: bfloat16 and float32 in memory, float32 in registers. */

#ifndef TINKEX_NUMBERS_H
#define TINKEX_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* Numbers of a call below which waking other threads costs more than it saves. */
#define SMALL 16384

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float get(const void *array, long i, int half) {
    return half ? from_bits((uint32_t)((const uint16_t *)array)[i] << 16) : ((const float *)array)[i];
}

/* bfloat16, rounded to nearest even as PyTorch does. */
INLINE uint16_t rounded(float value) {
    uint32_t bits = to_bits(value);
    uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(value == value ? even : 0x7fc0);
}

INLINE void put(void *array, long i, float value, int half) {
    if (half)
        ((uint16_t *)array)[i] = rounded(value);
    else
        ((float *)array)[i] = value;
}

/* Many numbers at once: several times as fast where the processor has an instruction for it. */
INLINE void round_row(const float *from, uint16_t *to, long count) {
    long j = 0;
#if defined(__AVX512BF16__)
    for (; j + 16 <= count; j += 16)
        _mm256_storeu_si256((__m256i *)(to + j), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + j)));
#endif
#pragma omp simd
    for (long i = j; i < count; i++)
        to[i] = rounded(from[i]);
}

INLINE void *at(const void *array, long i, int half) { return (char *)array + i * (half ? 2 : 4); }

/* a * b + c, rounded once where the processor has an instruction for it. */
INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* exp(x) to 1e-7 relative; 0 below -87.3. A NaN stays one. */
INLINE float exponential(float x) {
    float small = x < -87.3f ? -87.3f : x;
    float clamped = small > 88.7f ? 88.7f : small;
    float shifted = fused(clamped, 1.44269504f, 12582912.0f); /* 1.5 * 2^23: the last bits hold the rounded number */
    float whole = shifted - 12582912.0f;
    float rest = fused(whole, 2.12194440e-4f, fused(whole, -0.693359375f, clamped));
    float sum = 1.9875691500e-4f;
    sum = fused(sum, rest, 1.3981999507e-3f);
    sum = fused(sum, rest, 8.3334519073e-3f);
    sum = fused(sum, rest, 4.1665795894e-2f);
    sum = fused(sum, rest, 1.6666665459e-1f);
    sum = fused(sum, rest, 5.0000001201e-1f);
    sum = fused(sum, rest * rest, rest) + 1.0f;
    float power = from_bits((to_bits(shifted) - 0x4b400000u + 127u) << 23);
    return x < -87.3f ? 0.0f : sum * power;
}

#endif
