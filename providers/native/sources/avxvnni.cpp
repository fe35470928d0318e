// AVX-VNNI: the products of bytes of AVX-512 VNNI on 256 bits, for processors without AVX-512. 8 outputs a register, 4 rows
// a pass.
#include <immintrin.h>

#include "cpu.h"
#include "products.h"

namespace carryall {
namespace {

struct AvxVnni {
  using Int = __m256i;
  using Float = __m256;
  static constexpr int kLanes = 8, kRows = 4, kByteOffset = 0;

  static Float load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* y, Float x) { _mm256_storeu_ps(y, x); }
  static Float floats(float x) { return _mm256_set1_ps(x); }
  static Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float fused(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float converted(Int x) { return _mm256_cvtepi32_ps(x); }
  static Int integers(int x) { return _mm256_set1_epi32(x); }
  static Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int subtract(Int a, Int b) { return _mm256_sub_epi32(a, b); }
  static Int negative_product(Int a, int b) { return _mm256_mullo_epi32(a, _mm256_set1_epi32(-b)); }
  static Int widened(const uint8_t* x) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  }
  static Int bytes(const uint8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static Int low(Int line) { return _mm256_and_si256(line, _mm256_set1_epi8(15)); }
  static Int high(Int line) { return _mm256_and_si256(_mm256_srli_epi16(line, 4), _mm256_set1_epi8(15)); }

  static Int four(const int8_t* x) {
    int32_t all;
    memcpy(&all, x, sizeof all);
    return _mm256_set1_epi32(all);
  }

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

const Kernels kAvxVnni = {"avxvnni", has_avxvnni, quantize, multiply<OneRegister<AvxVnni>>, &kAvx2Attention};

}  // namespace carryall
