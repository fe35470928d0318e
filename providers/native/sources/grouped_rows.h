// Products of few rows on AVX-512 VNNI with 4-bit weights in groups of two blocks of 32. Weights are bytes in units of their
// group's scale for a moment: a nibble times the multiple of its block, at most 225, is an unsigned byte, as the instruction
// takes it. What zero points subtract is one product of pairs: zero points times multiples, and sums of the row's values.
#pragma once
#include "products.h"
#include "unpacked.h"

namespace carryall {
namespace {

// One and two rows wait for memory, or take as long as with a scale for each block.
inline bool in_pairs(const Weights& w, int64_t rows) {
  return rows > 2 && w.bits == 4 && w.group == 64 && w.block == 32 && w.inputs % w.group == 0;
}

CARRYALL_INLINE __m512i columns_of(const uint8_t* bytes) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// Zero points times multiples of the two blocks of a group, as pairs of 16 bits for each column.
CARRYALL_INLINE __m512i zero_pairs(const Weights& w, const uint8_t* points, const uint8_t* multiples) {
  __m512i pair = _mm512_setzero_si512();
  for (int b = 1; b >= 0; b--) {
    const __m512i multiple = columns_of(multiples + b * kColumns);
    const bool stored = w.offsets == Offsets::zero_points;
    const __m512i zero = stored ? columns_of(points + b * kColumns) : _mm512_set1_epi32(8);
    pair = _mm512_or_si512(_mm512_slli_epi32(pair, 16), _mm512_mullo_epi16(zero, multiple));
  }
  return pair;
}

template <int kCount>
void multiply_pairs(const Part& part) {
  const Weights& w = *part.weights;
  const int64_t groups = part.shares, width = part.width;
  const auto valid = static_cast<__mmask16>((1 << part.columns) - 1);
  __m512 result[kCount];
  for (int m = 0; m < kCount; m++)
    result[m] = part.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(valid, part.bias);
  const uint8_t *lines = part.tile, *points = part.tile + w.points(), *multiples = part.tile + w.multiples();
  const float* scales = reinterpret_cast<const float*>(part.tile + w.group_scales());
  const int8_t* values = part.values;
  const __m512i mask = _mm512_set1_epi8(15), none = _mm512_setzero_si512();
  for (int64_t g = 0; g < groups; g++, points += 2 * kColumns, multiples += 2 * kColumns) {
    const __m512i zeros = zero_pairs(w, points, multiples);
    __m512i sums[kCount];
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const int32_t* s = part.sums + m * part.blocks + 2 * g;  // at most 32 * 127
      const uint32_t pair = static_cast<uint32_t>(-s[1]) << 16 | (static_cast<uint32_t>(-s[0]) & 0xffff);
      sums[m] = _mm512_dpwssd_epi32(none, zeros, _mm512_set1_epi32(static_cast<int32_t>(pair)));
    }
    for (int b = 0; b < 2; b++) {
      part.later.fetch(2 * g + b);
      const __m512i multiple = _mm512_and_si512(in_all_bytes(multiples + b * kColumns), _mm512_set1_epi16(255));
#pragma GCC unroll 4
      for (int k = 0; k < 32; k += 8, lines += kLine, values += 8) {
        const __m512i line = _mm512_loadu_si512(lines);
        const __m512i low = _mm512_mullo_epi16(_mm512_and_si512(line, mask), multiple);
        const __m512i high = _mm512_mullo_epi16(_mm512_and_si512(_mm512_srli_epi16(line, 4), mask), multiple);
#pragma GCC unroll 8
        for (int m = 0; m < kCount; m++) sums[m] = _mm512_dpbusd_epi32(sums[m], low, four(values + m * width));
#pragma GCC unroll 8
        for (int m = 0; m < kCount; m++) sums[m] = _mm512_dpbusd_epi32(sums[m], high, four(values + m * width + 4));
      }
    }
    const __m512 scale = _mm512_loadu_ps(scales + g * kColumns);
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[m]), scale);
      result[m] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(part.scales[m * groups + g]), result[m]);
    }
  }
  for (int m = 0; m < kCount; m++) _mm512_mask_storeu_ps(part.y + m * w.outputs, valid, result[m]);
}

// `multiply` of products.h over `multiply_pairs`.
struct Pairs {
  static constexpr int kRows = 8;
  template <int kBits, int kCount>
  static void run(const Part& part) {
    if constexpr (kBits == 4) multiply_pairs<kCount>(part);
  }
};

}  // namespace
}  // namespace carryall
