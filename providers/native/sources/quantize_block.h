// Rounding floats to int8 with one scale. Included by sources of several instruction sets, so in an anonymous
// namespace.
#pragma once
#include <cstdint>
#include <cstring>

namespace carryall {
namespace {

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

inline void quantize_block(const float* x, int64_t count, int64_t block, int8_t* values, float* scale, int32_t* sum) {
  // As integers, magnitudes are ordered like the floats, and every NaN is larger than infinity.
  int32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float most = float_of(static_cast<uint32_t>(largest));
  const bool finite = largest < 0x7f800000;
  *scale = !finite ? float_of(0x7fc00000u) : most < kTiny ? 0.0f : most / 127.0f;
  *sum = 0;
  if (!finite || most < kTiny) {
    memset(values, 0, static_cast<size_t>(block));
    return;
  }
  const float inverse = 127.0f / most;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest even integer
  int32_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t value = static_cast<int32_t>(bits_of(x[i] * inverse + shift) - bits_of(shift));
    values[i] = static_cast<int8_t>(value);
    total += value;
  }
  memset(values + count, 0, static_cast<size_t>(block - count));
  *sum = total;
}

}  // namespace
}  // namespace carryall
