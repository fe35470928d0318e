// What the products on AVX2 share. Both halves of a tile are computed together, so that activations are read once for its 16
// outputs. Included by avx2.cpp.
// maddubs multiplies unsigned by signed bytes and adds two products in 16 bits with saturation, which none here reaches: the
// products of 32 inputs add up, 16 of them in a sum: 16 * 15 * 127 = 30,480.
#pragma once
#include <immintrin.h>

#include "gguf_factors.h"
#include "products.h"

namespace carryall {
namespace {

using Int = __m256i;
using Float = __m256;
constexpr int kHalves = 2, kLanes = 8, kHalf = kLine / kHalves;

// Written out, because compilers that reorder integer sums make all products first and run out of registers.
inline void add(Int& sum, Int x) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }
inline void add_pairs(Int& sum, Int x) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x)); }

inline Int bytes(const uint8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const Int*>(x)); }
inline Int widened(const uint8_t* x) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
}
inline Int four(const int8_t* x) {
  int32_t all;
  memcpy(&all, x, sizeof all);
  return _mm256_set1_epi32(all);
}

// Bytes of two blocks as pairs of 16 bits, for the columns of half `h`.
CARRYALL_INLINE Int pairs_of(int h, __m128i first, __m128i second) {
  return _mm256_cvtepu8_epi16(h == 0 ? _mm_unpacklo_epi8(first, second) : _mm_unpackhi_epi8(first, second));
}
CARRYALL_INLINE Int signed_pairs_of(int h, __m128i first, __m128i second) {
  return _mm256_cvtepi8_epi16(h == 0 ? _mm_unpacklo_epi8(first, second) : _mm_unpackhi_epi8(first, second));
}

// The sums of a row's two blocks, at most 32 * 127 each, as a pair of 16 bits in each lane.
CARRYALL_INLINE Int pair_of(const int32_t* sums) {
  int64_t both;
  memcpy(&both, sums, sizeof both);
  return _mm256_shuffle_epi8(_mm256_set1_epi64x(both), _mm256_set1_epi64x(0x0504010005040100));
}

// Sums of 16 bits over the products of `kInputs` inputs with 4 bits, two sums an output.
template <int kInputs, int kCount>
CARRYALL_INLINE void sum_pairs(Int (&pairs)[kCount][kHalves], const uint8_t* lines, const Starts<kCount>& rows) {
  const Int mask = _mm256_set1_epi8(15);
#pragma GCC unroll 8
  for (int k = 0; k < kInputs; k += 4) {
    Int nibbles[kHalves];
    for (int h = 0; h < kHalves; h++) {
      const Int line = bytes(lines + k / 8 * kLine + h * kHalf);
      nibbles[h] = _mm256_and_si256(k % 8 == 0 ? line : _mm256_srli_epi16(line, 4), mask);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const Int x = four(rows.of[m] + k);
      for (int h = 0; h < kHalves; h++) {
        const Int product = _mm256_maddubs_epi16(nibbles[h], x);
        if (k == 0) pairs[m][h] = product;
        else add_pairs(pairs[m][h], product);
      }
    }
  }
}

template <int kCount>
using Results = Float[kCount][kHalves];

template <int kCount>
CARRYALL_INLINE void begin(Results<kCount>& results, const Part& part) {
  float bias[kColumns] = {};
  if (part.bias != nullptr) memcpy(bias, part.bias, sizeof(float) * static_cast<size_t>(part.columns));
  for (int m = 0; m < kCount; m++) {
    __builtin_prefetch(part.y.at(m, kColumns), 1, 2);  // the next tile's
    for (int h = 0; h < kHalves; h++) results[m][h] = _mm256_loadu_ps(bias + kLanes * h);
  }
}

template <int kCount>
CARRYALL_INLINE void store(const Results<kCount>& results, const Part& part) {
  for (int m = 0; m < kCount; m++) {
    float *y = part.y.at(m, 0), some[kColumns];
    float* to = part.columns == kColumns ? y : some;
    for (int h = 0; h < kHalves; h++) _mm256_storeu_ps(to + kLanes * h, results[m][h]);
    if (to == some) memcpy(y, some, sizeof(float) * static_cast<size_t>(part.columns));
  }
}

}  // namespace
}  // namespace carryall
