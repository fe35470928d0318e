// Products of 4 outputs a register with ARM's dot products of bytes. Included by one source per instruction set.
#pragma once
#include <arm_neon.h>

#include "cpu.h"
#include "gguf_products.h"

namespace carryall {
namespace {

struct Dotprod {
  using Int = int32x4_t;
  using Float = float32x4_t;
  static constexpr int kLanes = 4, kRows = 8, kByteOffset = 128;  // both operands are signed

  static Float load(const float* x) { return vld1q_f32(x); }
  static void store(float* y, Float x) { vst1q_f32(y, x); }
  static Float floats(float x) { return vdupq_n_f32(x); }
  static Float multiply(Float a, Float b) { return vmulq_f32(a, b); }
  static Float fused(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float converted(Int x) { return vcvtq_f32_s32(x); }
  static Int integers(int x) { return vdupq_n_s32(x); }
  static Int add(Int a, Int b) { return vaddq_s32(a, b); }
  static Int subtract(Int a, Int b) { return vsubq_s32(a, b); }
  static Int negative_product(Int a, int b) { return vmulq_n_s32(a, -b); }
  static Int product(Int a, Int b) { return vmulq_s32(a, b); }
  static Int loaded(const int32_t* x) { return vld1q_s32(x); }
  static Int widened(const uint8_t* x) {
    const int32_t wide[4] = {x[0], x[1], x[2], x[3]};
    return vld1q_s32(wide);
  }

  static int8x16_t four(const int8_t* x) {
    int32_t all;
    memcpy(&all, x, sizeof all);
    return vreinterpretq_s8_s32(vdupq_n_s32(all));
  }

  template <int kBits, int kCount, int kSums>
  static inline void accumulate(Int (&sums)[kCount][kSums], const uint8_t* lines, const int8_t* values,
                                int64_t row_step) {
    constexpr int kStep = kBits == 4 ? 8 : 4;  // inputs of a line
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += kStep, lines += kLine) {
      const uint8x16_t line = vld1q_u8(lines);
      const int s = k / 4 % kSums, t = (k / 4 + 1) % kSums;
      const uint8x16_t first = kBits == 4 ? vandq_u8(line, vdupq_n_u8(15)) : veorq_u8(line, vdupq_n_u8(128));
      const int8x16_t low = vreinterpretq_s8_u8(first), high = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
#pragma GCC unroll 16
      for (int m = 0; m < kCount; m++) {
        const int8_t* x = values + m * row_step + k;
        sums[m][s] = vdotq_s32(sums[m][s], low, four(x));
        if constexpr (kBits == 4) sums[m][t] = vdotq_s32(sums[m][t], high, four(x + 4));
      }
    }
  }
};

template <class Isa>
void multiply_neon(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                   int64_t first_tile, int64_t last_tile, Outputs y) {
  const auto chosen = w.halves() ? multiply<Stored<Isa>> : multiply<OneRegister<Isa>>;
  chosen(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace

}  // namespace carryall
