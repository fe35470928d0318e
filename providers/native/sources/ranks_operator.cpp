// The operators of models that are cut over processes, see ranks.h.
//
//   AllReduce  x float [...] -> the sum of x of all ranks, in the order of ranks, so equal to the bit in all of them
//   AllGather  x float [..., own] -> the x of all ranks side by side, float [..., whole]
//
// Attributes, integers: rank, ranks, number (of the operator in the graph); AllGather: whole.
#include <new>

#include "ranks_operator.h"

namespace carryall {
namespace {

using Node = RanksNode;

template <bool kGathers>
OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  Node node;
  CARRYALL_TRY(read_ranks_node(api, info, kGathers, &node));
  *kernel = new (std::nothrow) Node(node);
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

OrtStatus* compute_sum(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor x;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  const char* complaint =
      node.group->add(node.number, 1, {static_cast<float*>(x.data), x.elements, x.elements}, {y, x.elements, x.elements});
  return complaint == nullptr ? nullptr : failure(node.api, kFail, complaint);
}

OrtStatus* compute_joined(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor x;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  if (x.rank == 0 || x.dimensions[x.rank - 1] <= 0 || x.dimensions[x.rank - 1] > node.whole)
    return failure(node.api, kInvalidArgument, "the last axis of x is not a part of the whole");
  const int64_t own = x.dimensions[x.rank - 1], rows = x.elements / own;
  x.dimensions[x.rank - 1] = node.whole;
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  const char* complaint =
      node.group->join(node.number, rows, {static_cast<float*>(x.data), own, own}, {y, node.whole, node.whole});
  return complaint == nullptr ? nullptr : failure(node.api, kFail, complaint);
}

OrtCustomOp collective() {
  OrtCustomOp op = common();
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetInputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  return op;
}

}  // namespace

OrtCustomOp sum_operator() {
  OrtCustomOp op = collective();
  op.CreateKernelV2 = create<false>;
  op.GetName = [](const OrtCustomOp*) { return "AllReduce"; };
  op.KernelComputeV2 = compute_sum;
  return op;
}

OrtCustomOp join_operator() {
  OrtCustomOp op = collective();
  op.CreateKernelV2 = create<true>;
  op.GetName = [](const OrtCustomOp*) { return "AllGather"; };
  op.KernelComputeV2 = compute_joined;
  return op;
}

}  // namespace carryall
