// Products of many rows on AVX-512 VNNI with 4-bit weights in units of one scale a column (unpacked.h). A tile becomes bytes
// once for all rows, which are read until the next tile. The instruction takes unsigned bytes, so the weights are raised by
// 128, and sums begin at -128 times the sum of the row's values.
#pragma once
#include "products.h"
#include "unpacked.h"

namespace carryall {
namespace {

constexpr int kRaise = 128;
constexpr int64_t kUnitRows = 8;              // of a pass
constexpr int64_t kUnpackedBytes = 16 << 10;  // stay in the first-level cache beside the rows of a pass

// Rows from which unpacking takes less time than it saves. Measured on a Zen 4, one thread, 576 x 3,072 and 1,024 x 3,072:
// groups of 64 take 0.94 of the time with 16 rows, 0.77 with 256; blocks of 128 1.10 with 16, 1.01 with 32, 0.96 with 64.
constexpr int64_t kManyRows = 14, kManyRowsOfBlocks = 48, kRowsOfBytes = 3;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline bool in_units(const Weights& w, int64_t rows) {
  if (unit_of(w) == 0) return false;
  return rows >= (w.bits == 8 ? kRowsOfBytes : w.group > w.block ? kManyRows : kManyRowsOfBlocks);
}

// Units [first, last) of a tile: weights as bytes, and their columns for some rows.
struct Units {
  const Weights* weights;
  const uint8_t *bytes, *scales;  // scales of the first unit
  int64_t line_step, scale_step, unit, first, last;  // line_step: bytes from one unit to the next
  const Rows* rows;
  const float* bias;  // of the tile, or nullptr
  float* y;           // row 0, the tile's first column
  __mmask16 valid;    // columns
};

template <int kCount>
void multiply_unpacked(const Units& units, int64_t row, const Later& later) {
  const Rows& rows = *units.rows;
  const int64_t outputs = units.weights->outputs, width = rows.width, start = units.first * units.unit;
  const int8_t* values = rows.values + row * width + start;
  const float* row_scales = rows.scales + row * rows.shares;
  const int32_t* starts = rows.starts + row * rows.shares;
  float* y = units.y + row * outputs;
  __m512 result[kCount];
  for (int m = 0; m < kCount; m++) __builtin_prefetch(y + m * outputs + kColumns, 1, 2);
  for (int m = 0; m < kCount; m++) {
    const float* from = units.first > 0 ? y + m * outputs : units.bias;
    result[m] = from == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(units.valid, from);
  }
  for (int64_t s = units.first; s < units.last; s++) {
    const int64_t inputs = (s + 1) * units.unit < width ? units.unit : width - s * units.unit;
    const uint8_t* lines = units.bytes + (s - units.first) * units.line_step;
    later.fetch(s);
    __m512i sums[kCount];
    for (int m = 0; m < kCount; m++) sums[m] = _mm512_set1_epi32(starts[m * rows.shares + s]);
    for (int64_t k = 0; k < inputs; k += 16, values += 16) {
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += 4, lines += kLine) {
        const __m512i line = _mm512_loadu_si512(lines);
#pragma GCC unroll 16
        for (int m = 0; m < kCount; m++) sums[m] = _mm512_dpbusd_epi32(sums[m], line, four(values + m * width + i));
      }
    }
    const __m512 scale = _mm512_loadu_ps(units.scales + (s - units.first) * units.scale_step);
    for (int m = 0; m < kCount; m++) {
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[m]), scale);
      result[m] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(row_scales[m * rows.shares + s]), result[m]);
    }
  }
  for (int m = 0; m < kCount; m++) _mm512_mask_storeu_ps(y + m * outputs, units.valid, result[m]);
}

template <int kCount>
CARRYALL_INLINE void choose_rows(const Units& units, int64_t row, int64_t count, const Later& later) {
  if (count == kCount) return multiply_unpacked<kCount>(units, row, later);
  if constexpr (kCount > 1) choose_rows<kCount - 1>(units, row, count, later);
}

inline void multiply_units(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                           int64_t first_tile, int64_t last_tile, float* y) {
  alignas(kLine) uint8_t bytes[kUnpackedBytes];
  const bool stored = w.bits == 8;  // as bytes raised by 128
  const int64_t unit = unit_of(w), blocks = unit / w.block, chunk = stored ? rows.shares : kUnpackedBytes / (unit * kColumns);
  const int64_t count = last_row - first_row, passes = (count + kUnitRows - 1) / kUnitRows;
  const int64_t scales = w.group > 0 ? w.group_scales() : w.value_bytes(), scale_step = w.group > 0 ? kLine : w.block_bytes();
  const int64_t line_step = stored ? w.block_bytes() : unit * kColumns;
  for (int64_t tile = first_tile; tile < last_tile; tile++) {
    const int64_t column = tile * kColumns, left = w.outputs - column;
    const auto valid = static_cast<__mmask16>(left < kColumns ? (1 << left) - 1 : 0xffff);
    const uint8_t* data = w.data + tile * w.tile_bytes();
    const Later later(w, tile, rows.shares, stored);
    for (int64_t first = 0; first < rows.shares; first += chunk) {
      const int64_t last = smaller(first + chunk, rows.shares);
      if (!stored) unpack(w, data, first * blocks, smaller(last * blocks, rows.blocks), kRaise, bytes);
      const Units units{&w, stored ? data : bytes, data + scales + first * scale_step, line_step, scale_step, unit, first, last, &rows,
                        bias == nullptr ? nullptr : bias + column, y + column, valid};
      for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t row = first_row + count * pass / passes, end = first_row + count * (pass + 1) / passes;
        choose_rows<kUnitRows>(units, row, end - row, pass == 0 ? later : Later());
      }
    }
  }
}

}  // namespace
}  // namespace carryall
