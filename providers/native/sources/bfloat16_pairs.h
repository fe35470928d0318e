// Floats as pairs of bfloat16, and the weights of the softmax, with AVX-512. In an anonymous namespace, see attention_avx512.h.
#pragma once
#include "attention_avx512.h"

namespace carryall {
namespace {

constexpr int64_t kTileBytes = 1024;  // 16 lines of 64 bytes: 16 rows, or 16 pairs of rows

inline __m512 upper(__m512i x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// The upper halves of two vectors, side by side.
inline __m512i paired(__m512i x, __m512i y) {
  const __m512i upper_of_x = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(y, 0x3333333333333333ull, x, upper_of_x);
}

inline __m512i low(__m512 x) { return rounded(_mm512_sub_ps(x, upper(rounded(x)))); }

// Stores 32 floats of a row of queries as high and, if `kLow`, low parts, element i beside element i + 16.
template <bool kLow>
inline void split_queries(__m512 x, __m512 y, uint8_t* high) {
  _mm512_store_si512(high, paired(rounded(x), rounded(y)));
  if (kLow) _mm512_store_si512(high + kTileBytes, paired(low(x), low(y)));
}

// The same of weights, with fewer operations: ties are rounded away from zero, and a NaN may become another number,
// which the sum of weights does not.
template <bool kLow>
inline void split_weights(__m512 x, __m512 y, uint8_t* high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32(bits(x), half), b = _mm512_add_epi32(bits(y), half);
  _mm512_store_si512(high, paired(a, b));
  if (!kLow) return;
  const __m512 p = _mm512_sub_ps(x, upper(a)), q = _mm512_sub_ps(y, upper(b));
  _mm512_store_si512(high + kTileBytes, paired(_mm512_add_epi32(bits(p), half), _mm512_add_epi32(bits(q), half)));
}

// e^x for x <= 0 with an error of 1e-7 (1 + |x|), 0 below -87 and in lanes outside of the mask; keeps a NaN.
inline __m512 falling_exponential(__m512 x, __mmask16 mask) {
  const __m512 log2e = _mm512_set1_ps(1.44269504f), shift = _mm512_set1_ps(12582912.0f);
  mask = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, log2e, shift), shift);
  const __m512 f = _mm512_fmsub_ps(x, log2e, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.326472731307149e-3f), f, _mm512_set1_ps(9.671512991189957e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550733581185341e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022242426872253e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931470036506653e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(mask, p, n);
}

}  // namespace
}  // namespace carryall
