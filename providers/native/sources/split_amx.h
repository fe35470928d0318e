// See split_products.h; both need AMX.
#pragma once
#include "kernels.h"

namespace carryall {

void split_row_amx(const Weights& weights, const float* x, Rows rows, int64_t row);
void multiply_split_amx(const Weights& weights, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                        int64_t first_tile, int64_t last_tile, Outputs y);

}  // namespace carryall
