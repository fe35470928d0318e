// The integers by which blocks of K-quants multiply scales and minima, for the 16 columns of a tile. Included by the products on
// AVX2 and on AVX-512.
#pragma once
#include <immintrin.h>

#include "layout.h"

namespace carryall {
namespace {

CARRYALL_INLINE __m128i columns(const uint8_t* x) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)); }

// The scales and minima of 6 bits of blocks 2 p and 2 p + 1 of a stretch of Q4_K or Q5_K, as bytes. Shifts of 16 bits move bits
// between bytes, which the masks remove.
struct Sixes {
  __m128i scales[2], minima[2];

  CARRYALL_INLINE Sixes(const uint8_t* factors, int64_t p) {
    const __m128i low = _mm_set1_epi8(15), high = _mm_set1_epi8(48);
    const __m128i first = columns(factors + 2 * p * kColumns), second = columns(factors + (2 * p + 1) * kColumns);
    const __m128i upper = columns(factors + (8 + p) * kColumns);
    scales[0] = _mm_or_si128(_mm_and_si128(first, low), _mm_and_si128(_mm_slli_epi16(upper, 4), high));
    scales[1] = _mm_or_si128(_mm_and_si128(second, low), _mm_and_si128(upper, high));
    minima[0] = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(first, 4), low), _mm_and_si128(_mm_slli_epi16(upper, 2), high));
    minima[1] = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(second, 4), low), _mm_and_si128(_mm_srli_epi16(upper, 2), high));
  }
};

// The scales and minima of four blocks of 16 inputs, those of 64 inputs `p` of a stretch of Q2_K, Q3_K or Q6_K.
template <int kBits>
struct Fours {
  __m128i scales[4], minima[4];

  CARRYALL_INLINE Fours(const uint8_t* halves, int64_t p) {
    if constexpr (kBits == 3) {
      const Sixes sixes(halves + 2 * kColumns, p);
      const __m128i middle = _mm_set1_epi8(32);
      for (int j = 0; j < 4; j++) scales[j] = _mm_sub_epi8(j % 2 == 0 ? sixes.scales[j / 2] : sixes.minima[j / 2], middle);
      return;
    }
    const __m128i low = _mm_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
      scales[j] = columns(halves + ((kBits == 2 ? 4 : 2) + 4 * p + j) * kColumns);
      if (kBits == 6) continue;
      minima[j] = _mm_and_si128(_mm_srli_epi16(scales[j], 4), low);
      scales[j] = _mm_and_si128(scales[j], low);
    }
  }
};

}  // namespace
}  // namespace carryall
