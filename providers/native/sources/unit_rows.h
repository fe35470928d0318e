// Products of many rows on VNNI with weights in units of one scale a column (unpacked.h). A tile of 4-bit weights becomes bytes
// once for all rows, which are read until the next tile. The instruction takes unsigned bytes, so the weights are raised by
// 128, and sums begin at -128 times the sum of the row's values.
#pragma once
#include "products.h"
#include "unpacked.h"

namespace carryall {
namespace {

constexpr int kRaise = 128;
constexpr int64_t kUnpackedBytes = 16 << 10;  // stay in the first-level cache beside the rows of a pass

// Rows from which unpacking takes less time than it saves. Measured with one thread, 576 x 3,072 and 1,024 x 3,072, on a Zen 4
// and a Zen 5: groups of 64 take 1.15 of the time with 16 rows, 0.95 to 1.01 with 32, 0.87 with 256; blocks of 128 1.10 with
// 16, 1.01 with 32, 0.96 with 64.
constexpr int64_t kManyRows = 20, kManyRowsOfBlocks = 48, kRowsOfBytes = 3;

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
  int64_t columns;    // valid ones, 1 to 16
};

template <class Isa, int kCount>
void multiply_unpacked(const Units& units, int64_t row, const Later& later) {
  using Int = typename Isa::Int;
  using Float = typename Isa::Float;
  const Rows& rows = *units.rows;
  const int64_t outputs = units.weights->outputs, width = rows.width, start = units.first * units.unit;
  const int8_t* values = rows.values + row * width + start;
  const float* row_scales = rows.scales + row * rows.shares;
  const int32_t* starts = rows.starts + row * rows.shares;
  float* y = units.y + row * outputs;
  Float result[kCount];
  for (int m = 0; m < kCount; m++) __builtin_prefetch(y + m * outputs + kColumns, 1, 2);
  for (int m = 0; m < kCount; m++)
    result[m] = load_columns<Isa>(units.first > 0 ? y + m * outputs : units.bias, units.columns);
  for (int64_t s = units.first; s < units.last; s++) {
    const int64_t inputs = (s + 1) * units.unit < width ? units.unit : width - s * units.unit;
    const uint8_t* lines = units.bytes + (s - units.first) * units.line_step;
    later.fetch(s);
    Int sums[kCount];
    for (int m = 0; m < kCount; m++) sums[m] = Isa::integers(starts[m * rows.shares + s]);
    for (int64_t k = 0; k < inputs; k += 16, values += 16) {
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += 4, lines += kLine) {
        const Int line = Isa::line(lines);
#pragma GCC unroll 16
        for (int m = 0; m < kCount; m++) sums[m] = Isa::dot(sums[m], line, values + m * width + i);
      }
    }
    const Float scale = Isa::load(reinterpret_cast<const float*>(units.scales + (s - units.first) * units.scale_step));
    for (int m = 0; m < kCount; m++) {
      const Float scaled = Isa::multiply(Isa::converted(sums[m]), scale);
      result[m] = Isa::fused(scaled, Isa::floats(row_scales[m * rows.shares + s]), result[m]);
    }
  }
  for (int m = 0; m < kCount; m++) store_columns<Isa>(y + m * outputs, result[m], units.columns);
}

template <class Isa, int kCount>
CARRYALL_INLINE void choose_rows(const Units& units, int64_t row, int64_t count, const Later& later) {
  if (count == kCount) return multiply_unpacked<Isa, kCount>(units, row, later);
  if constexpr (kCount > 1) choose_rows<Isa, kCount - 1>(units, row, count, later);
}

template <class Isa>
void multiply_units(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                    int64_t first_tile, int64_t last_tile, float* y) {
  alignas(kLine) uint8_t bytes[kUnpackedBytes];
  const bool stored = w.bits == 8;  // as bytes raised by 128
  const int64_t unit = unit_of(w), blocks = unit / w.block, chunk = stored ? rows.shares : kUnpackedBytes / (unit * kColumns);
  const int64_t count = last_row - first_row, passes = (count + Isa::kRows - 1) / Isa::kRows;
  const int64_t scales = w.group > 0 ? w.group_scales() : w.value_bytes(), scale_step = w.group > 0 ? kLine : w.block_bytes();
  const int64_t line_step = stored ? w.block_bytes() : unit * kColumns;
  for (int64_t tile = first_tile; tile < last_tile; tile++) {
    const int64_t column = tile * kColumns, left = w.outputs - column;
    const uint8_t* data = w.data + tile * w.tile_bytes();
    const Later later(w, tile, rows.shares, stored);
    for (int64_t first = 0; first < rows.shares; first += chunk) {
      const int64_t last = smaller(first + chunk, rows.shares);
      if (!stored) unpack<Isa>(w, data, first * blocks, smaller(last * blocks, rows.blocks), kRaise, bytes);
      const Units units{&w, stored ? data : bytes, data + scales + first * scale_step, line_step, scale_step, unit, first, last, &rows,
                        bias == nullptr ? nullptr : bias + column, y + column, left < kColumns ? left : kColumns};
      for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t row = first_row + count * pass / passes, end = first_row + count * (pass + 1) / passes;
        choose_rows<Isa, Isa::kRows>(units, row, end - row, pass == 0 ? later : Later());
      }
    }
  }
}

}  // namespace
}  // namespace carryall
