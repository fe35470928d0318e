// Rounding of float matrices to blocks of 4 or 8 bits, with the bits of graph_opt/quantize/algorithms (NumPy).
#pragma once
#include <cstdint>

namespace carryall {

enum class Search : int64_t { ranges = 0, lines = 1 };  // blockwise.py: round_to_nearest; kquant.py: quantize

// A matrix [inputs, outputs] and the format of its blocks, `block` inputs of an output. Unsigned values have zero points. With
// `group`, scales of the blocks of so many inputs are multiples of one (grouped.py).
struct Rounding {
  const float* weights;
  int64_t input_step, output_step;  // of the weights, in floats
  int64_t inputs, outputs, bits, block, group;
  bool is_signed;
  Search search;
  const float* importance;  // [inputs], factors of squared errors for Search::ranges; null for 1
  const double* ranges;  // relative to the full range for Search::ranges; levels added to its width for Search::lines
  int64_t range_count;
  const double* units;   // of the smallest unit of a group: units tried
  int64_t unit_count;
  uint8_t* values;       // [inputs, outputs], signed ones as bytes
  int64_t value_input_step, value_output_step;
  float* scales;         // [inputs / block, outputs]
  uint8_t* zero_points;  // the same shape; null if signed
  float* multiples;      // the same shape, of the units of groups; may be null

  // Whether the sizes and the search are supported.
  bool is_supported() const {
    const bool blocks = block >= 16 && block <= 256 && (block & (block - 1)) == 0 && inputs % block == 0;
    const bool groups = group == 0 || (!is_signed && group > 0 && group <= 256 && group % block == 0 && unit_count > 0);
    const bool known = search == Search::ranges || search == Search::lines;
    return inputs > 0 && outputs > 0 && (bits == 4 || bits == 8) && blocks && groups && known && range_count > 0;
  }
};

enum class Outcome : int64_t { done = 0, not_finite = 1, too_large = 2, unsupported = 3 };  // NaN or infinity; squares that exceed float; sizes

// Rounds outputs [first, last).
using Round = Outcome (*)(const Rounding&, int64_t first, int64_t last);

Outcome round_portable(const Rounding& rounding, int64_t first, int64_t last);
Outcome round_avx2(const Rounding& rounding, int64_t first, int64_t last);
Outcome round_avx512(const Rounding& rounding, int64_t first, int64_t last);

}  // namespace carryall
