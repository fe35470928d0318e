// The operator HeadProducts: rows whose heads are multiplied by weights of their own.
//
//   x float [..., heads * inputs], weights uint8 [heads, tiles of outputs, bytes] -> float [..., heads * outputs]
//
// Weights are floats in tiles (layout.h); those of each head begin with a tile. A result depends on its row alone.
#include <new>

#include "linear.h"
#include "ort_kernel.h"

namespace carryall {
namespace {

constexpr int64_t kRows = 64;  // of a task

struct Node {
  const OrtApi* api;
  const Kernels* kernels;
  Weights weights;  // of one head, without data
  int64_t heads = 0;
};

struct Job {
  const Node* node;
  const float* x;
  const uint8_t* weights;
  float* y;
  int64_t rows;
};

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  Node node{api, nullptr, {}, 0};
  CARRYALL_TRY(find_kernels(api, &node.kernels));
  int64_t layout = 0, offsets = 0;
  CARRYALL_TRY(attribute(api, info, "layout", &layout));
  CARRYALL_TRY(check_layout(api, "the weights have", layout, kLayoutVersion));
  CARRYALL_TRY(attribute(api, info, "heads", &node.heads));
  CARRYALL_TRY(attribute(api, info, "inputs", &node.weights.inputs));
  CARRYALL_TRY(attribute(api, info, "outputs", &node.weights.outputs));
  CARRYALL_TRY(attribute(api, info, "bits", &node.weights.bits));
  CARRYALL_TRY(attribute(api, info, "offsets", &offsets));
  node.weights.offsets = static_cast<Offsets>(offsets);
  node.weights.block = 1;
  if (node.heads < 1 || node.heads > 4096) return failure(api, kInvalidArgument, "heads is not in [1, 4096]");
  if (const char* complaint = node.weights.complaint()) return failure(api, kInvalidArgument, complaint);
  if (!node.weights.floats() || node.weights.splits())
    return failure(api, kInvalidArgument, "weights of heads are floats of 16 or 32 bits, not split");
  *kernel = new (std::nothrow) Node(node);
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

void multiply(void* job, size_t index) {
  const Job& j = *static_cast<const Job*>(job);
  const int64_t heads = j.node->heads, i = static_cast<int64_t>(index), head = i % heads, first = i / heads * kRows;
  Weights weights = j.node->weights;
  weights.data = j.weights + head * weights.bytes();
  const Inputs x{j.x + head * weights.inputs, heads * weights.inputs};
  const Outputs y{j.y + head * weights.outputs, heads * weights.outputs};
  const int64_t last = first + kRows < j.rows ? first + kRows : j.rows;
  j.node->kernels->attention->products(weights, x, nullptr, first, last, 0, weights.tiles(), y);
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor x, weights;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  CARRYALL_TRY(read_tensor(node.api, context, 1, &weights));
  const int64_t width = node.heads * node.weights.inputs;
  if (x.rank == 0 || x.dimensions[x.rank - 1] != width)
    return failure(node.api, kInvalidArgument, "the last axis of x is not heads * inputs");
  if (weights.elements != node.heads * node.weights.bytes())
    return failure(node.api, kInvalidArgument, "the weights do not have the bytes of their sizes");
  const int64_t rows = x.elements / width;
  x.dimensions[x.rank - 1] = node.heads * node.weights.outputs;
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  if (rows == 0) return nullptr;
  Job job{&node, static_cast<const float*>(x.data), static_cast<const uint8_t*>(weights.data), y, rows};
  return run_tasks(node.api, context, multiply, static_cast<size_t>((rows + kRows - 1) / kRows * node.heads), &job);
}

}  // namespace

OrtCustomOp heads_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "HeadProducts"; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index == 0 ? kFloat : kUint8; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace carryall
