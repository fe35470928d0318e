// AVX-512 VNNI: 16 outputs a register, 8 rows a pass: their integer sums, sums of a group and results are 24 of 32 registers.
#include <immintrin.h>

#include "avx512_units.h"
#include "cpu.h"
#include "grouped_rows.h"

namespace carryall {
namespace {

using Int = __m512i;

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

// `quantize` with whole blocks of 16 kVectors inputs; kVectors known, so that loops are unrolled.
template <int kVectors>
void quantize_blocks(const float* x, Rows rows, int64_t row) {
  int8_t* values = rows.values + row * rows.width;
  int32_t* sums = rows.sums + row * rows.blocks;
  const __m512 shift = _mm512_set1_ps(kShift);
  for (int64_t s = 0; s < rows.shares; s++) {
    const int64_t first = s * rows.share, end = first + rows.share < rows.blocks ? first + rows.share : rows.blocks;
    Int largest = _mm512_setzero_si512();
    for (int64_t i = first * kVectors; i < end * kVectors; i++) {
      const Int magnitude = _mm512_and_si512(_mm512_loadu_si512(x + 16 * i), _mm512_set1_epi32(0x7fffffff));
      largest = _mm512_max_epi32(largest, magnitude);
    }
    const Rounding how = rounding(_mm512_reduce_max_epi32(largest));
    const __mmask16 rounded = how.zero ? 0 : 0xffff;
    const __m512 inverse = _mm512_set1_ps(how.inverse);
    int32_t total = 0;
    for (int64_t b = first; b < end; b++) {
      Int sum = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int64_t i = b * kVectors; i < (b + 1) * kVectors; i++) {
        const __m512 shifted = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), inverse), shift);
        const Int value = _mm512_maskz_sub_epi32(rounded, _mm512_castps_si512(shifted), _mm512_castps_si512(shift));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16 * i), _mm512_cvtepi32_epi8(value));
        sum = _mm512_add_epi32(sum, value);
      }
      total += sums[b] = _mm512_reduce_add_epi32(sum);
    }
    rows.scales[row * rows.shares + s] = how.scale;
    rows.starts[row * rows.shares + s] = -128 * total;
  }
}

void quantize_avx512(const float* x, int64_t inputs, int64_t block, Rows rows, int64_t row) {
  if (inputs == rows.width && block == 32) quantize_blocks<2>(x, rows, row);
  else if (inputs == rows.width && block == 64) quantize_blocks<4>(x, rows, row);
  else if (inputs == rows.width && block == 128) quantize_blocks<8>(x, rows, row);
  else quantize(x, inputs, block, rows, row);
}

void multiply_avx512(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                     int64_t first_tile, int64_t last_tile, float* y) {
  const int64_t count = last_row - first_row;
  const auto chosen = in_units(w, count) ? multiply_units : in_pairs(w, count) ? multiply<Pairs> : multiply<OneRegister<Avx512>>;
  chosen(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace

const Kernels kAvx512Vnni = {"avx512vnni", has_avx512vnni, quantize_avx512, multiply_avx512, &kAvx512Attention};
const Kernels kAvx512Bf16 = {"avx512bf16", has_avx512bf16, quantize_avx512, multiply_avx512, &kAvx512Bf16Attention};

}  // namespace carryall
