// Rounding rows to int8 with AVX-512 VNNI: scales of 64 inputs four at a time, others one by one. Included by one source, in an
// anonymous namespace.
#pragma once
#include "avx512.h"
#include "kernels.h"
#include "quantize_block.h"

namespace carryall {
namespace {

// The results of `combine` over the elements of each quarter of four vectors, those of a quarter side by side.
template <class Combine>
CARRYALL_INLINE __m512i side_by_side(const __m512i* x, const Combine& combine) {
  const __m512i a = combine(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
  const __m512i b = combine(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
  return combine(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// As `rounding`, of four scales; bit s of `zero` says that the values of scale s become 0.
struct FourRoundings {
  __m128 scales, inverses;
  uint32_t zero;
};

CARRYALL_INLINE FourRoundings four_roundings(__m128i largest) {
  const __m128 most = _mm_castsi128_ps(largest), all = _mm_set1_ps(127.0f);
  const __mmask8 wrong = _mm_cmpge_epi32_mask(largest, _mm_set1_epi32(0x7f800000));
  const __mmask8 zero = wrong | _mm_cmp_ps_mask(most, _mm_set1_ps(kTiny), _CMP_LT_OQ), some = ~zero & 15;
  const __m128 nan = _mm_castsi128_ps(_mm_set1_epi32(0x7fc00000));
  return {_mm_mask_mov_ps(_mm_maskz_div_ps(some, most, all), wrong, nan), _mm_maskz_div_ps(some, all, most), zero};
}

// 64 rounded floats as bytes.
CARRYALL_INLINE __m512i rounded_bytes(const float* x, __m512 inverse) {
  const __m512 shift = _mm512_set1_ps(kShift);
  __m512i v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512 shifted = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), inverse), shift);
    v[i] = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(shift));
  }
  const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}

// Rounds the inputs of scales [first, first + 4), kBlocks blocks each.
template <int kBlocks>
void quantize_four(const float* x, Rows rows, int64_t row, int64_t first) {
  constexpr int kInputs = 64;
  x += kInputs * first;
  __m512i found[4];
#pragma GCC unroll 4
  for (int s = 0; s < 4; s++) {
    found[s] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < kInputs; i += 16) {
      const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(x + kInputs * s + i), _mm512_set1_epi32(0x7fffffff));
      found[s] = _mm512_max_epi32(found[s], magnitude);
    }
  }
  const __m512i lanes = side_by_side(found, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
  const __m256i halves = _mm256_max_epi32(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
  const FourRoundings how = four_roundings(_mm_max_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  float inverses[4];
  _mm_storeu_ps(inverses, how.inverses);
#pragma GCC unroll 4
  for (int s = 0; s < 4; s++) {
    const __mmask64 kept = (how.zero >> s & 1) != 0 ? 0 : ~__mmask64{0};
    const __m512i bytes = _mm512_maskz_mov_epi8(kept, rounded_bytes(x + kInputs * s, _mm512_set1_ps(inverses[s])));
    _mm512_storeu_si512(rows.values + row * rows.step + kInputs * (first + s), bytes);
    found[s] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
  }
  const __m512i sums = side_by_side(found, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
  const __m128i front = _mm_add_epi32(_mm512_castsi512_si128(sums), _mm512_extracti32x4_epi32(sums, 1));
  const __m128i back = _mm_add_epi32(_mm512_extracti32x4_epi32(sums, 2), _mm512_extracti32x4_epi32(sums, 3));
  const __m128i total = _mm_add_epi32(front, back);
  int32_t* to = rows.sums + row * rows.blocks + kBlocks * first;
  if constexpr (kBlocks == 4) {  // element 4 q + s of `sums` is that of quarter q of scale s
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, sums));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), kBlocks == 1 ? total : _mm_unpacklo_epi32(front, back));
    if (kBlocks == 2) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4), _mm_unpackhi_epi32(front, back));
  }
  _mm_storeu_ps(rows.scales + row * rows.shares + first, how.scales);
  const __m128i starts = _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(total, 7));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rows.starts + row * rows.shares + first), starts);
}

// Rounds whole blocks of 16 kVectors inputs from a scale on; kVectors known, so that loops are unrolled.
template <int kVectors>
void quantize_blocks(const float* x, Rows rows, int64_t row, int64_t first_scale) {
  int8_t* values = rows.values + row * rows.step;
  int32_t* sums = rows.sums + row * rows.blocks;
  const __m512 shift = _mm512_set1_ps(kShift);
  for (int64_t s = first_scale; s < rows.shares; s++) {
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
  if (inputs != rows.width) return quantize(x, inputs, block, rows, row);
  int64_t s = 0;
  if (block * rows.share == 64)
    for (; s + 4 <= inputs / 64; s += 4)
      block == 16 ? quantize_four<4>(x, rows, row, s) : block == 32 ? quantize_four<2>(x, rows, row, s) : quantize_four<1>(x, rows, row, s);
  if (block == 16) quantize_blocks<1>(x, rows, row, s);
  else if (block == 32) quantize_blocks<2>(x, rows, row, s);
  else if (block == 64) quantize_blocks<4>(x, rows, row, s);
  else if (block == 128) quantize_blocks<8>(x, rows, row, s);
  else if (block == 256) quantize_blocks<16>(x, rows, row, s);
  else quantize(x, inputs, block, rows, row);
}

}  // namespace
}  // namespace carryall
