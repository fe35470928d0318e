// AVX-512 VNNI: 16 outputs a register, 8 rows a pass: their integer sums, sums of a group and results are 24 of 32 registers.
#include <immintrin.h>

#include "avx512_units.h"
#include "cpu.h"

namespace carryall {
namespace {

struct Avx512 {
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kLanes = 16, kRows = 8, kByteOffset = 0;

  static Float load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* y, Float x) { _mm512_storeu_ps(y, x); }
  static Float floats(float x) { return _mm512_set1_ps(x); }
  static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fused(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float converted(Int x) { return _mm512_cvtepi32_ps(x); }
  static Int integers(int x) { return _mm512_set1_epi32(x); }
  static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int subtract(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  static Int negative_product(Int a, int b) { return _mm512_mullo_epi32(a, _mm512_set1_epi32(-b)); }
  static Int widened(const uint8_t* x) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }

  template <int kBits, int kCount, int kSums>
  static inline void accumulate(Int (&sums)[kCount][kSums], const uint8_t* lines, const int8_t* values,
                                int64_t width) {
    constexpr int kStep = kBits == 4 ? 8 : 4;  // inputs of a line
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += kStep, lines += kLine) {
      const Int line = _mm512_loadu_si512(lines);
      if constexpr (kBits == 4) {
        const Int mask = _mm512_set1_epi8(15);
        const Int low = _mm512_and_si512(line, mask), high = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
        const int s = k / 4 % kSums, t = (k / 4 + 1) % kSums;
#pragma GCC unroll 16
        for (int m = 0; m < kCount; m++) {
          sums[m][s] = _mm512_dpbusd_epi32(sums[m][s], low, four(values + m * width + k));
          sums[m][t] = _mm512_dpbusd_epi32(sums[m][t], high, four(values + m * width + k + 4));
        }
      } else {
        const int s = k / 4 % kSums;
#pragma GCC unroll 16
        for (int m = 0; m < kCount; m++)
          sums[m][s] = _mm512_dpbusd_epi32(sums[m][s], line, four(values + m * width + k));
      }
    }
  }
};

void multiply_avx512(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                     int64_t first_tile, int64_t last_tile, float* y) {
  if (unpacks(w, last_row - first_row)) multiply_units(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
  else multiply<OneRegister<Avx512>>(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace

const Kernels kAvx512Vnni = {"avx512vnni", has_avx512vnni, quantize, multiply_avx512, &kAvx512Attention};
const Kernels kAvx512Bf16 = {"avx512bf16", has_avx512bf16, quantize, multiply_avx512, &kAvx512Bf16Attention};

}  // namespace carryall
