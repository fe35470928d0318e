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

inline void store_two(float* y, int64_t y_step) {
  _tile_stored(0, y, 4 * y_step);
  _tile_stored(1, y + kRegisterRows * y_step, 4 * y_step);
  _tile_stored(2, y + 16, 4 * y_step);
  _tile_stored(3, y + kRegisterRows * y_step + 16, 4 * y_step);
}

inline void store_one(float* y, int64_t y_step) {
  _tile_stored(0, y, 4 * y_step);
  _tile_stored(1, y + 16, 4 * y_step);
}

// Multiplies 32 rows by 2 columns of tiles. `a` is [2, a_row bytes], each [steps, high and low, 1 KB]; b(column, step) is a high tile.
template <int kProducts, class Operand>
inline void multiply_two(const uint8_t* a, int64_t a_row, const Operand& b, int64_t steps, float* y, int64_t y_step) {
  clear_one();
  clear_other();
  written(a);
  for (int64_t k = 0; k < steps; k++, a += kRowStepBytes<kProducts>) add_two<kProducts>(a, a_row, b(0, k), b(1, k));
  store_two(y, y_step);
}

// Multiplies up to 16 rows by 2 columns of tiles, with the same order of products.
template <int kProducts, class Operand>
inline void multiply_one(const uint8_t* a, const Operand& b, int64_t steps, float* y, int64_t y_step) {
  clear_one();
  written(a);
  for (int64_t k = 0; k < steps; k++, a += kRowStepBytes<kProducts>) add_one<kProducts>(a, b(0, k), b(1, k));
  store_one(y, y_step);
}

// `kLowParts`: whether queries and weights have low parts.
template <bool kLowParts>
struct AmxTiles {
  static constexpr int64_t kItem = 96, kRows = 2 * kRegisterRows;
  static constexpr bool kLow = kLowParts, kFetches = false;

  template <bool kSplit, class Operand, class Later>
  static void multiply(const uint8_t* a, int64_t a_row, int64_t count, int64_t columns, const Operand& b, const Later&,
                       int64_t steps, float* y, int64_t y_step) {
    constexpr int kProducts = kSplit ? 3 : kLow ? 2 : 1;
    for (int64_t c = 0; c < columns; c += 2) {
      const auto two = [&](int64_t column, int64_t step) { return b(smaller(c + column, columns - 1), step); };  // the last one twice
      if (count > kRegisterRows)
        multiply_two<kProducts>(a, a_row, two, steps, y + 16 * c, y_step);
      else
        multiply_one<kProducts>(a, two, steps, y + 16 * c, y_step);
    }
  }
};

}  // namespace
}  // namespace carryall
