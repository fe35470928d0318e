// Products with weights that are floats of 16 or 32 bits, over vectors `V` of 16 floats. Activations and sums are float32, so a
// weight loses nothing. Included by one source per instruction set, so in an anonymous namespace.
//
// Every row goes through the same operations in the same order, whatever the rows beside it and the instruction set: within
// kSummed inputs one fused multiply-add after the other, from 0 on; then these sums are added to the bias, in order.
#pragma once
#include <cstring>

#include "layout.h"

namespace carryall {
namespace {

constexpr int64_t kSummed = 128;      // inputs; as float32 their weights of a tile are a quarter of a first-level cache
constexpr int64_t kWaiting = 6;       // groups of rows whose products take as long as their weights
constexpr int kStepsOfPointer = 3;    // rows that one pointer reads: x86 adds once and twice the step
constexpr int64_t kTotalsRows = 128;  // whose totals lie on the stack at a time

struct OfFloat16 {
  static constexpr bool kLinear = true;  // inputs lie one behind the other
  static constexpr int64_t kBytes = 2 * kColumns;  // of an input
  template <class V>
  CARRYALL_INLINE static V load(const uint8_t* line) {
    return V::from_float16(reinterpret_cast<const uint16_t*>(line));
  }
};

struct OfBfloat16 {
  static constexpr bool kLinear = true;
  static constexpr int64_t kBytes = 2 * kColumns;  // of an input
  template <class V>
  CARRYALL_INLINE static V load(const uint8_t* line) {
    return V::from_bfloat16(reinterpret_cast<const uint16_t*>(line));
  }
};

struct OfFloat32 {
  static constexpr bool kLinear = true;
  static constexpr int64_t kBytes = 4 * kColumns;
  template <class V>
  CARRYALL_INLINE static V load(const uint8_t* line) {
    return V::load(reinterpret_cast<const float*>(line));
  }
};

template <int kBits>
struct OfSplit {
  static constexpr bool kLinear = false;
  static constexpr int64_t kSplitBits = kBits, kBytes = kBits / 8 * kColumns;
};

// Writes the weights of `inputs` inputs of a tile as float32.
template <class V, class Type>
CARRYALL_INLINE void widen(const uint8_t* lines, int64_t inputs, float* wide) {
  if constexpr (Type::kLinear) {
    for (int64_t k = 0; k < inputs; k++) V::store(wide + k * kColumns, Type::template load<V>(lines + k * Type::kBytes));
  } else {
    for (int64_t k = 0; k < inputs; k++)
      for (int64_t c = 0; c < kColumns; c++)
        wide[k * kColumns + c] = split_weight(lines + 4 * c, k, Type::kSplitBits);
  }
}

// Adds to the totals [rows, kTiles * kColumns] of kCount rows the products of `inputs` inputs, whose weights of a tile lie `bytes`
// apart, and those of the next tile `tile_bytes` behind. If `kFetch`, asks for the weights `ahead` of each tile, one input's after
// every so many inputs: few rows wait for memory, and hardware asks too late.
template <class V, class Type, int kCount, int kTiles, bool kFetch>
CARRYALL_INLINE void add_products(const uint8_t* lines, int64_t bytes, int64_t tile_bytes, int64_t inputs, Inputs x, float* totals,
                                  const uint8_t* ahead, int64_t ahead_bytes, int64_t every) {
  constexpr int kPointers = (kCount + kStepsOfPointer - 1) / kStepsOfPointer;
  int64_t left = 1;
  const float* rows[kPointers];
  for (int p = 0; p < kPointers; p++) rows[p] = x.row(p * kStepsOfPointer);
  V sums[kCount][kTiles];
#pragma GCC unroll 16
  for (int m = 0; m < kCount; m++)
    for (int t = 0; t < kTiles; t++) sums[m][t] = V::all(0.0f);
  for (int64_t k = 0; k < inputs; k++, lines += bytes) {
    if (kFetch && --left == 0) {
      for (int t = 0; t < kTiles; t++) __builtin_prefetch(ahead + t * ahead_bytes, 0, 3);
      ahead += bytes;
      left = every;
    }
    V weights[kTiles];
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; t++) weights[t] = Type::template load<V>(lines + t * tile_bytes);
#pragma GCC unroll 16
    for (int m = 0; m < kCount; m++) {
      const V value = V::all(rows[m / kStepsOfPointer][m % kStepsOfPointer * x.step]);
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; t++) sums[m][t] = fused(weights[t], value, sums[m][t]);
    }
#pragma GCC unroll 16
    for (int p = 0; p < kPointers; p++) {
      rows[p]++;
      __asm__("" : "+r"(rows[p]));  // else GCC keeps a pointer for each row, more than there are registers
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kCount; m++)
    for (int t = 0; t < kTiles; t++, totals += kColumns) V::store(totals, add(V::load(totals), sums[m][t]));
}

template <class V, class Type, int kCount, int kTiles, bool kFetch>
void choose_products(int64_t count, const uint8_t* lines, int64_t bytes, int64_t tile_bytes, int64_t inputs, Inputs x, float* totals,
                     const uint8_t* ahead = nullptr, int64_t ahead_bytes = 0, int64_t every = 1) {
  if constexpr (kCount > 1)
    if (count < kCount)
      return choose_products<V, Type, kCount - 1, kTiles, kFetch>(count, lines, bytes, tile_bytes, inputs, x, totals, ahead,
                                                                  ahead_bytes, every);
  add_products<V, Type, kCount, kTiles, kFetch>(lines, bytes, tile_bytes, inputs, x, totals, ahead, ahead_bytes, every);
}

// The totals [rows, kTiles * kColumns] of consecutive tiles for at most kTotalsRows rows. For more rows than registers hold, each
// weight becomes float32 once.
template <class V, class Type, int kTiles>
void tile_totals(const Weights& w, const uint8_t* tile, Inputs x, int64_t count, float* totals) {
  constexpr int kRows = V::kTogether > 1 ? 14 : V::kQueries;  // sums, weights and an activation fit in the registers
  constexpr int64_t kBytes = Type::kBytes, kWide = OfFloat32::kBytes;
  constexpr bool kAsStored = Type::kLinear && kBytes == kWide;
  alignas(64) float wide[kTiles][kSummed * kColumns];
  const int64_t groups = (count + kRows - 1) / kRows, tile_bytes = w.tile_bytes();
  for (int64_t first = 0; first < w.inputs; first += kSummed) {
    const int64_t inputs = w.inputs - first < kSummed ? w.inputs - first : kSummed;
    const uint8_t* lines = tile + first * kBytes;
    if constexpr (Type::kLinear)
      if (groups == 1) {
        choose_products<V, Type, kRows, kTiles, kAsStored>(count, lines, kBytes, tile_bytes, inputs, {x.data + first, x.step}, totals,
                                                           lines + kSummed * kBytes, tile_bytes);
        continue;
      }
    // A copy stays in the first-level cache while the rows go through it.
    const bool copied = !kAsStored || groups > kWaiting;
    const uint8_t* read = copied ? reinterpret_cast<const uint8_t*>(wide) : lines;
    const int64_t read_bytes = copied ? kSummed * kWide : tile_bytes;
    for (int t = 0; t < kTiles && copied; t++)
      widen<V, Type>(lines + t * tile_bytes, inputs, wide[t]);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t row = count * g / groups, end = count * (g + 1) / groups;
      // Each group asks for its part of the next weights, so that memory is never idle; many groups take longer than it does.
      const auto multiply = copied ? choose_products<V, OfFloat32, kRows, kTiles, false> : choose_products<V, OfFloat32, kRows, kTiles, kAsStored>;
      const uint8_t* ahead = lines + (kSummed + inputs * g / groups) * kBytes;
      multiply(end - row, read, kWide, read_bytes, inputs, {x.row(row) + first, x.step}, totals + row * kTiles * kColumns, ahead,
               tile_bytes, groups);
    }
  }
}

// Computes kTiles tiles of y for rows [first_row, last_row), begun by the bias.
template <class V, int kTiles>
void tiles_of_rows(const Weights& w, Inputs x, const float* bias, int64_t first_row, int64_t last_row, int64_t tile, Outputs y) {
  constexpr int64_t kWidth = kTiles * kColumns;
  const auto compute = w.offsets == Offsets::float32   ? tile_totals<V, OfFloat32, kTiles>
                       : w.splits()                    ? (w.bits == 16 ? tile_totals<V, OfSplit<16>, kTiles> : tile_totals<V, OfSplit<32>, kTiles>)
                       : w.offsets == Offsets::float16 ? tile_totals<V, OfFloat16, kTiles>
                                                       : tile_totals<V, OfBfloat16, kTiles>;
  alignas(64) float totals[kTotalsRows * kWidth];
  const int64_t column = tile * kColumns, left = w.outputs - column;
  const auto bytes = sizeof(float) * static_cast<size_t>(left < kWidth ? left : kWidth);
  float begin[kWidth] = {};
  if (bias != nullptr) memcpy(begin, bias + column, bytes);
  for (int64_t row = first_row; row < last_row; row += kTotalsRows) {
    const int64_t count = last_row - row < kTotalsRows ? last_row - row : kTotalsRows;
    for (int64_t m = 0; m < count; m++) memcpy(totals + m * kWidth, begin, sizeof begin);
    compute(w, w.data + tile * w.tile_bytes(), {x.row(row), x.step}, count, totals);
    for (int64_t m = 0; m < count; m++) memcpy(y.at(row + m, column), totals + m * kWidth, bytes);
  }
}

template <class V>
void float_products(const Weights& w, Inputs x, const float* bias, int64_t first_row, int64_t last_row, int64_t first_tile,
                    int64_t last_tile, Outputs y) {
  constexpr int kTiles = V::kTogether > 1 ? 2 : 1;
  int64_t tile = first_tile;
  for (; tile + kTiles <= last_tile; tile += kTiles) tiles_of_rows<V, kTiles>(w, x, bias, first_row, last_row, tile, y);
  if (tile < last_tile) tiles_of_rows<V, 1>(w, x, bias, first_row, last_row, tile, y);
}

}  // namespace
}  // namespace carryall
