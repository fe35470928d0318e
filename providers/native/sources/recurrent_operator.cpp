// The operators DeltaRule and ShortConvolution; see recurrent.h.
//
// DeltaRule
//   0 query   float [..., key_heads * key_size]
//   1 key     float [..., key_heads * key_size]
//   2 value   float [..., heads * value_size]
//   3 decay   float [..., heads] or [..., heads * key_size]
//   4 beta    float [..., heads], optional
//   5 states  float, written in place
//   6 begins  int32 [rows + 1]
//   7 places  int32 [rows]
//   -> float [..., heads * value_size]
//   Attributes: layout, heads, key_heads, key_size, value_size, scale, bfloat16.
//
// ShortConvolution
//   0 x        float [..., channels]
//   1 weights  float [taps, channels]
//   2 bias     float [channels], optional
//   3 states   float, written in place
//   4 begins   int32 [rows + 1]
//   5 places   int32 [rows]
//   -> float [..., channels]
//   Attributes: layout, silu.
#include <initializer_list>
#include <new>

#include "ort_kernel.h"
#include "recurrent.h"

namespace carryall {
namespace {

struct DeltaNode {
  const OrtApi* api;
  const Kernels* kernels;
  DeltaRule rule;  // sizes only
};

struct ConvolutionNode {
  const OrtApi* api;
  const Kernels* kernels;
  bool silu;
};

OrtStatus* check_states(const OrtApi* api, const OrtKernelInfo* info) {
  int64_t layout;
  CARRYALL_TRY(attribute(api, info, "layout", &layout));
  return check_layout(api, "the states have", layout, kStateLayout);
}

OrtStatus* create_delta(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  DeltaRule r;
  CARRYALL_TRY(check_states(api, info));
  CARRYALL_TRY(attribute(api, info, "heads", &r.heads));
  CARRYALL_TRY(attribute(api, info, "key_heads", &r.key_heads));
  CARRYALL_TRY(attribute(api, info, "key_size", &r.key_size));
  CARRYALL_TRY(attribute(api, info, "value_size", &r.value_size));
  CARRYALL_TRY(attribute(api, info, "scale", &r.scale));
  int64_t bfloat16;
  CARRYALL_TRY(attribute(api, info, "bfloat16", &bfloat16));
  r.bfloat16 = bfloat16 != 0;
  if (const char* complaint = r.complaint()) return failure(api, kInvalidArgument, complaint);
  const Kernels* kernels = nullptr;
  CARRYALL_TRY(find_kernels(api, &kernels));
  *kernel = new (std::nothrow) DeltaNode{api, kernels, r};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

OrtStatus* create_convolution(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  int64_t silu;
  CARRYALL_TRY(check_states(api, info));
  CARRYALL_TRY(attribute(api, info, "silu", &silu));
  const Kernels* kernels = nullptr;
  CARRYALL_TRY(find_kernels(api, &kernels));
  *kernel = new (std::nothrow) ConvolutionNode{api, kernels, silu != 0};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

// Sets the states and rows of a run; returns what is wrong with them.
template <class Run>
const char* read_rows(const Tensor& states, const Tensor& begins, const Tensor& places, int64_t floats, Run* run) {
  if (begins.data == nullptr || places.data == nullptr || begins.elements != places.elements + 1)
    return "begins must have one number more than places";
  if (states.data == nullptr || floats < 1 || states.elements % floats != 0) return "the states have a wrong size";
  run->states = static_cast<float*>(states.data);
  run->states_count = states.elements / floats;
  run->begins = static_cast<const int32_t*>(begins.data);
  run->places = static_cast<const int32_t*>(places.data);
  run->rows = places.elements;
  return complaint_of_rows(run->begins, run->places, run->rows, run->tokens, run->states_count);
}

OrtStatus* compute_delta(void* kernel, OrtKernelContext* context) {
  const DeltaNode& node = *static_cast<const DeltaNode*>(kernel);
  const OrtApi* api = node.api;
  Tensor inputs[8];
  for (size_t i = 0; i < 8; i++) CARRYALL_TRY(read_tensor(api, context, i, inputs + i));
  DeltaRule r = node.rule;
  const int64_t keys = r.key_heads * r.key_size, values = r.heads * r.value_size;
  if (!inputs[2].ends_with(values)) return failure(api, kInvalidArgument, "values do not have all heads");
  r.tokens = inputs[2].elements / values;
  for (size_t i : {size_t{0}, size_t{1}})
    if (!inputs[i].ends_with(keys) || inputs[i].elements != r.tokens * keys)
      return failure(api, kInvalidArgument, "queries or keys do not have all heads of each token");
  r.by_key = r.key_size > 1 && inputs[3].ends_with(r.heads * r.key_size);
  if (inputs[3].data == nullptr || inputs[3].elements != r.tokens * r.heads * (r.by_key ? r.key_size : 1))
    return failure(api, kInvalidArgument, "decays do not have all heads of each token");
  if (inputs[4].data != nullptr && inputs[4].elements != r.tokens * r.heads)
    return failure(api, kInvalidArgument, "beta does not have all heads of each token");
  const float* floats[5];
  for (size_t i = 0; i < 5; i++) floats[i] = static_cast<const float*>(inputs[i].data);
  r.query = floats[0], r.key = floats[1], r.value = floats[2], r.decay = floats[3], r.beta = floats[4];
  const int64_t state = r.heads * r.state_lines() * 16;
  if (const char* wrong = read_rows(inputs[5], inputs[6], inputs[7], state, &r))
    return failure(api, kInvalidArgument, wrong);
  CARRYALL_TRY(output(api, context, inputs[2].dimensions, inputs[2].rank, &r.output));
  if (r.tokens == 0) return nullptr;
  DeltaJob job(r, *node.kernels);
  if (!job.valid()) return failure(api, kFail, "out of memory for linear attention");
  for (size_t piece = 0; piece < job.pieces(); piece++) {
    job.start(piece);
    CARRYALL_TRY(run_tasks(api, context, DeltaJob::prepare, job.prepare_tasks(), &job));
    CARRYALL_TRY(run_tasks(api, context, DeltaJob::delta, job.delta_tasks(), &job));
  }
  return nullptr;
}

OrtStatus* compute_convolution(void* kernel, OrtKernelContext* context) {
  const ConvolutionNode& node = *static_cast<const ConvolutionNode*>(kernel);
  const OrtApi* api = node.api;
  Tensor inputs[6];
  for (size_t i = 0; i < 6; i++) CARRYALL_TRY(read_tensor(api, context, i, inputs + i));
  Convolution c;
  if (inputs[1].data == nullptr || inputs[1].rank != 2) return failure(api, kInvalidArgument, "the weights have a wrong rank");
  c.taps = inputs[1].dimensions[0], c.channels = inputs[1].dimensions[1], c.silu = node.silu;
  if (const char* wrong = c.complaint()) return failure(api, kInvalidArgument, wrong);
  if (!inputs[0].ends_with(c.channels)) return failure(api, kInvalidArgument, "x does not have all channels");
  if (inputs[2].data != nullptr && inputs[2].elements != c.channels)
    return failure(api, kInvalidArgument, "the bias does not have all channels");
  c.tokens = inputs[0].elements / c.channels;
  c.x = static_cast<const float*>(inputs[0].data);
  c.weights = static_cast<const float*>(inputs[1].data);
  c.bias = static_cast<const float*>(inputs[2].data);
  const int64_t state = (c.taps - 1) * c.channels;
  if (const char* wrong = read_rows(inputs[3], inputs[4], inputs[5], state, &c))
    return failure(api, kInvalidArgument, wrong);
  CARRYALL_TRY(output(api, context, inputs[0].dimensions, inputs[0].rank, &c.output));
  if (c.tokens == 0) return nullptr;
  ConvolutionJob job{&c, &node.kernels->attention->recurrent};
  return run_tasks(api, context, ConvolutionJob::convolve, job.tasks(), &job);
}

}  // namespace

OrtCustomOp delta_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create_delta;
  op.KernelDestroy = [](void* kernel) { delete static_cast<DeltaNode*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "DeltaRule"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 8; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index < 6 ? kFloat : kInt32; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 4 ? kOptional : kRequired; };
  op.KernelComputeV2 = compute_delta;
  return op;
}

OrtCustomOp convolution_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create_convolution;
  op.KernelDestroy = [](void* kernel) { delete static_cast<ConvolutionNode*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "ShortConvolution"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 6; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index < 4 ? kFloat : kInt32; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 2 ? kOptional : kRequired; };
  op.KernelComputeV2 = compute_convolution;
  return op;
}

}  // namespace carryall
