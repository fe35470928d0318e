// NCCL, which is loaded when a model is cut over CUDA devices: one communicator for each process.
//
// Source: NCCL's user guide, "Creating a communicator" and "NCCL and CUDA graphs".
#pragma once
#include <cstdint>

#include "ranks.h"

namespace carryall {

// Loads NCCL from a file; returns a complaint, or null.
const char* load_nccl(const char* file);

// Joins the communicator of all ranks, once for each process; waits for the others; returns a complaint, or null.
const char* join_nccl(Ranks* group, uint32_t rank);

// Adds `count` values of all ranks on a stream; x may be y. Returns a complaint, or null.
const char* add_over_ranks(const float* x, float* y, int64_t count, void* stream);

}  // namespace carryall
