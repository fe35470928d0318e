// The operators of the domain `carryall`, as custom operators of onnxruntime.
//
// QuantizedLinear   x float [..., inputs], weights uint8, bias float [outputs] (optional) -> float [..., outputs]
// QuantizedRows     ids int64 [...], weights uint8 -> float [..., inputs]
// PagedAttention    see attention_operator.cpp
// CrossAttention    see cross_operator.cpp
// QuantizedExperts  see experts_operator.cpp
// SiluAndMul        see gate_operator.cpp
// Chain             see chain_operator.cpp
// DeltaRule, ShortConvolution  see recurrent_operator.cpp
// AllReduce, AllGather  see ranks_operator.cpp
// HeadProducts      see heads_operator.cpp
// SiluAndMul, DrawTokens on CUDA  see cuda_operators.cpp
//
// Attributes of the first two, integers: layout, inputs, outputs, bits, block_size, group_size, offsets (see layout.h).
#include <cstdio>
#include <mutex>
#include <new>

#include "cuda_operators.h"
#include "ort_kernel.h"

namespace carryall {
namespace {

struct Node {
  const OrtApi* api;
  const Kernels* kernels;
  Weights weights;  // without the data
};

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  int64_t layout, offsets;
  Weights w;
  CARRYALL_TRY(attribute(api, info, "layout", &layout));
  CARRYALL_TRY(check_layout(api, "the weights have", layout, kLayoutVersion));
  CARRYALL_TRY(attribute(api, info, "inputs", &w.inputs));
  CARRYALL_TRY(attribute(api, info, "outputs", &w.outputs));
  CARRYALL_TRY(attribute(api, info, "bits", &w.bits));
  CARRYALL_TRY(attribute(api, info, "block_size", &w.block));
  CARRYALL_TRY(attribute(api, info, "group_size", &w.group));
  CARRYALL_TRY(attribute(api, info, "offsets", &offsets));
  w.offsets = static_cast<Offsets>(offsets);
  if (const char* complaint = w.complaint()) return failure(api, kInvalidArgument, complaint);
  const Kernels* kernels = nullptr;
  CARRYALL_TRY(find_kernels(api, &kernels));
  *kernel = new (std::nothrow) Node{api, kernels, w};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

OrtStatus* read_weights(const Node& node, const OrtKernelContext* context, Weights* weights) {
  Tensor stored;
  CARRYALL_TRY(read_tensor(node.api, context, 1, &stored));
  *weights = node.weights;
  if (stored.data == nullptr || stored.elements != weights->bytes()) {
    char message[160];
    snprintf(message, sizeof message, "the weights have %lld bytes, not the %lld of a weight of %lld x %lld",
             static_cast<long long>(stored.elements), static_cast<long long>(weights->bytes()),
             static_cast<long long>(weights->inputs), static_cast<long long>(weights->outputs));
    return failure(node.api, kInvalidArgument, message);
  }
  weights->data = static_cast<const uint8_t*>(stored.data);
  return nullptr;
}

OrtStatus* compute_linear(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  const OrtApi* api = node.api;
  Weights weights;
  Tensor x, bias;
  CARRYALL_TRY(read_weights(node, context, &weights));
  CARRYALL_TRY(read_tensor(api, context, 0, &x));
  size_t inputs = 0;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, size_t*>(api, kKernelContextGetInputCount, context, &inputs)));
  if (inputs > 2) CARRYALL_TRY(read_tensor(api, context, 2, &bias));
  if (x.rank == 0 || x.dimensions[x.rank - 1] != weights.inputs)
    return failure(api, kInvalidArgument, "the last axis of x is not as long as the inputs of the weights");
  if (bias.data != nullptr && bias.elements != weights.outputs)
    return failure(api, kInvalidArgument, "the bias does not have one value for each output");
  x.dimensions[x.rank - 1] = weights.outputs;
  float* y = nullptr;
  CARRYALL_TRY(output(api, context, x.dimensions, x.rank, &y));
  const int64_t count = x.elements / weights.inputs;
  if (count == 0) return nullptr;
  const Workspace workspace(weights, count);
  if (!workspace.valid()) return failure(api, kFail, "out of memory for quantized rows");
  Job job{node.kernels, &weights, {static_cast<const float*>(x.data), weights.inputs}, static_cast<const float*>(bias.data),
          {y, weights.outputs}, count, workspace.rows()};
  job.plan_quantize();
  if (job.quantize_tasks() > 0) CARRYALL_TRY(run_tasks(api, context, quantize_task, job.quantize_tasks(), &job));
  job.plan_multiply();
  return run_tasks(api, context, multiply_task, job.multiply_tasks(), &job);
}

OrtStatus* compute_rows(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Weights weights;
  Tensor ids;
  CARRYALL_TRY(read_weights(node, context, &weights));
  CARRYALL_TRY(read_tensor(node.api, context, 0, &ids));
  const int64_t* numbers = static_cast<const int64_t*>(ids.data);
  for (int64_t i = 0; i < ids.elements; i++)
    if (numbers[i] < 0 || numbers[i] >= weights.outputs) {
      char message[120];
      snprintf(message, sizeof message, "id %lld is not in [0, %lld)", static_cast<long long>(numbers[i]),
               static_cast<long long>(weights.outputs));
      return failure(node.api, kInvalidArgument, message);
    }
  ids.dimensions[ids.rank] = weights.inputs;
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, ids.dimensions, ids.rank + 1, &y));
  for (int64_t i = 0; i < ids.elements; i++) read_row(weights, numbers[i], y + i * weights.inputs);
  return nullptr;
}

OrtCustomOp linear_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "QuantizedLinear"; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index == 1 ? kUint8 : kFloat; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 3; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 2 ? kOptional : kRequired; };
  op.KernelComputeV2 = compute_linear;
  return op;
}

OrtCustomOp rows_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "QuantizedRows"; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index == 1 ? kUint8 : kInt64; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.KernelComputeV2 = compute_rows;
  return op;
}

// The domain lives as long as the process, because sessions keep pointers to it, and all of them share one.
struct Domain {
  OrtCustomOpDomain* domain = nullptr;
  OrtCustomOp operators[12] = {linear_operator(), rows_operator(), attention_operator(), experts_operator(),
                              gate_operator(), chain_operator(), delta_operator(), convolution_operator(),
                              sum_operator(), join_operator(), heads_operator(), cross_operator()};
  OrtCustomOp on_cuda[kCudaOperators];
};

OrtStatus* make_domain(const OrtApi* api, Domain** made) {
  *made = new (std::nothrow) Domain;
  if (*made == nullptr) return failure(api, kFail, "out of memory");
  CARRYALL_TRY((call<OrtStatus*, const char*, OrtCustomOpDomain**>(api, kCreateCustomOpDomain, "carryall",
                                                                  &(*made)->domain)));
  const auto add = [&](const OrtCustomOp& each) {
    return call<OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*>(api, kCustomOpDomainAdd, (*made)->domain, &each);
  };
  for (const OrtCustomOp& each : (*made)->operators) CARRYALL_TRY(add(each));
  cuda_operators((*made)->on_cuda);
  for (const OrtCustomOp& each : (*made)->on_cuda) CARRYALL_TRY(add(each));
  return nullptr;
}

OrtStatus* add_domain(OrtSessionOptions* options, const OrtApi* api) {
  static std::mutex lock;
  static Domain* shared = nullptr;
  const std::lock_guard<std::mutex> guard(lock);
  if (shared == nullptr) {
    Domain* made = nullptr;
    CARRYALL_TRY(make_domain(api, &made));
    shared = made;
  }
  return call<OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*>(api, kAddCustomOpDomain, options, shared->domain);
}

}  // namespace
}  // namespace carryall

extern "C" CARRYALL_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(carryall::kApiVersion);
  if (api != nullptr) return carryall::add_domain(options, api);
  return carryall::failure(base->GetApi(1), carryall::kFail, "the kernels need onnxruntime 1.17 or newer");
}
