#include "split_amx.h"

#include "split_products.h"

namespace carryall {

void split_row_amx(const Weights& weights, const float* x, Rows rows, int64_t row) {
  const auto split = weights.row_parts() == 1 ? split_row<1> : split_row<2>;
  split(x, weights.inputs, rows, row);
}

void multiply_split_amx(const Weights& weights, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                        int64_t first_tile, int64_t last_tile, Outputs y) {
  const auto multiply = weights.bits == 32 ? multiply_split<3> : weights.row_parts() == 2 ? multiply_split<2> : multiply_split<1>;
  multiply(weights, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace carryall
