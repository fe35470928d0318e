// NEON, which every arm64 processor has: 16 floats are four registers.
#include <arm_neon.h>

#include <type_traits>

#include "quads.h"

namespace carryall {
namespace {

struct Vector {
  float32x4_t x[4];
  static constexpr int kTogether = 1, kQueries = 6;  // 24 sums, 4 operands and a query are 29 of 32 registers
  static constexpr int kGroups = 1;  // of scores that are computed side by side
  static constexpr int kStates = 1, kStatesOfOne = 1;

  template <class Function>
  static Vector each(const Function& of) {
    return {{of(0), of(1), of(2), of(3)}};
  }
  static Vector all(float a) {
    return each([&](int) { return vdupq_n_f32(a); });
  }
  static Vector load(const float* a) {
    return each([&](int i) { return vld1q_f32(a + 4 * i); });
  }
  static void store(float* y, const Vector& a) {
    for (int i = 0; i < 4; i++) vst1q_f32(y + 4 * i, a.x[i]);
  }
  static Vector from_bfloat16(const uint16_t* a) {
    return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(a + 4 * i), 16)); });
  }
  // Stores a rounded to bfloat16; returns what `from_bfloat16` reads.
  static Vector store_bfloat16(uint16_t* y, const Vector& a) {
    return each([&](int i) {
      const uint32x4_t bits = vreinterpretq_u32_f32(a.x[i]), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
      const uint16x4_t halves = vshrn_n_u32(vbslq_u32(vceqq_f32(a.x[i], a.x[i]), up, quiet), 16);
      vst1_u16(y + 4 * i, halves);
      return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
    });
  }
  static Vector from_float16(const uint16_t* a) {
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(a + 4 * i))); });
  }
  // 2^n of n + 1.5 * 2^23.
  static Vector power_of_2(const Vector& shifted) {
    return each([&](int i) {
      const int32x4_t n = vsubq_s32(vreinterpretq_s32_f32(shifted.x[i]), vdupq_n_s32(0x4b400000 - 127));
      return vreinterpretq_f32_s32(vshlq_n_s32(n, 23));
    });
  }
  // a * 2^n.
  static Vector times_power_of_2(const Vector& a, const Vector& shifted) {
    return each([&](int i) {
      const int32x4_t exponents = vshlq_n_s32(vreinterpretq_s32_f32(shifted.x[i]), 23);
      return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.x[i]), exponents));
    });
  }
  // x less the nearest integer, which is exact, and that integer plus 1.5 * 2^23 for `times_power_of_2`.
  static Vector fraction(const Vector& x, Vector* whole) {
    const float32x4_t shift = vdupq_n_f32(kShift);
    *whole = each([&](int i) { return vaddq_f32(x.x[i], shift); });
    return each([&](int i) { return vsubq_f32(x.x[i], vsubq_f32(whole->x[i], shift)); });
  }
  // The bits of a minus those of b.
  static Vector bits_less(const Vector& a, const Vector& b) {
    return each([&](int i) {
      return vreinterpretq_f32_s32(vsubq_s32(vreinterpretq_s32_f32(a.x[i]), vreinterpretq_s32_f32(b.x[i])));
    });
  }
  // Lanes `half` apart change places.
  template <int half>
  static Vector exchanged(const Vector& a) {
    return each([&](int i) {
      if constexpr (half >= 4) return a.x[i ^ half / 4];
      return half == 2 ? vextq_f32(a.x[i], a.x[i], 2) : vrev64q_f32(a.x[i]);
    });
  }
  float largest() const {
    const float32x4_t four = greater(greater(x[0], x[1]), greater(x[2], x[3]));
    const float32x4_t two = greater(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(greater(two, vextq_f32(two, two, 1)), 0);
  }
  static float32x4_t greater(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
};

inline Vector add(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return vaddq_f32(a.x[i], b.x[i]); });
}
inline Vector subtract(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return vsubq_f32(a.x[i], b.x[i]); });
}
inline Vector multiply(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return vmulq_f32(a.x[i], b.x[i]); });
}
inline Vector divide(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return vdivq_f32(a.x[i], b.x[i]); });
}
inline Vector fused(const Vector& a, const Vector& b, const Vector& c) {
  return Vector::each([&](int i) { return vfmaq_f32(c.x[i], a.x[i], b.x[i]); });
}
inline Vector maximum(const Vector& a, const Vector& b) {  // b if one is NaN, as on x86
  return Vector::each([&](int i) { return Vector::greater(a.x[i], b.x[i]); });
}
inline Vector minimum(const Vector& a, const Vector& b) {
  return Vector::each([&](int i) { return vbslq_f32(vcltq_f32(a.x[i], b.x[i]), a.x[i], b.x[i]); });
}
inline Vector zero_if_less(const Vector& a, const Vector& b, const Vector& y) {
  return Vector::each([&](int i) { return vbslq_f32(vcltq_f32(a.x[i], b.x[i]), vdupq_n_f32(0.0f), y.x[i]); });
}
inline Vector only_lanes(const Vector& a, int64_t first, int64_t last, float other) {
  const int begin = first < 0 ? 0 : first > 16 ? 16 : static_cast<int>(first);
  const int end = last < 0 ? 0 : last > 16 ? 16 : static_cast<int>(last);
  const int32_t start[4] = {0, 1, 2, 3};
  return Vector::each([&](int i) {
    const int32x4_t lane = vaddq_s32(vld1q_s32(start), vdupq_n_s32(4 * i));
    const uint32x4_t inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(begin)), vcltq_s32(lane, vdupq_n_s32(end)));
    return vbslq_f32(inside, a.x[i], vdupq_n_f32(other));
  });
}

}  // namespace

const AttentionKernels kNeonAttention = attention_kernels<Vector, OfRows<Vector, PlainQuads<Vector>>>();

}  // namespace carryall
