// ARM products of matrices of bytes (FEAT_I8MM): 2 rows with 2 outputs over 8 inputs in one instruction, twice the products
// of a dot product. The last of an odd number of rows takes dot products.
#include "neon_dots.h"

namespace carryall {
namespace {

struct I8mm : Dotprod {
  // While products are summed, the registers of rows m and m + 1 hold both rows' outputs 0 and 1, and 2 and 3.
  template <int kBits, int kCount, int kSums>
  static inline void accumulate(Int (&sums)[kCount][kSums], const uint8_t* lines, const int8_t* values,
                                int64_t row_step) {
    constexpr int kStep = kBits == 4 ? 1 : 2;  // lines of 8 inputs
#pragma GCC unroll 2
    for (int k = 0; k < 16; k += 8, lines += kStep * kLine) {
      const uint8x16_t line = vld1q_u8(lines);
      const uint8x16_t first = kBits == 4 ? vandq_u8(line, vdupq_n_u8(15)) : veorq_u8(line, vdupq_n_u8(128));
      const uint8x16_t last = kBits == 4 ? vshrq_n_u8(line, 4) : veorq_u8(vld1q_u8(lines + (kStep - 1) * kLine), vdupq_n_u8(128));
      const int32x4_t low = vreinterpretq_s32_u8(first), high = vreinterpretq_s32_u8(last);
      const int8x16_t left = vreinterpretq_s8_s32(vzip1q_s32(low, high));   // 8 inputs of outputs 0 and 1
      const int8x16_t right = vreinterpretq_s8_s32(vzip2q_s32(low, high));  // of outputs 2 and 3
      const int s = k / 8 % kSums;
#pragma GCC unroll 8
      for (int m = 0; m + 1 < kCount; m += 2) {
        const int8_t* x = values + m * row_step + k;
        const int8x16_t rows = vcombine_s8(vld1_s8(x), vld1_s8(x + row_step));
        sums[m][s] = vmmlaq_s32(sums[m][s], rows, left);
        sums[m + 1][s] = vmmlaq_s32(sums[m + 1][s], rows, right);
      }
      if constexpr (kCount % 2 == 1) {
        const int8_t* x = values + (kCount - 1) * row_step + k;
        sums[kCount - 1][s] = vdotq_s32(sums[kCount - 1][s], vreinterpretq_s8_s32(low), four(x));
        sums[kCount - 1][s] = vdotq_s32(sums[kCount - 1][s], vreinterpretq_s8_s32(high), four(x + 4));
      }
    }
  }
};

// Swaps outputs 2 and 3 of the first row and outputs 0 and 1 of the second; twice changes nothing.
template <>
struct Pairing<I8mm> {
  template <int kCount, int kSums>
  static inline void turn(int32x4_t (&sums)[kCount][kSums]) {
    for (int m = 0; m + 1 < kCount; m += 2)
      for (int t = 0; t < kSums; t++) {
        const int64x2_t one = vreinterpretq_s64_s32(sums[m][t]), other = vreinterpretq_s64_s32(sums[m + 1][t]);
        sums[m][t] = vreinterpretq_s32_s64(vtrn1q_s64(one, other));
        sums[m + 1][t] = vreinterpretq_s32_s64(vtrn2q_s64(one, other));
      }
  }
};

}  // namespace

const Kernels kI8mm = {"i8mm", has_i8mm, quantize, multiply_neon<I8mm>, &kNeonAttention, round_portable, sweep_portable};

}  // namespace carryall
