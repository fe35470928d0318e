// What the nodes of AllReduce and AllGather have on every device.
#pragma once
#include "ort_kernel.h"
#include "ranks.h"

namespace carryall {

struct RanksNode {
  const OrtApi* api;
  Ranks* group;
  uint64_t number;  // of the operator in the graph
  uint32_t rank;
  int64_t whole;  // columns of all ranks; 0: AllReduce
};

// Reads a node's attributes, and joins the group of this process.
inline OrtStatus* read_ranks_node(const OrtApi* api, const OrtKernelInfo* info, bool gathers, RanksNode* node) {
  int64_t rank, ranks, number, whole = 0;
  CARRYALL_TRY(attribute(api, info, "rank", &rank));
  CARRYALL_TRY(attribute(api, info, "ranks", &ranks));
  CARRYALL_TRY(attribute(api, info, "number", &number));
  if (gathers) CARRYALL_TRY(attribute(api, info, "whole", &whole));
  if (rank < 0 || rank >= ranks || ranks > 1024 || whole < 0)
    return failure(api, kInvalidArgument, "rank, ranks or whole are out of range");
  const char* complaint = nullptr;
  Ranks* group = Ranks::open(static_cast<uint32_t>(rank), static_cast<uint32_t>(ranks), &complaint);
  if (group == nullptr) return failure(api, kFail, complaint);
  *node = {api, group, static_cast<uint64_t>(number), static_cast<uint32_t>(rank), whole};
  return nullptr;
}

}  // namespace carryall
