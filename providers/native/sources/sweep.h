// A panel of a sweep over the inputs of matrices, with the bits of graph_opt/quantize/algorithms/sweep.py (NumPy).
#pragma once
#include <cstdint>

namespace carryall {

// Rows are inputs, with a row of `matrix`, and the row of their block in `scales` and `zero_points`, each. One row after the
// other gets the levels nearest to its weights `left`. Its errors over the diagonal, times its row of the matrix, are subtracted from
// the rows of `left` behind it.
struct Sweep {
  float* left;          // [rows, outputs]
  float* levels;        // [rows, outputs], written
  int64_t left_step, levels_step;  // between rows, in floats
  int64_t rows, outputs;
  const float* matrix;  // [rows, rows]: its diagonal and what is right of it
  int64_t matrix_step;
  const float* scales;  // [blocks, outputs]
  const float* zero_points;
  const int64_t* blocks;  // [rows]
  float low, high;      // of the levels

  bool is_supported() const { return rows > 0 && rows <= 128 && outputs > 0 && low < high; }
};

// Sweeps outputs [first, last).
using SweepPanel = void (*)(const Sweep&, int64_t first, int64_t last);

void sweep_portable(const Sweep& sweep, int64_t first, int64_t last);
void sweep_avx2(const Sweep& sweep, int64_t first, int64_t last);
void sweep_avx512(const Sweep& sweep, int64_t first, int64_t last);

}  // namespace carryall
