// Products of AMX tiles of bfloat16. Included by attention_amx.cpp and split_amx.cpp.
//
// kProducts of a step: 1, high parts alone; 2, low parts of rows by high parts too; 3, high parts of rows by low ones too.
#pragma once
#include "amx_configuration.h"
#include "attention_pairs.h"

namespace carryall {
namespace {

#define CARRYALL_LOAD(number, data) _tile_loadd(number, data, 64)

// Bytes of 16 rows in a step.
template <int kProducts>
constexpr int64_t kRowStepBytes = (kProducts > 1 ? 2 : 1) * kTileBytes;

// Adds the products of one step of 32 rows, in registers 0 to 3. `a` and `a + a_row` are high tiles of 16 rows, `left` and `right`
// of 16 columns; the low ones that are read follow each.
template <int kProducts>
inline void add_two(const uint8_t* a, int64_t a_row, const uint8_t* left, const uint8_t* right) {
  CARRYALL_LOAD(4, a);
  CARRYALL_LOAD(6, left);
  _tile_dpbf16ps(0, 4, 6);
  CARRYALL_LOAD(5, a + a_row);
  _tile_dpbf16ps(1, 5, 6);
  CARRYALL_LOAD(7, right);
  _tile_dpbf16ps(2, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
  if constexpr (kProducts == 1) return;
  CARRYALL_LOAD(4, a + kTileBytes);
  _tile_dpbf16ps(0, 4, 6);
  CARRYALL_LOAD(5, a + a_row + kTileBytes);
  _tile_dpbf16ps(1, 5, 6);
  _tile_dpbf16ps(2, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
  if constexpr (kProducts == 2) return;
  CARRYALL_LOAD(4, a);
  CARRYALL_LOAD(6, left + kTileBytes);
  _tile_dpbf16ps(0, 4, 6);
  CARRYALL_LOAD(5, a + a_row);
  _tile_dpbf16ps(1, 5, 6);
  CARRYALL_LOAD(7, right + kTileBytes);
  _tile_dpbf16ps(2, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
}

// The same of up to 16 rows, in registers 0 and 1, with the same order of products.
template <int kProducts>
inline void add_one(const uint8_t* a, const uint8_t* left, const uint8_t* right) {
  CARRYALL_LOAD(4, a);
  CARRYALL_LOAD(6, left);
  _tile_dpbf16ps(0, 4, 6);
  CARRYALL_LOAD(7, right);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kProducts == 1) return;
  CARRYALL_LOAD(5, a + kTileBytes);
  _tile_dpbf16ps(0, 5, 6);
  _tile_dpbf16ps(1, 5, 7);
  if constexpr (kProducts == 2) return;
  CARRYALL_LOAD(6, left + kTileBytes);
  _tile_dpbf16ps(0, 4, 6);
  CARRYALL_LOAD(7, right + kTileBytes);
  _tile_dpbf16ps(1, 4, 7);
}

inline void clear_one() {
  _tile_zero(0);
  _tile_zero(1);
}

inline void clear_other() {
  _tile_zero(2);
  _tile_zero(3);
}

// Tiles of 16 rows, `row` floats apart, with the other column and the other rows so many floats behind.
inline void store_two(float* y, int64_t row, int64_t column, int64_t rows) {
  _tile_stored(0, y, 4 * row);
  _tile_stored(1, y + rows, 4 * row);
  _tile_stored(2, y + column, 4 * row);
  _tile_stored(3, y + rows + column, 4 * row);
}

inline void store_one(float* y, int64_t row, int64_t column) {
  _tile_stored(0, y, 4 * row);
  _tile_stored(1, y + column, 4 * row);
}

inline void store_two(float* y, int64_t y_step) { store_two(y, y_step, 16, kRegisterRows * y_step); }
inline void store_one(float* y, int64_t y_step) { store_one(y, y_step, 16); }

// Multiplies 32 rows by 2 columns of tiles. `a` is [2, a_row bytes], each [steps, high and low, 1 KB]; b(column, step) is a high tile.
template <int kProducts, class Operand, class Steps>
CARRYALL_INLINE void multiply_two(const uint8_t* a, int64_t a_row, const Operand& b, Steps steps, const Results& y) {
  clear_one();
  clear_other();
#pragma GCC unroll 8
  for (int64_t k = 0; k < steps; k++, a += kRowStepBytes<kProducts>) add_two<kProducts>(a, a_row, b(0, k), b(1, k));
  store_two(y.first, y.row, y.column, y.rows);
}

// Multiplies up to 16 rows by 2 columns of tiles, with the same order of products.
template <int kProducts, class Operand, class Steps>
CARRYALL_INLINE void multiply_one(const uint8_t* a, const Operand& b, Steps steps, const Results& y) {
  clear_one();
  for (int64_t k = 0; k < steps; k++, a += kRowStepBytes<kProducts>) add_one<kProducts>(a, b(0, k), b(1, k));
  store_one(y.first, y.row, y.column);
}

// `kLowParts`: whether queries and weights have low parts.
template <bool kLowParts>
struct AmxTiles {
  static constexpr int64_t kItem = 96, kRows = 2 * kRegisterRows;
  static constexpr bool kLow = kLowParts, kFetches = false;

  template <bool kSplit, class Operand, class Later>
  static void multiply(const uint8_t* a, int64_t a_row, int64_t count, int64_t columns, const Operand& b, const Later&,
                       int64_t steps, const Results& y) {
    if (steps == 2) return multiply_steps<kSplit>(a, a_row, count, columns, b, std::integral_constant<int64_t, 2>(), y);
    if (steps == kPartSteps) return multiply_steps<kSplit>(a, a_row, count, columns, b, std::integral_constant<int64_t, kPartSteps>(), y);
    multiply_steps<kSplit>(a, a_row, count, columns, b, steps, y);
  }

 private:
  template <bool kSplit, class Operand, class Steps>
  static void multiply_steps(const uint8_t* a, int64_t a_row, int64_t count, int64_t columns, const Operand& b, Steps steps, const Results& y) {
    constexpr int kProducts = kSplit ? 3 : kLow ? 2 : 1;
    written(a);
    for (int64_t c = 0; c < columns; c += 2) {
      const Results to = {y.at(0, c), y.row, y.column, y.rows};
      const int64_t other = smaller(c + 1, columns - 1);  // the last one twice
      const auto two = [&](int64_t column, int64_t step) { return b(column == 0 ? c : other, step); };
      if (count > kRegisterRows)
        multiply_two<kProducts>(a, a_row, two, steps, to);
      else
        multiply_one<kProducts>(a, two, steps, to);
    }
  }
};

}  // namespace
}  // namespace carryall
