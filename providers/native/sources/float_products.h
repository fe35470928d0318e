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
constexpr int64_t kTotalsRows = 128;  // whose totals lie on the stack at a time

struct OfFloat16 {
  static constexpr int64_t kBytes = 2 * kColumns;  // of an input
  template <class V>
  CARRYALL_INLINE static V load(const uint8_t* line) {
    return V::from_float16(reinterpret_cast<const uint16_t*>(line));
  }
};

struct OfBfloat16 {
  static constexpr int64_t kBytes = 2 * kColumns;  // of an input
  template <class V>
  CARRYALL_INLINE static V load(const uint8_t* line) {
    return V::from_bfloat16(reinterpret_cast<const uint16_t*>(line));
  }
};

struct OfFloat32 {
  static constexpr int64_t kBytes = 4 * kColumns;
  template <class V>
  CARRYALL_INLINE static V load(const uint8_t* line) {
    return V::load(reinterpret_cast<const float*>(line));
  }
};

// Adds to the totals of kCount rows the products of `inputs` inputs, whose weights lie `bytes` apart. If `kFetch`, asks for the
// weights `ahead`, one input's after every so many inputs: few rows wait for memory, and hardware asks too late.
template <class V, class Type, int kCount, bool kFetch>
CARRYALL_INLINE void add_products(const uint8_t* lines, int64_t bytes, int64_t inputs, const float* const* x, float* totals,
                                  const uint8_t* ahead, int64_t every) {
  int64_t left = 1;
  V sums[kCount];
  for (int m = 0; m < kCount; m++) sums[m] = V::all(0.0f);
  for (int64_t k = 0; k < inputs; k++, lines += bytes) {
    if (kFetch && --left == 0) {
      __builtin_prefetch(ahead, 0, 3);
      ahead += bytes;
      left = every;
    }
    const V weights = Type::template load<V>(lines);
#pragma GCC unroll 16
    for (int m = 0; m < kCount; m++) sums[m] = fused(weights, V::all(x[m][k]), sums[m]);
  }
  for (int m = 0; m < kCount; m++) V::store(totals + m * kColumns, add(V::load(totals + m * kColumns), sums[m]));
}

template <class V, class Type, int kCount, bool kFetch>
void choose_products(int64_t count, const uint8_t* lines, int64_t bytes, int64_t inputs, Inputs x, float* totals,
                     const uint8_t* ahead = nullptr, int64_t every = 1) {
  if constexpr (kCount > 1)
    if (count < kCount) return choose_products<V, Type, kCount - 1, kFetch>(count, lines, bytes, inputs, x, totals, ahead, every);
  const float* rows[kCount];
  for (int m = 0; m < kCount; m++) rows[m] = x.row(m);
  add_products<V, Type, kCount, kFetch>(lines, bytes, inputs, rows, totals, ahead, every);
}

// One tile's totals for at most kTotalsRows rows. For more rows than registers hold, each weight becomes float32 once.
template <class V, class Type>
void tile_totals(const Weights& w, const uint8_t* tile, Inputs x, int64_t count, float* totals) {
  constexpr int kRows = V::kTogether > 1 ? 12 : V::kQueries;  // sums, a weight and an activation fit in the registers
  constexpr int64_t kBytes = Type::kBytes;
  constexpr bool kAsStored = kBytes == OfFloat32::kBytes;
  alignas(64) float wide[kSummed * kColumns];
  const int64_t groups = (count + kRows - 1) / kRows;
  for (int64_t first = 0; first < w.inputs; first += kSummed) {
    const int64_t inputs = w.inputs - first < kSummed ? w.inputs - first : kSummed;
    const uint8_t* lines = tile + first * kBytes;
    if (groups == 1) {
      choose_products<V, Type, kRows, kAsStored>(count, lines, kBytes, inputs, {x.data + first, x.step}, totals, lines + kSummed * kBytes);
      continue;
    }
    const uint8_t* read = kAsStored ? lines : reinterpret_cast<const uint8_t*>(wide);
    for (int64_t k = 0; k < inputs && !kAsStored; k++) V::store(wide + k * kColumns, Type::template load<V>(lines + k * kBytes));
    for (int64_t g = 0; g < groups; g++) {
      const int64_t row = count * g / groups, end = count * (g + 1) / groups;
      // Each group asks for its part of the next weights, so that memory is never idle.
      const uint8_t* ahead = lines + (kSummed + inputs * g / groups) * kBytes;
      choose_products<V, OfFloat32, kRows, kAsStored>(end - row, read, OfFloat32::kBytes, inputs, {x.row(row) + first, x.step},
                                                      totals + row * kColumns, ahead, groups);
    }
  }
}

template <class V>
void float_products(const Weights& w, Inputs x, const float* bias, int64_t first_row, int64_t last_row, int64_t first_tile,
                    int64_t last_tile, Outputs y) {
  const auto compute = w.offsets == Offsets::float32   ? tile_totals<V, OfFloat32>
                       : w.offsets == Offsets::float16 ? tile_totals<V, OfFloat16>
                                                       : tile_totals<V, OfBfloat16>;
  alignas(64) float totals[kTotalsRows * kColumns];
  for (int64_t tile = first_tile; tile < last_tile; tile++) {
    const int64_t column = tile * kColumns, left = w.outputs - column;
    const auto bytes = sizeof(float) * static_cast<size_t>(left < kColumns ? left : kColumns);
    float begin[kColumns] = {};
    if (bias != nullptr) memcpy(begin, bias + column, bytes);
    for (int64_t row = first_row; row < last_row; row += kTotalsRows) {
      const int64_t count = last_row - row < kTotalsRows ? last_row - row : kTotalsRows;
      for (int64_t m = 0; m < count; m++) memcpy(totals + m * kColumns, begin, sizeof begin);
      compute(w, w.data + tile * w.tile_bytes(), {x.row(row), x.step}, count, totals);
      for (int64_t m = 0; m < count; m++) memcpy(y.at(row + m, column), totals + m * kColumns, bytes);
    }
  }
}

}  // namespace
}  // namespace carryall
