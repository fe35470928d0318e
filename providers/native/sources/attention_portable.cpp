// Plain C++ for every processor; the reference for the other instruction sets, bit by bit.
#include <cmath>
#include <type_traits>

#include "gguf_blocks.h"
#include "quads.h"

namespace carryall {
namespace {

struct Vector {
  float x[16];
  static constexpr int kTogether = 1, kQueries = 2;
  static constexpr int kGroups = 1;  // of scores that are computed side by side
  static constexpr int kStates = 1, kStatesOfOne = 1;

  template <class Function>
  static Vector each(const Function& of) {
    Vector y;
    for (int i = 0; i < 16; i++) y.x[i] = of(i);
    return y;
  }
  static Vector all(float a) {
    return each([&](int) { return a; });
  }
  static Vector load(const float* a) {
    return each([&](int i) { return a[i]; });
  }
  static void store(float* y, const Vector& a) { memcpy(y, a.x, sizeof a.x); }
  static Vector from_bfloat16(const uint16_t* a) {
    return each([&](int i) { return float_of(static_cast<uint32_t>(a[i]) << 16); });
  }
  // Stores a rounded to bfloat16; returns what `from_bfloat16` reads.
  static Vector store_bfloat16(uint16_t* y, const Vector& a) {
    for (int i = 0; i < 16; i++) y[i] = to_bfloat16(a.x[i]);
    return from_bfloat16(y);
  }
  static Vector from_float16(const uint16_t* a) {
    return each([&](int i) { return float_of_float16(a[i]); });
  }
  // 2^n of n + 1.5 * 2^23.
  static Vector power_of_2(const Vector& shifted) {
    return each([&](int i) { return float_of((bits_of(shifted.x[i]) - (0x4b400000 - 127)) << 23); });
  }
  // a * 2^n.
  static Vector times_power_of_2(const Vector& a, const Vector& shifted) {
    return each([&](int i) { return float_of(bits_of(a.x[i]) + (bits_of(shifted.x[i]) << 23)); });
  }
  // x less the nearest integer, which is exact, and that integer plus 1.5 * 2^23 for `times_power_of_2`.
  static Vector fraction(const Vector& x, Vector* whole) {
    *whole = each([&](int i) { return x.x[i] + kShift; });
    return each([&](int i) { return x.x[i] - (whole->x[i] - kShift); });
  }
  // The bits of a minus those of b.
  static Vector bits_less(const Vector& a, const Vector& b) {
    return each([&](int i) { return float_of(bits_of(a.x[i]) - bits_of(b.x[i])); });
  }
  // Lanes `half` apart change places.
  template <int half>
  static Vector exchanged(const Vector& a) {
    return each([&](int i) { return a.x[i ^ half]; });
  }
  float largest() const {
    float most = x[0];
    for (float one : x) most = most > one ? most : one;
    return most;
  }
};

inline Vector add(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return a.x[i] + b.x[i]; });
}
inline Vector subtract(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return a.x[i] - b.x[i]; });
}
inline Vector multiply(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return a.x[i] * b.x[i]; });
}
inline Vector divide(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return a.x[i] / b.x[i]; });
}
inline Vector fused(const Vector& a, const Vector& b, const Vector& c) {
  return Vector::each([&](int i) { return std::fma(a.x[i], b.x[i], c.x[i]); });
}
inline Vector maximum(const Vector& a, const Vector& b) {  // b if one is NaN
  return Vector::each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
inline Vector minimum(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
inline Vector zero_if_less(const Vector& a, const Vector& b, const Vector& y) {
  return Vector::each([&](int i) { return a.x[i] < b.x[i] ? 0.0f : y.x[i]; });
}
inline Vector only_lanes(const Vector& a, int64_t first, int64_t last, float other) {
  return Vector::each([&](int i) { return i >= first && i < last ? a.x[i] : other; });
}

}  // namespace

const AttentionKernels kPortableAttention = attention_kernels<Vector, OfRows<Vector, PlainQuads<Vector>>>();

}  // namespace carryall
