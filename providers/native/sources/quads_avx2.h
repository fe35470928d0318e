// Products of quads with AVX2: bytes of the cache as 16-bit integers, 4 columns by a quad at a time. Included by
// attention_avx2.cpp, in an anonymous namespace.
#pragma once
#include <immintrin.h>

#include "attention_quads.h"

namespace carryall {
namespace {

template <class V>
struct Avx2Quads {
  static constexpr float kRound = kShift;
  static constexpr int kTogether = 3, kColumns = 1, kByteColumns = 0;  // 12 sums, 3 rows and a tile are 16 registers

  static void store(const V& x, uint8_t* row, int64_t first) {
    const __m256i none = _mm256_castps_si256(_mm256_set1_ps(kShift));
    const __m256i packed = _mm256_packs_epi32(_mm256_sub_epi32(_mm256_castps_si256(x.x), none),
                                              _mm256_sub_epi32(_mm256_castps_si256(x.y), none));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 2 * first), _mm256_permute4x64_epi64(packed, 0xd8));
  }

  template <bool kFetch, int kRows, int kWidth, class Operand, class Later>
  static void multiply(const Sixteens& a, int64_t first, const Operand& b, const Later& later, Range steps, float* y,
                       int64_t y_step) {
    __m256i sums[kRows][4];  // two for each of 4 columns
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) sums[m][v] = _mm256_setzero_si256();
    for (int64_t k = steps.first; k < steps.last; k++) {
      const uint8_t* tile = b(first, k);
      const uint8_t* next = kFetch ? later(first, k) : nullptr;
      for (int64_t quad = 0; quad < kQuad; quad++, tile += 64) {
        if (kFetch) fetch(next + 64 * quad);
        __m256i rows[kRows];
#pragma GCC unroll 8
        for (int m = 0; m < kRows; m++) {
          int64_t all;
          memcpy(&all, a.bytes + m * a.step + 32 * k + 8 * quad, sizeof all);
          rows[m] = _mm256_set1_epi64x(all);
        }
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
          const __m256i columns = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + 16 * v)));
#pragma GCC unroll 8
          for (int m = 0; m < kRows; m++)
            sums[m][v] = _mm256_add_epi32(sums[m][v], _mm256_madd_epi16(columns, rows[m]));
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++) {
      const __m256i offset = _mm256_set1_epi32(a.offsets[m]);
      const __m256 scale = _mm256_set1_ps(a.scales[m]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const __m256i pairs = _mm256_hadd_epi32(sums[m][2 * half], sums[m][2 * half + 1]);
        const __m256i sum = _mm256_add_epi32(_mm256_permute4x64_epi64(pairs, 0xd8), offset);
        const __m256 found = _mm256_cvtepi32_ps(sum);
        _mm256_storeu_ps(y + m * y_step + 16 * first + 8 * half, Operand::kScaled ? _mm256_mul_ps(found, scale) : found);
      }
    }
  }
};

}  // namespace
}  // namespace carryall
