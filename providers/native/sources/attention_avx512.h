// Vectors of 16 floats in AVX-512. Included by one source per kernel, so in an anonymous namespace.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace carryall {
namespace {

inline __m512i bits(__m512 x) { return _mm512_castps_si512(x); }

// Rounded to bfloat16 in the upper half, ties to even, as `to_bfloat16` does.
inline __m512i rounded(__m512 x) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits(x), 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits(x), _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits(x), _mm512_set1_epi32(0x400000));
  return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
}

struct Vector {
  __m512 x;
  static constexpr int kTogether = 4, kQueries = 6;  // 24 sums, 4 operands and a query are 29 of 32 registers
  static constexpr int kGroups = 4;  // of scores that are computed side by side
  static constexpr int kStates = 4, kStatesOfOne = 4;  // of a pair: 16 sums, 4 states, 8 d, a decay and 3 operands are 32 registers

  static Vector all(float a) { return {_mm512_set1_ps(a)}; }
  static Vector load(const float* a) { return {_mm512_loadu_ps(a)}; }
  static void store(float* y, Vector a) { _mm512_storeu_ps(y, a.x); }
  static Vector from_bfloat16(const uint16_t* a) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  // Stores a rounded to bfloat16; returns what `from_bfloat16` reads.
  static Vector store_bfloat16(uint16_t* y, Vector a) {
    const __m512i halves = _mm512_srli_epi32(rounded(a.x), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_cvtepi32_epi16(halves));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(halves, 16))};
  }
  static Vector from_float16(const uint16_t* a) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)))};
  }
  // 2^n of n + 1.5 * 2^23.
  static Vector power_of_2(Vector shifted) {
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted.x), _mm512_set1_epi32(0x4b400000 - 127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
  }
  static Vector times_power_of_2(Vector a, Vector whole) { return {_mm512_scalef_ps(a.x, whole.x)}; }
  // x less the nearest integer, which is exact, and that integer for `times_power_of_2`.
  static Vector fraction(Vector x, Vector* whole) {
    const Vector f = {_mm512_reduce_ps(x.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    *whole = {_mm512_sub_ps(x.x, f.x)};
    return f;
  }
  // The bits of a minus those of b.
  static Vector bits_less(Vector a, Vector b) {
    return {_mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(a.x), _mm512_castps_si512(b.x)))};
  }
  // Lanes `half` apart change places.
  template <int half>
  static Vector exchanged(Vector a) {
    constexpr int kPlaces = half == 8 || half == 2 ? 0x4e : 0xb1;
    if constexpr (half >= 4) return {_mm512_shuffle_f32x4(a.x, a.x, kPlaces)};
    return {_mm512_permute_ps(a.x, kPlaces)};
  }
  float largest() const { return _mm512_reduce_max_ps(x); }
};

inline Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Vector subtract(Vector a, Vector b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Vector multiply(Vector a, Vector b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vector divide(Vector a, Vector b) { return {_mm512_div_ps(a.x, b.x)}; }
inline Vector fused(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline Vector maximum(Vector a, Vector b) { return {_mm512_max_ps(a.x, b.x)}; }  // b if one is NaN
inline Vector minimum(Vector a, Vector b) { return {_mm512_min_ps(a.x, b.x)}; }
inline Vector zero_if_less(Vector a, Vector b, Vector y) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.x, b.x, _CMP_NLT_UQ), y.x)};
}
inline Vector only_lanes(Vector a, int64_t first, int64_t last, float other) {
  const uint32_t below = first <= 0 ? 0 : first >= 16 ? 0xffff : (1u << first) - 1;
  const uint32_t end = last <= 0 ? 0 : last >= 16 ? 0xffff : (1u << last) - 1;
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(end & ~below), a.x)};
}

}  // namespace
}  // namespace carryall
