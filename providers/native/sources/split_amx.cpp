#include "split_amx.h"

#include "split_products.h"

namespace carryall {

void split_row_amx(const float* x, int64_t inputs, Rows rows, int64_t row) { split_row(x, inputs, rows, row); }

void multiply_split_amx(const Weights& weights, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                        int64_t first_tile, int64_t last_tile, Outputs y) {
  multiply_split(weights, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace carryall
