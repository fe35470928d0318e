// What the products on AMX read. Included by amx.cpp, through its parts.
#pragma once
#include <immintrin.h>

#include "amx_configuration.h"
#include "avx512.h"
#include "unpacked.h"

namespace carryall {
namespace {

constexpr int64_t kGroup = kRowGroup;     // rows of a tile register
constexpr int64_t kUnpacked = 128 << 10;  // bytes of weights that are unpacked at a time
constexpr int64_t kMostBlock = 256;       // inputs

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
