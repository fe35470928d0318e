// AVX2 without VNNI. maddubs adds two products of 16 bits with saturation, which no product here reaches:
// 4 bits: 8 sums of 2 * 15 * 127 = 30,480. 8 bits, as signed values: 2 * 128 * 127 = 32,512.
#include "avx2.h"
#include "cpu.h"

namespace carryall {
namespace {

struct Avx2 : Avx2Base {
  static constexpr int kByteOffset = 128;  // |w| and x with the sign of w: values of 8 bits become signed first

  static Int pairs(Int sixteen) { return _mm256_madd_epi16(sixteen, _mm256_set1_epi16(1)); }

  template <int kBits, int kCount, int kSums>
  static inline void accumulate(Int (&sums)[kCount][kSums], const uint8_t* lines, const int8_t* values,
                                int64_t width) {
    if constexpr (kBits == 4) {
      const Int first = bytes(lines), second = bytes(lines + kLine);
      const Int a = low(first), b = high(first), c = low(second), d = high(second);
#pragma GCC unroll 16
      for (int m = 0; m < kCount; m++) {
        const int8_t* x = values + m * width;
        const Int ab = _mm256_add_epi16(_mm256_maddubs_epi16(a, four(x)), _mm256_maddubs_epi16(b, four(x + 4)));
        const Int cd = _mm256_add_epi16(_mm256_maddubs_epi16(c, four(x + 8)), _mm256_maddubs_epi16(d, four(x + 12)));
        sums[m][0] = add(sums[m][0], pairs(_mm256_add_epi16(ab, cd)));
      }
    } else {
#pragma GCC unroll 4
      for (int k = 0; k < 16; k += 4, lines += kLine) {
        const Int line = _mm256_xor_si256(bytes(lines), _mm256_set1_epi8(-128));
        const Int magnitude = _mm256_abs_epi8(line);
        const int s = k / 4 % kSums;
#pragma GCC unroll 16
        for (int m = 0; m < kCount; m++) {
          const Int x = _mm256_sign_epi8(four(values + m * width + k), line);
          sums[m][s] = add(sums[m][s], pairs(_mm256_maddubs_epi16(magnitude, x)));
        }
      }
    }
  }
};

}  // namespace

const Kernels kAvx2 = {"avx2", has_avx2, quantize, multiply<Avx2>, &kAvx2Attention};

}  // namespace carryall
