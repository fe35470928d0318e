// The operator SiluAndMul: the gate of a MLP whose products are merged.
//
//   x float [..., 2 * n] -> x[..., :n] * sigmoid(x[..., :n]) * x[..., n:], float [..., n]
#include <cmath>
#include <cstring>
#include <new>

#include "ort_kernel.h"

namespace carryall {
namespace {

constexpr int64_t kLanes = 16;            // of the function `gate`
constexpr int64_t kTaskValues = 8 << 10;  // results of a task, about 4 us

struct Node {
  const OrtApi* api;
  const Kernels* kernels;
};

struct Job {
  const Kernels* kernels;
  const float* x;  // [rows, 2 * width]
  float* y;        // [rows, width]
  int64_t rows, width, step;  // rows of a task
};

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo*, void** kernel) {
  const Kernels* kernels = nullptr;
  CARRYALL_TRY(find_kernels(api, &kernels));
  *kernel = new (std::nothrow) Node{api, kernels};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

void rows_task(void* job, size_t index) {
  const Job& j = *static_cast<const Job*>(job);
  const Gate silu = {1, 0, INFINITY};
  const int64_t first = static_cast<int64_t>(index) * j.step, whole = j.width / kLanes * kLanes, rest = j.width - whole;
  for (int64_t row = first; row < first + j.step && row < j.rows; row++) {
    const float* g = j.x + row * 2 * j.width;
    float* y = j.y + row * j.width;
    j.kernels->attention->gate(silu, g, g + j.width, whole, y);
    if (rest == 0) continue;
    float last[3][kLanes] = {};
    memcpy(last[0], g + whole, sizeof(float) * static_cast<size_t>(rest));
    memcpy(last[1], g + j.width + whole, sizeof(float) * static_cast<size_t>(rest));
    j.kernels->attention->gate(silu, last[0], last[1], kLanes, last[2]);
    memcpy(y + whole, last[2], sizeof(float) * static_cast<size_t>(rest));
  }
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor x;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  if (x.rank == 0 || x.dimensions[x.rank - 1] % 2 != 0)
    return failure(node.api, kInvalidArgument, "the last axis of x does not have two halves");
  const int64_t width = x.dimensions[x.rank - 1] /= 2;
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  if (x.elements == 0) return nullptr;
  const int64_t step = width < kTaskValues ? kTaskValues / width : 1;
  Job job{node.kernels, static_cast<const float*>(x.data), y, x.elements / (2 * width), width, step};
  return run_tasks(node.api, context, rows_task, static_cast<size_t>((job.rows + step - 1) / step), &job);
}

}  // namespace

OrtCustomOp gate_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "SiluAndMul"; };
  op.GetInputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace carryall
