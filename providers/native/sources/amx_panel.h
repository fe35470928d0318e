// What the products on AMX read. Included by amx.cpp, through amx_steps.h.
#pragma once
#include <immintrin.h>

#include "amx_configuration.h"
#include "avx512.h"
#include "integers.h"
#include "products.h"
#include "unpacked.h"

namespace carryall {
namespace {

constexpr int64_t kGroup = kRowGroup;     // rows of a tile register
constexpr int64_t kUnpacked = 128 << 10;  // bytes of weights that are unpacked at a time, for the second-level cache
constexpr int64_t kFewStrips = 2, kUnpackedForFew = 24 << 10;  // for this many strips of 16 rows, for the first-level cache
constexpr int64_t kPartialRows = 256, kPartialTiles = 8;  // rows and tiles whose sums over panels of inputs are kept
constexpr int64_t kMostBlock = 256;       // inputs
constexpr int64_t kUnpackedFactors = 48 << 10;  // bytes of scales and minima of as many weights of GGUF files

// Steps [first, last) of the inputs of some tiles, for some rows. A step is a unit of unpacked.h or a block.
struct Panel {
  const Weights* weights;
  const Rows* rows;
  const float* bias;    // of the first tile, or nullptr
  const uint8_t* data;  // the first tile
  const int8_t* bytes;  // unpacked weights [tiles, tile_bytes]
  const uint8_t* factors;                // of the first step of the first tile: what its products are scaled by
  int64_t factor_step, factor_tile;      // bytes from the factors of a step to those of the next, and of a tile
  float* partial;       // [strips of 16 rows, tiles, 16, 16]: sums over the steps before `first`
  Outputs y;            // from the first tile's first column on
  int64_t first_row, last_row, tiles, first, last, columns;  // columns: valid ones from the first tile on
  int64_t step, inputs, step_bytes, tile_bytes;              // inputs of a step, and of all of them
  Ahead* ahead;
  bool ends;            // whether these are the last steps
  // Whether results are written past the caches. What `tilestored` writes reaches the cache behind the results stored before it, so a
  // result that waits for its line delays all products; and those of many rows are more than the caches keep for their reader.
  bool streams;
};

}  // namespace
}  // namespace carryall
