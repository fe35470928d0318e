// Products of quads with AVX-512 VNNI: an instruction multiplies 16 columns by a quad, of which the high and the low bytes
// are multiplied apart. A piece of a row is its high bytes, then its low ones. Included by one source per kernel, so in an
// anonymous namespace.
#pragma once
#include "attention_avx512.h"
#include "attention_quads.h"

namespace carryall {
namespace {

inline __m512i bytes_of(const uint8_t* x) {
  int32_t all;
  memcpy(&all, x, sizeof all);
  return _mm512_set1_epi32(all);
}

// Where the high bytes of a row lie from an element on.
CARRYALL_INLINE int64_t place(int64_t element) { return element + (element & -kPiece); }

struct Avx512Quads {
  static constexpr float kRound = kShift + 128.0f;
  static constexpr int kTogether = 6, kColumns = 2;  // 24 sums, 2 tiles and a byte of a row are 28 of 32 registers
  static constexpr int kByteColumns = 4;             // 24 sums, 4 tiles and a byte of a row are 29

  static void store(Vector x, uint8_t* row, int64_t first) {
    // Byte 1 of n + 128 is the high byte, byte 0 the low one plus 128.
    const __m512i n = _mm512_xor_si512(_mm512_castps_si512(x.x), _mm512_set1_epi32(128));
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m512i halves = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m256i both = _mm512_castsi512_si256(_mm512_permutexvar_epi32(halves, _mm512_shuffle_epi8(n, order)));
    __m128i* to = reinterpret_cast<__m128i*>(row + place(first));
    _mm_storeu_si128(to, _mm256_castsi256_si128(both));
    _mm_storeu_si128(to + kPiece / 16, _mm256_extracti128_si256(both, 1));
  }

  template <bool kFetch, int kRows, int kWidth, class... Rest>
  static void multiply(const Rest&... rest) {
    add_products<true, kFetch, kRows, kWidth>(rest...);
  }

  template <bool kFetch, int kRows, int kWidth, class... Rest>
  static void multiply_bytes(const Rest&... rest) {
    add_products<false, kFetch, kRows, kWidth>(rest...);
  }

 private:
  template <bool kLow, bool kFetch, int kRows, int kWidth, class Operand, class Later>
  CARRYALL_INLINE static void add_products(const Sixteens& a, int64_t first, const Operand& b, const Later& later, Range steps, float* y,
                                           int64_t y_step) {
    __m512i high[kRows][kWidth], low[kRows][kWidth];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
      for (int c = 0; c < kWidth; c++) {
        high[m][c] = kLow ? _mm512_setzero_si512() : _mm512_set1_epi32(a.offsets[m] / 256);
        low[m][c] = _mm512_set1_epi32(a.offsets[m]);
      }
    for (int64_t k = steps.first; k < steps.last; k++) {
      const uint8_t *tiles[kWidth], *next[kWidth];
#pragma GCC unroll 8
      for (int c = 0; c < kWidth; c++) {
        tiles[c] = b(first + c, k);
        if (kFetch) next[c] = later(first + c, k);
      }
      const uint8_t* rows = a.bytes + place(16 * k);
#pragma GCC unroll 4
      for (int64_t quad = 0; quad < kQuad; quad++) {
        __m512i columns[kWidth];
#pragma GCC unroll 8
        for (int c = 0; c < kWidth; c++) {
          columns[c] = _mm512_loadu_si512(tiles[c] + 64 * quad);
          if (kFetch) fetch(next[c] + 64 * quad);
        }
#pragma GCC unroll 8
        for (int m = 0; m < kRows; m++) {
          const uint8_t* row = rows + m * a.step + kQuad * quad;
          const __m512i upper = bytes_of(row);
#pragma GCC unroll 8
          for (int c = 0; c < kWidth; c++) high[m][c] = _mm512_dpbusd_epi32(high[m][c], columns[c], upper);
          if constexpr (kLow) {
            const __m512i lower = bytes_of(row + kPiece);
#pragma GCC unroll 8
            for (int c = 0; c < kWidth; c++) low[m][c] = _mm512_dpbusd_epi32(low[m][c], columns[c], lower);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
      for (int c = 0; c < kWidth; c++) {
        // Without low bytes a sum is a multiple of 256, so a 256th of it is rounded as the sum is.
        const __m512i sum = kLow ? _mm512_add_epi32(_mm512_slli_epi32(high[m][c], 8), low[m][c]) : high[m][c];
        const __m512 found = _mm512_cvtepi32_ps(sum), scale = _mm512_set1_ps(a.scales[m]);
        _mm512_storeu_ps(y + m * y_step + 16 * (first + c), Operand::kScaled ? _mm512_mul_ps(found, scale) : found);
      }
  }
};

}  // namespace
}  // namespace carryall
