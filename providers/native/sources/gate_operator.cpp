// The operator SiluAndMul: the gate of a MLP whose products are merged.
//
//   x float [..., 2 * n] -> x[..., :n] * sigmoid(x[..., :n]) * x[..., n:], float [..., n]
#include <new>

#include "ort_kernel.h"

namespace carryall {
namespace {

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
  const int64_t first = static_cast<int64_t>(index) * j.step;
  for (int64_t row = first; row < first + j.step && row < j.rows; row++)
    silu_and_multiply(*j.kernels->attention, j.x + row * 2 * j.width, j.width, j.y + row * j.width);
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
