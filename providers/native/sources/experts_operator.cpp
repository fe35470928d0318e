// The operator QuantizedExperts: the mixture of experts of docs/contract.md on weights in tiles.
//
//   0 x        float [..., hidden]
//   1 scores   float [..., num_experts], the router's logits; with 6 float [..., per_token], the shares of the chosen
//   2 in       uint8 [num_experts, ...], the tiles of gate, then those of up, of each expert; without a gate those of up
//   3 out      uint8 [num_experts, ...], the tiles of down
//   4 bias     float [num_experts, outputs of 2 in whole tiles], optional
//   5 bias     float [num_experts, outputs], optional
//   6 chosen   int64 [..., per_token], the experts of each token, optional: without, those of the largest scores, whose
//              shares are the softmax of all scores, or of theirs (normalize)
//   -> float [..., outputs]
//
// Of ranks, each computes `width` of the `inputs` of down, which they join (see ranks.h), and some of its outputs.
//
// Attributes: layout, num_experts, per_token, normalize, hidden, width, inputs, outputs, rank, ranks (0: there are none),
// number (see ranks_operator.cpp), bits, block_size, offsets (see layout.h),
// activation, gated (see experts.h), and alpha, beta, limit of a gated SiLU (see gate.h).
#include <cstdio>
#include <new>

#include "experts.h"
#include "ranks_operator.h"

namespace carryall {
namespace {

struct Node {
  const OrtApi* api;
  const Kernels* kernels;
  ExpertSizes sizes;  // without the data of the weights
};

enum Input : size_t { kX, kScores, kIn, kOut, kBiasIn, kBiasOut, kChosen, kInputs };

struct FormNames {
  const char *bits, *block, *group, *offsets;
};

OrtStatus* read_form(const OrtApi* api, const OrtKernelInfo* info, const FormNames& names, Weights* weights) {
  int64_t offsets;
  CARRYALL_TRY(attribute(api, info, names.bits, &weights->bits));
  CARRYALL_TRY(attribute(api, info, names.block, &weights->block));
  CARRYALL_TRY(attribute(api, info, names.group, &weights->group));
  CARRYALL_TRY(attribute(api, info, names.offsets, &offsets));
  weights->offsets = static_cast<Offsets>(offsets);
  return nullptr;
}

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  int64_t layout, activation, number;
  ExpertSizes s;
  CARRYALL_TRY(attribute(api, info, "layout", &layout));
  CARRYALL_TRY(check_layout(api, "the weights have", layout, kLayoutVersion));
  CARRYALL_TRY(attribute(api, info, "num_experts", &s.experts));
  CARRYALL_TRY(attribute(api, info, "per_token", &s.per_token));
  CARRYALL_TRY(attribute(api, info, "normalize", &s.normalize));
  CARRYALL_TRY(attribute(api, info, "hidden", &s.hidden));
  CARRYALL_TRY(attribute(api, info, "width", &s.width));
  CARRYALL_TRY(attribute(api, info, "inputs", &s.out.inputs));
  CARRYALL_TRY(attribute(api, info, "outputs", &s.out.outputs));
  CARRYALL_TRY(join_ranks(api, info, &s.group));
  CARRYALL_TRY(attribute(api, info, "number", &number));
  CARRYALL_TRY(read_form(api, info, {"bits", "block_size", "group_size", "offsets"}, &s.in));
  CARRYALL_TRY(read_form(api, info, {"out_bits", "out_block_size", "out_group_size", "out_offsets"}, &s.out));
  CARRYALL_TRY(attribute(api, info, "activation", &activation));
  CARRYALL_TRY(attribute(api, info, "gated", &s.gated));
  CARRYALL_TRY(attribute(api, info, "alpha", &s.gate.alpha));
  CARRYALL_TRY(attribute(api, info, "beta", &s.gate.beta));
  CARRYALL_TRY(attribute(api, info, "limit", &s.gate.limit));
  s.activation = static_cast<ExpertActivation>(activation);
  s.number = static_cast<uint64_t>(number);
  s.in.inputs = s.hidden;
  s.in.outputs = s.width > 0 && s.width <= kLargest ? (s.gated != 0 ? 2 : 1) * s.padded() : 0;
  if (const char* complaint = s.complaint()) return failure(api, kInvalidArgument, complaint);
  const Kernels* kernels = nullptr;
  CARRYALL_TRY(find_kernels(api, &kernels));
  *kernel = new (std::nothrow) Node{api, kernels, s};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

const char* check_routes(const Tensor& scores, const Tensor& chosen, const ExpertSizes& s, int64_t tokens) {
  if (chosen.data == nullptr)
    return scores.ends_with(s.experts) && scores.elements == tokens * s.experts
               ? nullptr
               : "there is not one score for each token and expert";
  const Tensor* const routes[] = {&scores, &chosen};
  for (const Tensor* each : routes)
    if (!each->ends_with(s.per_token) || each->elements != tokens * s.per_token)
      return "there is not one share and one chosen expert for each token and place";
  if (chosen.type != kInt64) return "the chosen experts are not int64";
  const auto* experts = static_cast<const int64_t*>(chosen.data);
  for (int64_t i = 0; i < chosen.elements; i++)
    if (experts[i] < 0 || experts[i] >= s.experts) return "a chosen expert is not in [0, num_experts)";
  return nullptr;
}

// Sets the weights and returns what is wrong with the inputs, nullptr if nothing is.
const char* read_inputs(const Tensor* inputs, ExpertSizes* s) {
  const Tensor& x = inputs[kX];
  if (x.rank == 0 || x.dimensions[x.rank - 1] != s->hidden) return "the last axis of x is not as long as hidden";
  if (const char* complaint = check_routes(inputs[kScores], inputs[kChosen], *s, x.elements / s->hidden))
    return complaint;
  if (inputs[kIn].elements != s->experts * s->in.bytes()) return "the first weights have a wrong number of bytes";
  if (inputs[kOut].elements != s->experts * s->out.bytes()) return "the second weights have a wrong number of bytes";
  if (inputs[kBiasIn].data != nullptr && inputs[kBiasIn].elements != s->experts * s->in.outputs)
    return "the first bias does not have one value for each output of each expert";
  if (inputs[kBiasOut].data != nullptr && inputs[kBiasOut].elements != s->experts * s->out.outputs)
    return "the second bias does not have one value for each output of each expert";
  s->in.data = static_cast<const uint8_t*>(inputs[kIn].data);
  s->out.data = static_cast<const uint8_t*>(inputs[kOut].data);
  return nullptr;
}

OrtStatus* run_job(const OrtApi* api, OrtKernelContext* context, ExpertsJob* job) {
  CARRYALL_TRY(run_tasks(api, context, ExpertsJob::route, job->tokens(), job));
  job->sort();
  CARRYALL_TRY(run_tasks(api, context, ExpertsJob::quantize, job->copies(), job));
  CARRYALL_TRY(run_tasks(api, context, ExpertsJob::enter, job->enter_tasks(), job));
  CARRYALL_TRY(run_tasks(api, context, ExpertsJob::between, job->copies(), job));
  if (const char* complaint = job->meet()) return failure(api, kFail, complaint);
  CARRYALL_TRY(run_tasks(api, context, ExpertsJob::round, job->copies(), job));
  CARRYALL_TRY(run_tasks(api, context, ExpertsJob::leave, job->leave_tasks(), job));
  return run_tasks(api, context, ExpertsJob::combine, job->tokens(), job);
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  const OrtApi* api = node.api;
  ExpertSizes sizes = node.sizes;
  Tensor inputs[kInputs];
  size_t given = 0;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, size_t*>(api, kKernelContextGetInputCount, context, &given)));
  for (size_t i = 0; i < given && i < kInputs; i++) CARRYALL_TRY(read_tensor(api, context, i, inputs + i));
  if (const char* complaint = read_inputs(inputs, &sizes)) return failure(api, kInvalidArgument, complaint);
  Tensor& x = inputs[kX];
  x.dimensions[x.rank - 1] = sizes.out.outputs;
  float* y = nullptr;
  CARRYALL_TRY(output(api, context, x.dimensions, x.rank, &y));
  if (x.elements == 0) return nullptr;
  const auto floats = [&inputs](Input index) { return static_cast<const float*>(inputs[index].data); };
  const ExpertsJob::Inputs read = {floats(kX), floats(kScores), static_cast<const int64_t*>(inputs[kChosen].data),
                                   floats(kBiasIn), floats(kBiasOut)};
  ExpertsJob job(sizes, *node.kernels, read, x.elements / sizes.hidden, y);
  if (!job.valid()) return failure(api, kFail, "out of memory for a mixture of experts");
  return run_job(api, context, &job);
}

}  // namespace

OrtCustomOp experts_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "QuantizedExperts"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputs; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int {
    return index == kChosen ? kInt64 : index == kIn || index == kOut ? kUint8 : kFloat;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int {
    return index >= kBiasIn ? kOptional : kRequired;
  };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace carryall
