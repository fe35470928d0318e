// Rounding floats to int8 with one scale. Included by sources of several instruction sets, so in an anonymous
// namespace.
#pragma once
#include <cstdint>
#include <cstring>

namespace carryall {
namespace {

constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest even integer
constexpr float kTiny = 1e-35f;  // 127 / kTiny is finite

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 64);  // a NaN stays one
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// How values of at most the magnitude `most` are rounded; the scale is 0 below kTiny, and NaN if one is not finite.
struct Rounding {
  float scale, inverse;
  bool zero;  // all values become 0
};

// As integers, magnitudes are ordered like the floats, and every NaN is larger than infinity.
inline int32_t largest_magnitude(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

inline Rounding rounding(int32_t largest) {
  const float most = float_of(static_cast<uint32_t>(largest));
  if (largest >= 0x7f800000) return {float_of(0x7fc00000u), 0.0f, true};
  if (most < kTiny) return {0.0f, 0.0f, true};
  return {most / 127.0f, 127.0f / most, false};
}

// Returns the sum of the rounded values.
inline int32_t round_block(const float* x, int64_t count, int64_t block, const Rounding& how, int8_t* values) {
  if (how.zero) {
    for (int64_t i = 0; i < block; i++) values[i] = 0;
    return 0;
  }
  int32_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t value = static_cast<int32_t>(bits_of(x[i] * how.inverse + kShift) - bits_of(kShift));
    values[i] = static_cast<int8_t>(value);
    total += value;
  }
  if (count < block) memset(values + count, 0, static_cast<size_t>(block - count));
  return total;
}

inline void quantize_block(const float* x, int64_t count, int64_t block, int8_t* values, float* scale, int32_t* sum) {
  const Rounding how = rounding(largest_magnitude(x, count));
  *scale = how.scale;
  *sum = round_block(x, count, block, how, values);
}

}  // namespace
}  // namespace carryall
