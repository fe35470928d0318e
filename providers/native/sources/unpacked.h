// Weights as bytes in units of one scale a column, for AVX-512: groups of 4-bit blocks, or large blocks.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace carryall {
namespace {

// Four values of a row, in every lane.
CARRYALL_INLINE __m512i four(const int8_t* x) {
  int32_t all;
  memcpy(&all, x, sizeof all);
  return _mm512_set1_epi32(all);
}

// Inputs of a unit; 0 if the weights have none.
inline int64_t unit_of(const Weights& w) {
  const bool fits = w.bits == 4 ? w.offsets != Offsets::minima : w.offsets == Offsets::middle;
  return w.group > 0 ? w.group : fits && w.block >= kLine ? w.block : 0;
}

// The byte of each column, in all four bytes of its lane.
inline __m512i in_all_bytes(const uint8_t* columns) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(columns)));
  return _mm512_mullo_epi32(wide, _mm512_set1_epi32(0x01010101));
}

// Turns the values of 4-bit block `b` into bytes: relative to the zero point, times the multiple of the block if there are
// groups, plus `raise` modulo 256.
class Nibbles {
 public:
  CARRYALL_INLINE Nibbles(const Weights& w, const uint8_t* tile, int64_t b, int raise) : grouped_(w.group > 0) {
    zero_ = _mm512_set1_epi8(w.offsets == Offsets::minima ? 0 : 8);
    if (w.offsets == Offsets::zero_points) zero_ = in_all_bytes(tile + w.points() + b * kColumns);
    multiple_ = zero_;
    if (grouped_) {
      // Times an unsigned nibble a multiple fits a byte, so products of 16 bits are those of their bytes.
      multiple_ = _mm512_and_si512(in_all_bytes(tile + w.multiples() + b * kColumns), _mm512_set1_epi16(255));
      zero_ = _mm512_mullo_epi16(zero_, multiple_);
    }
    zero_ = _mm512_sub_epi8(zero_, _mm512_set1_epi8(static_cast<char>(raise)));
  }

  // Inputs 0 to 3 of a line's 8.
  CARRYALL_INLINE __m512i low(__m512i line) const { return byte(line); }
  CARRYALL_INLINE __m512i high(__m512i line) const { return byte(_mm512_srli_epi16(line, 4)); }

 private:
  CARRYALL_INLINE __m512i byte(__m512i line) const {
    __m512i nibbles = _mm512_and_si512(line, _mm512_set1_epi8(15));
    if (grouped_) nibbles = _mm512_mullo_epi16(nibbles, multiple_);
    return _mm512_sub_epi8(nibbles, zero_);
  }

  const bool grouped_;
  __m512i zero_, multiple_;
};

// Writes blocks [first, last) of a tile as bytes: of 4 bits as `Nibbles` do, of 8 bits as they are, minus 128, plus `raise`.
inline void unpack(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, int raise, uint8_t* bytes) {
  for (int64_t b = first; b < last; b++) {
    const uint8_t* lines = tile + b * w.block_bytes();
    const uint8_t* end = lines + w.value_bytes();
    if (w.bits == 8) {
      for (; lines < end; lines += kLine, bytes += kLine)
        _mm512_store_si512(bytes, _mm512_add_epi8(_mm512_loadu_si512(lines), _mm512_set1_epi8(static_cast<char>(raise - 128))));
      continue;
    }
    const Nibbles nibbles(w, tile, b, raise);
    for (; lines < end; lines += kLine, bytes += 2 * kLine) {
      const __m512i line = _mm512_loadu_si512(lines);
      _mm512_store_si512(bytes, nibbles.low(line));
      _mm512_store_si512(bytes + kLine, nibbles.high(line));
    }
  }
}

}  // namespace
}  // namespace carryall
