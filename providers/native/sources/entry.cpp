// Functions for Python: facts of the library, and the operators without onnxruntime, which the tests call.
#include <cstdio>
#include <cstring>

#include "linear.h"
#include "ort_api.h"

using namespace carryall;

namespace {

int complain(const char* what, char* message, int64_t size) {
  snprintf(message, static_cast<size_t>(size), "%s", what);
  return 1;
}

}  // namespace

extern "C" {

CARRYALL_EXPORT int64_t carryall_layout_version() { return kLayoutVersion; }

// The instruction set that is used now; empty if CARRYALL_KERNELS_ISA names none of this processor.
CARRYALL_EXPORT const char* carryall_isa() {
  const Kernels* kernels = choose_kernels(nullptr);
  return kernels == nullptr ? "" : kernels->name;
}

// The name of instruction set `index` that this processor supports, the fastest first; empty after the last one.
CARRYALL_EXPORT const char* carryall_supported_isa(int64_t index) {
  for (const Kernels* const* each = kAllKernels; *each != nullptr; each++)
    if ((*each)->supported() && index-- == 0) return (*each)->name;
  return "";
}

// Computes y [count, outputs] from x [count, inputs] in tasks of row_step rows and tile_step tiles; returns 0, or 1
// and a message.
CARRYALL_EXPORT int carryall_linear(const char* isa, const float* x, int64_t count, const uint8_t* data, int64_t bytes,
                                    const float* bias, int64_t inputs, int64_t outputs, int64_t bits, int64_t block,
                                    int64_t offsets, int64_t row_step, int64_t tile_step, float* y, char* message,
                                    int64_t size) {
  const Weights weights{data, inputs, outputs, bits, block, static_cast<Offsets>(offsets)};
  if (const char* wrong = weights.complaint()) return complain(wrong, message, size);
  if (bytes != weights.bytes()) return complain("the weights have a wrong number of bytes", message, size);
  const Kernels* kernels = choose_kernels(isa);
  if (kernels == nullptr) return complain("there is no such instruction set", message, size);
  if (count < 1 || row_step < 1 || tile_step < 1) return complain("a size is not positive", message, size);
  const Workspace workspace(weights, count);
  if (!workspace.valid()) return complain("out of memory", message, size);
  Job job{kernels, &weights, x, bias, y, count, workspace.rows(), row_step, tile_step};
  for (size_t task = 0; task < job.quantize_tasks(); task++) quantize_task(&job, task);
  for (size_t task = job.multiply_tasks(); task > 0; task--) multiply_task(&job, task - 1);
  return 0;
}

}  // extern "C"
