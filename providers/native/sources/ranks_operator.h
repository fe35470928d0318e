// What operators over ranks have on every device.
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

// Joins the group that the attributes rank and ranks name; none if ranks is 0.
inline OrtStatus* join_ranks(const OrtApi* api, const OrtKernelInfo* info, Ranks** group) {
  int64_t rank, ranks;
  CARRYALL_TRY(attribute(api, info, "rank", &rank));
  CARRYALL_TRY(attribute(api, info, "ranks", &ranks));
  if (rank == 0 && ranks == 0) return nullptr;
  if (rank < 0 || rank >= ranks || ranks > kMostRanks) return failure(api, kInvalidArgument, "rank or ranks are out of range");
  const char* complaint = nullptr;
  *group = Ranks::open(static_cast<uint32_t>(rank), static_cast<uint32_t>(ranks), &complaint);
  return *group == nullptr ? failure(api, kFail, complaint) : nullptr;
}

// Reads a node's attributes, and joins the group of this process.
inline OrtStatus* read_ranks_node(const OrtApi* api, const OrtKernelInfo* info, bool gathers, RanksNode* node) {
  int64_t rank, number, whole = 0;
  Ranks* group = nullptr;
  CARRYALL_TRY(join_ranks(api, info, &group));
  if (group == nullptr) return failure(api, kInvalidArgument, "there is no rank but this");
  CARRYALL_TRY(attribute(api, info, "rank", &rank));
  CARRYALL_TRY(attribute(api, info, "number", &number));
  if (gathers) CARRYALL_TRY(attribute(api, info, "whole", &whole));
  if (whole < 0) return failure(api, kInvalidArgument, "whole is negative");
  *node = {api, group, static_cast<uint64_t>(number), static_cast<uint32_t>(rank), whole};
  return nullptr;
}

}  // namespace carryall
