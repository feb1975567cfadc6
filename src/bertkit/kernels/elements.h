// Element types in memory and their arithmetic in float32, for the loops in this folder.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float bits_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t float_as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return bits_as_float(static_cast<uint32_t>(value.bits) << 16); }

inline void narrow(float value, float &out) { out = value; }

// Rounds to nearest, ties to even, as torch does. NaNs from arithmetic stay NaNs.
inline void narrow(float value, BFloat16 &out) {
    const uint32_t bits = float_as_bits(value);
    out.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// 2^x for x between -126 and 127: a power of two times a polynomial on [-0.5, 0.5], fitted by least squares of the
// relative error at Chebyshev nodes. Accurate to 8e-8.
inline float power_of_two(float x) {
    const float whole = std::nearbyint(x);
    const float rest = x - whole;
    float poly = 1.32669706e-3f;
    poly = poly * rest + 9.67545994e-3f;
    poly = poly * rest + 5.55074252e-2f;
    poly = poly * rest + 2.40221217e-1f;
    poly = poly * rest + 6.93146944e-1f;
    poly = poly * rest + 1.00000012f;
    return poly * bits_as_float(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
}

constexpr float kLog2OfE = 1.44269504088896341f;

// exp(x) for x up to 88; below -87, exp(-87).
inline float fast_exp(float x) {
    x = x * kLog2OfE;
    return power_of_two(x < -125.5f ? -125.5f : x);
}

template <class T>
float largest(const T *row, int64_t count) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i) {
        const float value = widen(row[i]);
        top = value > top ? value : top;
    }
    return top;
}

}  // namespace
