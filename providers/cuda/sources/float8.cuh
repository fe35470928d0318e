// float8e4m3fn, as caches hold it (OCP, "8-bit Floating Point Specification"; P. Micikevicius et al., arXiv 2209.05433).
#pragma once
#include "types.cuh"

struct Float8 {
  unsigned char bits;
};

__device__ inline float to_float(Float8 value) {
  const unsigned magnitude = value.bits & 0x7f, sign = static_cast<unsigned>(value.bits >> 7) << 31;
  if (magnitude == 0x7f) return __uint_as_float(0x7fc00000u);
  if (magnitude >= 8) return __uint_as_float(sign | ((magnitude << 20) + (120u << 23)));
  const float small = static_cast<float>(magnitude) * 0.001953125f;  // steps of 2^-9
  return sign ? -small : small;
}

// Rounds to the nearest, ties to even; what is too large becomes the largest, 448.
template <>
__device__ inline Float8 from_float<Float8>(float value) {
  const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const unsigned char sign = static_cast<unsigned char>(bits >> 31 << 7);
  if (value != value) return {0x7f};
  if (magnitude >= 0x43e00000u) return {static_cast<unsigned char>(sign | 0x7e)};
  if (magnitude < 0x3c800000u)  // below 2^-6
    return {static_cast<unsigned char>(sign | static_cast<unsigned>(rintf(__uint_as_float(magnitude) * 512.0f)))};
  const unsigned rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
  const unsigned code = rounded - (120u << 3);
  return {static_cast<unsigned char>(sign | (code < 0x7e ? code : 0x7e))};
}
