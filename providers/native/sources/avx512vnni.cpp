// AVX-512 VNNI: 16 outputs a register, 8 rows a pass: their integer sums, sums of a group and results are 24 of 32 registers.
#include "avx512.h"
#include "byte_products.h"
#include "cpu.h"
#include "grouped_rows.h"
#include "unit_rows.h"

namespace carryall {
namespace {

// `quantize` with whole blocks of 16 kVectors inputs; kVectors known, so that loops are unrolled.
template <int kVectors>
void quantize_blocks(const float* x, Rows rows, int64_t row) {
  int8_t* values = rows.values + row * rows.width;
  int32_t* sums = rows.sums + row * rows.blocks;
  const __m512 shift = _mm512_set1_ps(kShift);
  for (int64_t s = 0; s < rows.shares; s++) {
    const int64_t first = s * rows.share, end = first + rows.share < rows.blocks ? first + rows.share : rows.blocks;
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = first * kVectors; i < end * kVectors; i++) {
      const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(x + 16 * i), _mm512_set1_epi32(0x7fffffff));
      largest = _mm512_max_epi32(largest, magnitude);
    }
    const Rounding how = rounding(_mm512_reduce_max_epi32(largest));
    const __mmask16 rounded = how.zero ? 0 : 0xffff;
    const __m512 inverse = _mm512_set1_ps(how.inverse);
    int32_t total = 0;
    for (int64_t b = first; b < end; b++) {
      __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int64_t i = b * kVectors; i < (b + 1) * kVectors; i++) {
        const __m512 shifted = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), inverse), shift);
        const __m512i value = _mm512_maskz_sub_epi32(rounded, _mm512_castps_si512(shifted), _mm512_castps_si512(shift));
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
                     int64_t first_tile, int64_t last_tile, Outputs y) {
  const int64_t count = last_row - first_row;  // one and two wait for memory, or take as long with a scale for each block
  const auto chosen = in_units(w, count) ? multiply_units<Avx512> : count > 2 && in_pairs(w) ? multiply<Pairs<Avx512>> : multiply<OneRegister<ByteProducts<Avx512>>>;
  chosen(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace

const Kernels kAvx512Vnni = {"avx512vnni", has_avx512vnni, quantize_avx512, multiply_avx512, &kAvx512Attention};
const Kernels kAvx512Bf16 = {"avx512bf16", has_avx512bf16, quantize_avx512, multiply_avx512, &kAvx512Bf16Attention};

}  // namespace carryall
