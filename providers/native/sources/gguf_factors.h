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

}  // namespace
}  // namespace carryall
