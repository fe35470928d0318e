// The operators whose kernels are those of providers/cuda/sources.
#pragma once
#include "ort_api.h"

namespace carryall {

constexpr int kCudaOperators = 4;

// Writes the operators of CUDA's execution provider.
void cuda_operators(OrtCustomOp* operators);

}  // namespace carryall
