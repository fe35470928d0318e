// The functions that every instruction set implements.
#pragma once
#include "attention.h"
#include "layout.h"
#include "rounding.h"
#include "sweep.h"

namespace carryall {

// Quantized rows of inputs, or split ones (split_products.h), of which only `values` and `width` are used: values in [-127, 127], and for each row and block a sum and a scale. Blocks of 4 bits share the
// scale of their group, or of 64 inputs, so that their products are multiplied by it once: their own rounding is much
// coarser.
// Memory for rows up to the next multiple of kRowGroup exists; its content has no meaning.
constexpr int64_t kRowGroup = 16;

struct Rows {
  int8_t* values = nullptr;   // [rows, width], of which each begins `step` bytes after the one before
  float* scales = nullptr;    // [rows, shares]
  int32_t* sums = nullptr;    // [rows, blocks]
  int32_t* starts = nullptr;  // [rows, shares]: -128 times the sum, at which products with raised weights begin
  int64_t width = 0, step = 0, blocks = 0, shares = 0;
  int64_t share = 1;          // blocks with one scale

  // For `count` rows of the inputs of weights: the bytes of memory that they take, and the rows in such memory.
  static int64_t bytes(const Weights& weights, int64_t count);
  static Rows place(const Weights& weights, int64_t count, void* memory);
};

struct Kernels {
  const char* name;
  bool (*supported)();
  // Quantizes one row of `inputs` floats: scale = max |x| / 127 of the blocks that share it, rounded to nearest even.
  // Blocks below 1e-35 become 0; blocks with an infinity or NaN get the scale NaN.
  void (*quantize)(const float* x, int64_t inputs, int64_t block, Rows rows, int64_t row);
  // Computes columns of tiles [first_tile, last_tile) of y, rows of outputs, for rows [first_row, last_row):
  // the sum over scales of the row, in their order, of scale * (the sum over their blocks, in their order, of
  // column scale * integer product); with groups, of scale * (column scale * (the sum of multiple * integer product)).
  // bias may be null.
  void (*multiply)(const Weights& weights, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                   int64_t first_tile, int64_t last_tile, Outputs y);
  const AttentionKernels* attention;
  Round round;
  SweepPanel sweep;
  // For split weights, if the instruction set multiplies bfloat16 (split_products.h); else nullptr, and they are products of floats.
  void (*split)(const Weights& weights, const float* x, Rows rows, int64_t row) = nullptr;
  void (*multiply_split)(const Weights& weights, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                         int64_t first_tile, int64_t last_tile, Outputs y) = nullptr;
  int64_t row_bytes = 384 << 10;  // of the quantized rows of a task, which stay in the second-level cache

  // Whether products with these weights read rows that were rounded or split before.
  CARRYALL_INLINE bool prepares(const Weights& weights) const {
    return !weights.floats() || (weights.splits() && split != nullptr);
  }
  CARRYALL_INLINE void prepare(const Weights& weights, const float* x, const Rows& rows, int64_t row) const {
    if (weights.splits()) split(weights, x, rows, row);
    else quantize(x, weights.inputs, weights.block, rows, row);
  }
};

// From the fastest to the portable one; ends with nullptr.
extern const Kernels* const kAllKernels[];

extern const Kernels kPortable;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kAvx2, kAvxVnni, kAvx512Vnni, kAvx512Bf16, kAmx;
#elif defined(__aarch64__)
extern const Kernels kDotprod, kI8mm;
#endif

}  // namespace carryall
