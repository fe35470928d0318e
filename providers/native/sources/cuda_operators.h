// The operators whose kernels are those of providers/cuda/sources.
#pragma once
#include "ort_api.h"

namespace carryall {

#ifndef CARRYALL_CUDA_PROVIDER  // tests run the kernels on the CPU
#define CARRYALL_CUDA_PROVIDER "CUDAExecutionProvider"
#endif

constexpr int kCudaCollectives = 2, kCudaDecodes = 6, kCudaOperators = 5 + kCudaDecodes + kCudaCollectives;

// Writes the operators of CUDA's execution provider.
void cuda_operators(OrtCustomOp* operators);

// The one among them that multiplies with int4 weights.
OrtCustomOp cuda_product();

// Writes those among them that attend to KV in blocks.
void cuda_decode(OrtCustomOp* operators);

// Writes those among them that run over several devices.
void cuda_collectives(OrtCustomOp* operators);

}  // namespace carryall
