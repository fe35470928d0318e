// AVX-VNNI: the products of bytes of AVX-512 VNNI on 256 bits, for processors without AVX-512.
#include "avx2.h"
#include "cpu.h"

namespace carryall {
namespace {

struct AvxVnni : Avx2Base {
  static constexpr int kByteOffset = 0;

  template <int kBits, int kCount, int kSums>
  static inline void accumulate(Int (&sums)[kCount][kSums], const uint8_t* lines, const int8_t* values,
                                int64_t width) {
    constexpr int kStep = kBits == 4 ? 8 : 4;  // inputs of a line
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += kStep, lines += kLine) {
      const Int line = bytes(lines);
      const Int first = kBits == 4 ? low(line) : line, second = high(line);
      const int s = k / 4 % kSums, t = (k / 4 + 1) % kSums;
#pragma GCC unroll 16
      for (int m = 0; m < kCount; m++) {
        const int8_t* x = values + m * width + k;
        sums[m][s] = _mm256_dpbusd_avx_epi32(sums[m][s], first, four(x));
        if constexpr (kBits == 4) sums[m][t] = _mm256_dpbusd_avx_epi32(sums[m][t], second, four(x + 4));
      }
    }
  }
};

}  // namespace

const Kernels kAvxVnni = {"avxvnni", has_avxvnni, quantize, multiply<AvxVnni>, &kAvx2Attention};

}  // namespace carryall
