// AllReduce and AllGather of ranks_operator.cpp on CUDA, by NCCL, in float: graphs of 16 bits convert what they add.
//
// AllGather writes its part between zeros and adds: the parts of ranks may have any widths, and it is rare in decoders.
#include <cstring>
#include <new>

#include "cuda_driver.h"
#include "cuda_operators.h"
#include "nccl.h"
#include "ranks_operator.h"

namespace carryall {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 4096;

struct Node : RanksNode {
  int64_t offset = -1;  // of AllGather: the first column of this rank, -1 before it is known
  CudaKernel spread{};
};

template <bool kGathers>
OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  Node node;
  CARRYALL_TRY(read_ranks_node(api, info, kGathers, &node));
  const char* wrong = join_nccl(node.group, node.rank);
  if (wrong == nullptr && kGathers) wrong = find_cuda_kernel("spread_part", &node.spread);
  if (wrong != nullptr) return failure(api, kFail, wrong);
  *kernel = new (std::nothrow) Node(node);
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

OrtStatus* stream_of(const Node& node, const OrtKernelContext* context, void** stream) {
  return call<OrtStatus*, const OrtKernelContext*, void**>(node.api, kKernelContextGetGPUComputeStream, context, stream);
}

OrtStatus* compute_sum(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor x;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  void* stream = nullptr;
  CARRYALL_TRY(stream_of(node, context, &stream));
  const char* wrong = x.elements == 0 ? nullptr : add_over_ranks(static_cast<const float*>(x.data), y, x.elements, stream);
  return wrong == nullptr ? nullptr : failure(node.api, kFail, wrong);
}

// Tells the other ranks the width of this one's part, and finds where it begins. It is done in the first run.
const char* find_offset(Node* node, int64_t own) {
  memcpy(node->group->own(), &own, sizeof own);
  if (const char* wrong = node->group->meet(node->number << 40 ^ static_cast<uint64_t>(node->whole))) return wrong;
  int64_t sum = 0, offset = 0;
  for (uint32_t rank = 0; rank < node->group->ranks(); rank++) {
    int64_t width;
    memcpy(&width, node->group->of(rank), sizeof width);
    if (rank == node->rank) offset = sum;
    if (width <= 0 || width > node->whole - sum) return "the parts of the ranks are longer than the whole";
    sum += width;
  }
  if (sum != node->whole) return "the parts of the ranks are shorter than the whole";
  node->offset = offset;
  return nullptr;
}

OrtStatus* compute_joined(void* kernel, OrtKernelContext* context) {
  Node& node = *static_cast<Node*>(kernel);
  Tensor x;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  if (x.rank == 0 || x.dimensions[x.rank - 1] <= 0 || x.dimensions[x.rank - 1] > node.whole)
    return failure(node.api, kInvalidArgument, "the last axis of x is not a part of the whole");
  int64_t own = x.dimensions[x.rank - 1], rows = x.elements / own;
  if (node.offset < 0)
    if (const char* wrong = find_offset(&node, own)) return failure(node.api, kFail, wrong);
  x.dimensions[x.rank - 1] = node.whole;
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  if (rows == 0) return nullptr;
  void* stream = nullptr;
  CARRYALL_TRY(stream_of(node, context, &stream));
  void* arguments[] = {&x.data, &y, &rows, &own, &node.whole, &node.offset};
  const int64_t blocks = (rows * node.whole + kThreads - 1) / kThreads;
  const char* wrong = node.spread.launch(blocks < kBlocks ? blocks : kBlocks, kThreads, stream, arguments);
  if (wrong == nullptr) wrong = add_over_ranks(y, y, rows * node.whole, stream);
  return wrong == nullptr ? nullptr : failure(node.api, kFail, wrong);
}

template <bool kGathers>
OrtCustomOp collective() {
  OrtCustomOp op = common();
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return CARRYALL_CUDA_PROVIDER; };
  op.CreateKernelV2 = create<kGathers>;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return kGathers ? "AllGather" : "AllReduce"; };
  op.GetInputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.KernelComputeV2 = kGathers ? compute_joined : compute_sum;
  return op;
}

}  // namespace

void cuda_collectives(OrtCustomOp* operators) {
  operators[0] = collective<false>();
  operators[1] = collective<true>();
}

}  // namespace carryall
