/* Numbers of the kernels: bfloat16 and float32 in memory, float32 in registers. */

#ifndef TINKEX_NUMBERS_H
#define TINKEX_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")

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

INLINE void *at(const void *array, long i, int half) { return (char *)array + i * (half ? 2 : 4); }

/* exp(x) to 1e-7 relative; 0 below -87.3. A NaN stays one. */
INLINE float exponential(float x) {
    float small = x < -87.3f ? -87.3f : x;
    float clamped = small > 88.7f ? 88.7f : small;
    float shifted = clamped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the last bits hold the rounded number */
    float whole = shifted - 12582912.0f;
    float rest = clamped - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    float power = from_bits((to_bits(shifted) - 0x4b400000u + 127u) << 23);
    return x < -87.3f ? 0.0f : sum * power;
}

#endif
