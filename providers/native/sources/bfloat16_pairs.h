// Floats as pairs of bfloat16, and the weights of the softmax, with AVX-512. In an anonymous namespace, see attention_avx512.h.
#pragma once
#include "attention_avx512.h"

namespace carryall {
namespace {

constexpr int64_t kTileFloats = 256;
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

// 2^x with an error of 8e-8 (1 + |x|) if `kExact`, else of 8e-5 and with half of a unit of bfloat16 added, which is the same number for all
// values of the polynomial: what is cut off behind it is rounded. 0 in lanes outside of the mask; keeps a NaN.
template <bool kExact>
CARRYALL_INLINE __m512 power_of_2(__m512 x, __mmask16 mask) {
  constexpr float kHalf = 0x1p-8f;
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(kExact ? 1.8775766751789032e-3f : 7.802452264047956e-2f);
  const auto next = [&](float coefficient) __attribute__((always_inline)) { p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(coefficient)); };
  if (kExact) {
    next(8.989340090521493e-3f), next(5.582631805327807e-2f), next(2.401536170443785e-1f);
    next(6.931530732001692e-1f), next(9.999999250635262e-1f);
  } else {
    next(2.2606715542748315e-1f), next(6.958335404947528e-1f), next(9.999252185627154e-1f + kHalf);
  }
  return _mm512_maskz_scalef_ps(mask, p, x);
}

// Stores 32 weights, high parts and, if `kLow`, low ones, element i beside element i + 16, and returns the sum of `total` and of what is
// stored, so that a query that sees one position has its value. Ties are rounded away from zero.
template <bool kLow>
CARRYALL_INLINE __m512 store_weights(__m512 x, __m512 y, __m512 total, uint8_t* high) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  const auto store = [&](__m512i a, __m512i b, uint8_t* to) __attribute__((always_inline)) {
    const __m512i pairs = paired(a, b);
    _mm512_store_si512(to, pairs);
    total = _mm512_dpbf16_ps(total, (__m512bh)pairs, ones);
  };
  if constexpr (kLow) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i a = _mm512_add_epi32(bits(x), half), b = _mm512_add_epi32(bits(y), half);
    store(a, b, high);
    const __m512 p = _mm512_sub_ps(x, upper(a)), q = _mm512_sub_ps(y, upper(b));
    store(_mm512_add_epi32(bits(p), half), _mm512_add_epi32(bits(q), half), high + kTileBytes);
  } else {
    store(bits(x), bits(y), high);
  }
  return total;
}

}  // namespace
}  // namespace carryall
