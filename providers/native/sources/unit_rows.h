// Products of many rows on VNNI with weights in units of one scale a column (unpacked.h). A tile of 4-bit weights becomes bytes
// once for all rows, which are read until the next tile. The instruction takes unsigned bytes, so the weights are raised by
// 128, and sums begin at -128 times the sum of the row's values.
#pragma once
#include "integers.h"
#include "products.h"
#include "unpacked.h"

namespace carryall {
namespace {

constexpr int kRaise = 128;
constexpr int64_t kUnpackedBytes = 24 << 10;  // of one or two tiles; stay in the first-level cache beside the rows of a pass

// Rows from which unpacking takes less time than it saves, measured with one thread. Zen 5: groups of 64 take 1.0 of the time
// with 16 rows, 0.9 with 32; blocks of 128 0.95 and 0.86. Zen 4, one tile at a time: groups of 64 1.0 and 0.9, blocks of 128
// 1.10 and 1.01. Two tiles at a time read each value of a row once for both; few rows, which wait for memory, take longer so.
constexpr int64_t kManyRows = 14, kManyRowsOfBlocks = 32, kRowsOfBytes = 3, kRowsForTwo = 16;

// Inputs of a unit. Bytes are multiplied as they are stored, so a block of 32 is one too: 11 instructions for 8 products.
inline int64_t inputs_of_unit(const Weights& w) {
  return w.bits == 8 && w.offsets == Offsets::middle && w.block >= kLine / 2 ? w.block : unit_of(w);
}

inline bool in_units(const Weights& w, int64_t rows) {
  if (inputs_of_unit(w) == 0) return false;
  return rows >= (w.bits == 8 ? kRowsOfBytes : w.group > w.block ? kManyRows : kManyRowsOfBlocks);
}

// Units [first, last) of one or two tiles: weights as bytes, and their columns for some rows.
struct Units {
  const Weights* weights;
  const uint8_t *bytes, *scales;  // of the first tile; scales of the first unit
  int64_t tile_step, line_step, scale_step, unit, first, last;  // bytes from one tile, or from one unit, to the next
  const Rows* rows;
  const float* bias;  // of the first tile, or nullptr
  Outputs y;          // from the first tile's first column on
  int64_t columns;    // valid ones
};

template <class Isa, int kTiles, int kCount>
void multiply_unpacked(const Units& units, int64_t row, const Later (&later)[kTiles]) {
  using Int = typename Isa::Int;
  using Float = typename Isa::Float;
  const Rows& rows = *units.rows;
  const int64_t width = rows.width, start = units.first * units.unit;
  const int8_t* values = rows.values + row * rows.step + start;
  const float* row_scales = rows.scales + row * rows.shares;
  const int32_t* starts = rows.starts + row * rows.shares;
  Float result[kTiles][kCount];
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      float* of = units.y.at(row + m, t * kColumns);
      __builtin_prefetch(of + kTiles * kColumns, 1, 2);
      const float* from = units.first > 0 ? of : units.bias == nullptr ? nullptr : units.bias + t * kColumns;
      result[t][m] = load_columns<Isa>(from, units.columns - t * kColumns);
    }
  for (int64_t s = units.first; s < units.last; s++) {
    const int64_t inputs = (s + 1) * units.unit < width ? units.unit : width - s * units.unit;
    const uint8_t* lines = units.bytes + (s - units.first) * units.line_step;
    const uint8_t* scales = units.scales + (s - units.first) * units.scale_step;
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; t++) later[t].fetch(s);
    Int sums[kTiles][kCount];
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 8
      for (int m = 0; m < kCount; m++) sums[t][m] = Isa::integers(starts[m * rows.shares + s]);
    for (int64_t k = 0; k < inputs; k += 16, values += 16) {
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += 4, lines += kLine) {
        Int line[kTiles];
#pragma GCC unroll 8
        for (int t = 0; t < kTiles; t++) line[t] = Isa::line(lines + t * units.tile_step);
#pragma GCC unroll 8
        for (int m = 0; m < kCount; m++)
#pragma GCC unroll 8
          for (int t = 0; t < kTiles; t++) sums[t][m] = Isa::dot(sums[t][m], line[t], values + m * rows.step + i);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; t++) {
      const Float scale = Isa::load(reinterpret_cast<const float*>(scales + t * units.weights->tile_bytes()));
#pragma GCC unroll 8
      for (int m = 0; m < kCount; m++) {
        const Float scaled = Isa::multiply(Isa::converted(sums[t][m]), scale);
        result[t][m] = Isa::fused(scaled, Isa::floats(row_scales[m * rows.shares + s]), result[t][m]);
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++)
      store_columns<Isa>(units.y.at(row + m, t * kColumns), result[t][m], units.columns - t * kColumns);
}

template <class Isa, int kTiles, int kCount>
CARRYALL_INLINE void choose_rows(const Units& units, int64_t row, int64_t count, const Later (&later)[kTiles]) {
  if (count == kCount) return multiply_unpacked<Isa, kTiles, kCount>(units, row, later);
  if constexpr (kCount > 1) choose_rows<Isa, kTiles, kCount - 1>(units, row, count, later);
}

// Columns of kTiles tiles from `tile` on.
template <class Isa, int kTiles>
void multiply_tiles(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row, int64_t tile,
                    Outputs y, uint8_t* bytes) {
  constexpr int kRows = kTiles == 1 ? Isa::kRows : Isa::kRowsOfTwo;  // of a pass
  constexpr int64_t kChunkBytes = kUnpackedBytes / kTiles;
  const bool stored = w.bits == 8;  // as bytes raised by 128
  const int64_t unit = inputs_of_unit(w), blocks = unit / w.block;
  const int64_t chunks = stored ? 1 : parts(rows.shares * unit * kColumns, kChunkBytes), chunk = parts(rows.shares, chunks);
  const int64_t count = last_row - first_row, passes = parts(count, kRows);
  const int64_t scales = w.group > 0 ? w.group_scales() : w.value_bytes(), scale_step = w.group > 0 ? kLine : w.block_bytes();
  const int64_t line_step = stored ? w.block_bytes() : unit * kColumns, tile_step = stored ? w.tile_bytes() : kChunkBytes;
  const int64_t column = tile * kColumns, left = w.outputs - column;
  const uint8_t* data = w.data + tile * w.tile_bytes();
  for (int64_t first = 0; first < rows.shares; first += chunk) {
    const int64_t last = smaller(first + chunk, rows.shares);
    for (int t = 0; t < kTiles && !stored; t++)
      unpack<Isa>(w, data + t * w.tile_bytes(), first * blocks, smaller(last * blocks, rows.blocks), kRaise, bytes + t * kChunkBytes);
    const Units units{&w, stored ? data : bytes, data + scales + first * scale_step, tile_step, line_step, scale_step, unit, first, last,
                      &rows, bias == nullptr ? nullptr : bias + column, {y.at(0, column), y.step}, smaller(left, kTiles * kColumns)};
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t row = first_row + count * pass / passes, end = first_row + count * (pass + 1) / passes;
      Later later[kTiles];
      for (int t = 0; t < kTiles; t++) later[t] = Later(w, tile + t, rows.shares, stored, kTiles, pass, passes);
      choose_rows<Isa, kTiles, kRows>(units, row, end - row, later);
    }
  }
}

template <class Isa>
void multiply_units(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                    int64_t first_tile, int64_t last_tile, Outputs y) {
  alignas(kLine) uint8_t bytes[kUnpackedBytes];
  constexpr int kMost = Isa::kRowsOfTwo > 0 ? 2 : 1;
  const int64_t most = last_row - first_row >= kRowsForTwo ? kMost : 1;
  for (int64_t tile = first_tile; tile < last_tile;) {
    const int64_t tiles = smaller(most, last_tile - tile);
    (tiles == kMost ? multiply_tiles<Isa, kMost> : multiply_tiles<Isa, 1>)(w, rows, bias, first_row, last_row, tile, y, bytes);
    tile += tiles;
  }
}

}  // namespace
}  // namespace carryall
