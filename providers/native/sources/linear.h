// A product of rows with quantized weights, cut into tasks, and the rows of quantized weights themselves.
#pragma once
#include <cstddef>

#include "kernels.h"

namespace carryall {

// Memory for the quantized rows; freed with the object.
class Workspace {
 public:
  Workspace(const Weights& weights, int64_t count);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  bool valid() const { return memory_ != nullptr; }
  const Rows& rows() const { return rows_; }

 private:
  void* memory_;
  Rows rows_;
};

// One product; tasks of a kind may run in any order and at the same time. All `quantize` tasks, which round or split the rows,
// come first; most weights that are floats have none.
struct Job {
  const Kernels* kernels;
  const Weights* weights;
  Inputs x;           // [count, inputs]
  const float* bias;  // [outputs], or nullptr
  Outputs y;          // [count, outputs]
  int64_t count;
  Rows rows;
  int64_t row_step = 0, tile_step = 0;  // rows and tiles of a task

  void plan_quantize();  // choose the steps of the next tasks
  void plan_multiply();
  void plan_multiply(int64_t task_work);  // the smallest number of products of a task
  size_t quantize_tasks() const { return kernels->prepares(*weights) ? row_pieces() : 0; }
  size_t multiply_tasks() const {
    return row_pieces() * static_cast<size_t>((weights->tiles() + tile_step - 1) / tile_step);
  }
  size_t row_pieces() const { return static_cast<size_t>((count + row_step - 1) / row_step); }
};

void quantize_task(void* job, size_t index);
void multiply_task(void* job, size_t index);

// Writes the gate of a MLP whose products are merged: y = silu(x[:width]) * x[width:].
void silu_and_multiply(const AttentionKernels& vectors, const float* x, int64_t width, float* y);

// Writes output `index` of the weights [inputs] as floats.
void read_row(const Weights& weights, int64_t index, float* y);

// Returns the kernels named by `isa`; nullptr names the variable CARRYALL_KERNELS_ISA, or the fastest ones that this
// processor supports. Returns nullptr if there are none of that name, or the processor does not support them.
const Kernels* choose_kernels(const char* isa);

// Chooses an instruction set for the calls that name none; returns whether this processor has it.
bool prefer_kernels(const char* isa);

}  // namespace carryall
