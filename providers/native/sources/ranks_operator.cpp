// The operators of models that are cut over processes, see ranks.h.
//
//   AllReduce  x float [...] -> the sum of x of all ranks, in the order of ranks, so equal to the bit in all of them
//   AllGather  x float [..., own] -> the x of all ranks side by side, float [..., whole]
//
// Attributes, integers: rank, ranks, number (of the operator in the graph); AllGather: whole.
#include <cstring>
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
  Ranks& group = *node.group;
  Tensor x;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  const float* from = static_cast<const float*>(x.data);
  const int64_t step = static_cast<int64_t>(group.capacity() / sizeof(float));
  for (int64_t first = 0; first < x.elements; first += step) {
    const int64_t count = x.elements - first < step ? x.elements - first : step;
    memcpy(group.own(), from + first, static_cast<size_t>(count) * sizeof(float));
    if (const char* complaint = group.meet(node.number << 40 ^ static_cast<uint64_t>(x.elements)))
      return failure(node.api, kFail, complaint);
    memcpy(y + first, group.of(0), static_cast<size_t>(count) * sizeof(float));
    for (uint32_t rank = 1; rank < group.ranks(); rank++) {
      const float* other = reinterpret_cast<const float*>(group.of(rank));
      for (int64_t i = 0; i < count; i++) y[first + i] += other[i];
    }
  }
  return nullptr;
}

OrtStatus* compute_joined(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Ranks& group = *node.group;
  Tensor x;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  if (x.rank == 0 || x.dimensions[x.rank - 1] <= 0 || x.dimensions[x.rank - 1] > node.whole)
    return failure(node.api, kInvalidArgument, "the last axis of x is not a part of the whole");
  const int64_t own = x.dimensions[x.rank - 1], rows = x.elements / own;
  x.dimensions[x.rank - 1] = node.whole;
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  // A buffer begins with the width of the part, in 16 bytes.
  const int64_t room = static_cast<int64_t>((group.capacity() - 16) / sizeof(float)), step = room / node.whole;
  if (step == 0) return failure(node.api, kInvalidArgument, "the rows are longer than the memory of the ranks");
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = rows - first < step ? rows - first : step;
    memcpy(group.own(), &own, sizeof own);
    memcpy(group.own() + 16, static_cast<const float*>(x.data) + first * own,
           static_cast<size_t>(count * own) * sizeof(float));
    if (const char* complaint = group.meet(node.number << 40 ^ static_cast<uint64_t>(rows)))
      return failure(node.api, kFail, complaint);
    int64_t offset = 0;
    for (uint32_t rank = 0; rank < group.ranks(); rank++) {
      int64_t width;
      memcpy(&width, group.of(rank), sizeof width);
      if (width <= 0 || width > node.whole - offset)
        return failure(node.api, kFail, "the parts of the ranks are longer than the whole");
      const float* part = reinterpret_cast<const float*>(group.of(rank) + 16);
      for (int64_t row = 0; row < count; row++)
        memcpy(y + (first + row) * node.whole + offset, part + row * width, static_cast<size_t>(width) * sizeof(float));
      offset += width;
    }
    if (offset != node.whole) return failure(node.api, kFail, "the parts of the ranks are shorter than the whole");
  }
  return nullptr;
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
