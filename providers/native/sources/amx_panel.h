// Weights as signed bytes, and what the products on AMX read. Included by amx.cpp, through its parts.
#pragma once
#include <immintrin.h>

#include "amx_configuration.h"
#include "kernels.h"

namespace carryall {
namespace {

constexpr int64_t kGroup = kRowGroup;     // rows of a tile register
constexpr int64_t kUnpacked = 128 << 10;  // bytes of weights that are unpacked at a time
constexpr int64_t kMostBlock = 256;       // inputs

// The byte of each column, in all four bytes of its lane.
inline __m512i in_all_bytes(const uint8_t* columns) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(columns)));
  return _mm512_mullo_epi32(wide, _mm512_set1_epi32(0x01010101));
}

// Writes blocks [first, last) of a tile as signed bytes: in 4 bits relative to the zero point, times the multiple of the
// block if there are groups; in 8 bits relative to 128.
inline void unpack(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, int8_t* bytes) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int64_t b = first; b < last; b++) {
    const uint8_t* lines = tile + b * w.block_bytes();
    const uint8_t* end = lines + w.value_bytes();
    if (w.bits == 8) {
      for (; lines < end; lines += kLine, bytes += kLine)
        _mm512_store_si512(bytes, _mm512_xor_si512(_mm512_loadu_si512(lines), _mm512_set1_epi8(-128)));
      continue;
    }
    __m512i zero = _mm512_set1_epi8(w.offsets == Offsets::minima ? 0 : 8), multiple = zero;
    if (w.offsets == Offsets::zero_points) zero = in_all_bytes(tile + w.points() + b * kColumns);
    if (w.group > 0) {
      // Times an unsigned nibble a multiple fits a byte, so products of 16 bits are those of their bytes.
      multiple = _mm512_and_si512(in_all_bytes(tile + w.multiples() + b * kColumns), _mm512_set1_epi16(255));
      zero = _mm512_mullo_epi16(zero, multiple);
    }
    for (; lines < end; lines += kLine, bytes += 2 * kLine) {
      const __m512i line = _mm512_loadu_si512(lines);
      __m512i low = _mm512_and_si512(line, mask), high = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
      if (w.group > 0) {
        low = _mm512_mullo_epi16(low, multiple);
        high = _mm512_mullo_epi16(high, multiple);
      }
      _mm512_store_si512(bytes, _mm512_sub_epi8(low, zero));
      _mm512_store_si512(bytes + kLine, _mm512_sub_epi8(high, zero));
    }
  }
}

// Blocks [first, last) of the inputs of some tiles, for some rows; weights are unpacked.
struct Panel {
  const Weights* weights;
  const Rows* rows;
  const float* bias;    // of the first tile, or nullptr
  const uint8_t* data;  // the first tile
  const int8_t* bytes;  // [tiles, last - first, block * 16]
  float* y;             // of the first tile's first column, row 0
  int64_t first_row, last_row, tiles, first, last, columns;  // columns: valid ones from the first tile on
};

}  // namespace
}  // namespace carryall
