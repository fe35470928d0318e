#include <immintrin.h>

#include <type_traits>

#include "quads_avx2.h"

namespace carryall {
namespace {

struct Vector {
  __m256 x, y;
  static constexpr int kTogether = 1, kQueries = 6;  // 12 sums, 2 operands and a query are 15 of 16 registers
  static constexpr int kGroups = 1;  // of scores that are computed side by side
  static constexpr int kStates = 1, kStatesOfOne = 2;  // of a pair: 8 sums, 2 states, 4 d, a decay and an operand are 16 registers

  static Vector all(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
  static Vector load(const float* a) { return {_mm256_loadu_ps(a), _mm256_loadu_ps(a + 8)}; }
  static void store(float* to, Vector a) {
    _mm256_storeu_ps(to, a.x);
    _mm256_storeu_ps(to + 8, a.y);
  }
  static Vector from_bfloat16(const uint16_t* a) { return {widened(a), widened(a + 8)}; }
  // Stores a rounded to bfloat16; returns what `from_bfloat16` reads.
  static Vector store_bfloat16(uint16_t* to, Vector a) {
    const __m256i x = halves(a.x), y = halves(a.y);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))};
  }
  static Vector from_float16(const uint16_t* a) {
    const auto* eight = reinterpret_cast<const __m128i*>(a);
    return {_mm256_cvtph_ps(_mm_loadu_si128(eight)), _mm256_cvtph_ps(_mm_loadu_si128(eight + 1))};
  }
  // 2^n of n + 1.5 * 2^23.
  static Vector power_of_2(Vector shifted) { return {power(shifted.x), power(shifted.y)}; }
  // a * 2^n.
  static Vector times_power_of_2(Vector a, Vector shifted) { return {raised(a.x, shifted.x), raised(a.y, shifted.y)}; }
  // x less the nearest integer, which is exact, and that integer plus 1.5 * 2^23 for `times_power_of_2`.
  static Vector fraction(Vector x, Vector* whole) {
    const __m256 shift = _mm256_set1_ps(kShift);
    *whole = {_mm256_add_ps(x.x, shift), _mm256_add_ps(x.y, shift)};
    return {_mm256_sub_ps(x.x, _mm256_sub_ps(whole->x, shift)), _mm256_sub_ps(x.y, _mm256_sub_ps(whole->y, shift))};
  }
  // The bits of a minus those of b.
  static Vector bits_less(Vector a, Vector b) { return {less(a.x, b.x), less(a.y, b.y)}; }
  // Lanes `half` apart change places.
  template <int half>
  static Vector exchanged(Vector a) {
    if constexpr (half == 8) return {a.y, a.x};
    if constexpr (half == 4) return {_mm256_permute2f128_ps(a.x, a.x, 1), _mm256_permute2f128_ps(a.y, a.y, 1)};
    constexpr int kPlaces = half == 2 ? 0x4e : 0xb1;
    return {_mm256_permute_ps(a.x, kPlaces), _mm256_permute_ps(a.y, kPlaces)};
  }
  float largest() const {
    const __m256 both = _mm256_max_ps(x, y);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }

 private:
  // Rounded to bfloat16 in the lower half, ties to even, as `to_bfloat16` does.
  static __m256i halves(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
  }
  static __m256 widened(const uint16_t* a) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static __m256 less(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  static __m256 raised(__m256 a, __m256 shifted) {
    const __m256i exponents = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponents));
  }
  static __m256 power(__m256 shifted) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000 - 127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
  }
};

inline Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.x, b.x), _mm256_add_ps(a.y, b.y)}; }
inline Vector subtract(Vector a, Vector b) { return {_mm256_sub_ps(a.x, b.x), _mm256_sub_ps(a.y, b.y)}; }
inline Vector multiply(Vector a, Vector b) { return {_mm256_mul_ps(a.x, b.x), _mm256_mul_ps(a.y, b.y)}; }
inline Vector divide(Vector a, Vector b) { return {_mm256_div_ps(a.x, b.x), _mm256_div_ps(a.y, b.y)}; }
inline Vector fused(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.x, b.x, c.x), _mm256_fmadd_ps(a.y, b.y, c.y)};
}
inline Vector maximum(Vector a, Vector b) { return {_mm256_max_ps(a.x, b.x), _mm256_max_ps(a.y, b.y)}; }
inline Vector minimum(Vector a, Vector b) { return {_mm256_min_ps(a.x, b.x), _mm256_min_ps(a.y, b.y)}; }
inline Vector zero_if_less(Vector a, Vector b, Vector y) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.x, b.x, _CMP_NLT_UQ), y.x),
          _mm256_and_ps(_mm256_cmp_ps(a.y, b.y, _CMP_NLT_UQ), y.y)};
}
inline __m256 only_eight(__m256 a, __m256i lane, int first, int last, float other) {
  const __m256i inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
  return _mm256_blendv_ps(_mm256_set1_ps(other), a, _mm256_castsi256_ps(inside));
}
inline Vector only_lanes(Vector a, int64_t first, int64_t last, float other) {
  const int begin = first < 0 ? 0 : first > 16 ? 16 : static_cast<int>(first);
  const int end = last < 0 ? 0 : last > 16 ? 16 : static_cast<int>(last);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {only_eight(a.x, lane, begin, end, other), only_eight(a.y, lane, begin - 8, end - 8, other)};
}

}  // namespace

const AttentionKernels kAvx2Attention = attention_kernels<Vector, OfRows<Vector, Avx2Quads<Vector>>>();

}  // namespace carryall
