// The operators of the domain `carryall`, as custom operators of onnxruntime.
//
// QuantizedLinear   x float [..., inputs], weights uint8, bias float [outputs] (optional) -> float [..., outputs]
// QuantizedRows     ids int64 [...], weights uint8 -> float [..., inputs]
//
// Attributes of both, integers: layout, inputs, outputs, bits, block_size, offsets (see layout.h).
#include <cstdio>
#include <new>

#include "linear.h"
#include "ort_api.h"

namespace carryall {
namespace {

constexpr size_t kMostDimensions = 16;

struct Node {
  const OrtApi* api;
  const Kernels* kernels;
  Weights weights;  // without the data
};

struct Tensor {
  void* data = nullptr;
  int64_t dimensions[kMostDimensions + 1];
  size_t rank = 0;
  int64_t elements = 0;
};

#define CARRYALL_TRY(expression) \
  if (OrtStatus* status = (expression)) return status

OrtStatus* attribute(const OrtApi* api, const OrtKernelInfo* info, const char* name, int64_t* value) {
  return call<OrtStatus*, const OrtKernelInfo*, const char*, int64_t*>(api, kKernelInfoGetAttributeInt64, info, name,
                                                                      value);
}

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  int64_t layout, offsets;
  Weights w;
  CARRYALL_TRY(attribute(api, info, "layout", &layout));
  char message[160];
  if (layout != kLayoutVersion) {
    snprintf(message, sizeof message, "the weights have layout version %lld; these kernels read version %lld",
             static_cast<long long>(layout), static_cast<long long>(kLayoutVersion));
    return failure(api, kInvalidArgument, message);
  }
  CARRYALL_TRY(attribute(api, info, "inputs", &w.inputs));
  CARRYALL_TRY(attribute(api, info, "outputs", &w.outputs));
  CARRYALL_TRY(attribute(api, info, "bits", &w.bits));
  CARRYALL_TRY(attribute(api, info, "block_size", &w.block));
  CARRYALL_TRY(attribute(api, info, "offsets", &offsets));
  w.offsets = static_cast<Offsets>(offsets);
  if (const char* complaint = w.complaint()) return failure(api, kInvalidArgument, complaint);
  const Kernels* kernels = choose_kernels(nullptr);
  if (kernels == nullptr)
    return failure(api, kInvalidArgument, "CARRYALL_KERNELS_ISA names no instruction set of this processor");
  *kernel = new (std::nothrow) Node{api, kernels, w};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

OrtStatus* read_tensor(const OrtApi* api, const OrtKernelContext* context, size_t index, Tensor* tensor) {
  const OrtValue* value = nullptr;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**>(api, kKernelContextGetInput,
                                                                                   context, index, &value)));
  if (value == nullptr) return nullptr;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  CARRYALL_TRY((call<OrtStatus*, const OrtValue*, OrtTensorTypeAndShapeInfo**>(api, kGetTensorTypeAndShape, value,
                                                                              &info)));
  size_t elements = 0;
  OrtStatus* status =
      call<OrtStatus*, const OrtTensorTypeAndShapeInfo*, size_t*>(api, kGetDimensionsCount, info, &tensor->rank);
  if (status == nullptr && tensor->rank > kMostDimensions)
    status = failure(api, kInvalidArgument, "a tensor has more than 16 dimensions");
  if (status == nullptr)
    status = call<OrtStatus*, const OrtTensorTypeAndShapeInfo*, int64_t*, size_t>(api, kGetDimensions, info,
                                                                                 tensor->dimensions, tensor->rank);
  if (status == nullptr)
    status = call<OrtStatus*, const OrtTensorTypeAndShapeInfo*, size_t*>(api, kGetTensorShapeElementCount, info,
                                                                        &elements);
  call<void, OrtTensorTypeAndShapeInfo*>(api, kReleaseTensorTypeAndShapeInfo, info);
  tensor->elements = static_cast<int64_t>(elements);
  if (status != nullptr) return status;
  return call<OrtStatus*, OrtValue*, void**>(api, kGetTensorMutableData, const_cast<OrtValue*>(value), &tensor->data);
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

OrtStatus* output(const OrtApi* api, OrtKernelContext* context, const int64_t* dimensions, size_t rank, float** data) {
  OrtValue* value = nullptr;
  CARRYALL_TRY((call<OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>(
      api, kKernelContextGetOutput, context, 0, dimensions, rank, &value)));
  return call<OrtStatus*, OrtValue*, void**>(api, kGetTensorMutableData, value, reinterpret_cast<void**>(data));
}

// Runs the tasks on the threads of the session.
OrtStatus* run_tasks(const OrtApi* api, OrtKernelContext* context, void (*task)(void*, size_t), size_t count, Job* job) {
  if (count > 1)
    return call<OrtStatus*, const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*>(
        api, kKernelContextParallelFor, context, task, count, 0, job);
  task(job, 0);
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
  Job job{node.kernels, &weights, static_cast<const float*>(x.data), static_cast<const float*>(bias.data), y, count,
          workspace.rows()};
  job.plan_quantize();
  CARRYALL_TRY(run_tasks(api, context, quantize_task, job.quantize_tasks(), &job));
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

int zero(const OrtCustomOp*) { return 0; }

OrtCustomOp common() {
  OrtCustomOp op = {};
  op.version = kApiVersion;
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU's
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) -> int { return 0; };
  op.GetVariadicInputMinArity = zero;
  op.GetVariadicInputHomogeneity = zero;
  op.GetVariadicOutputMinArity = zero;
  op.GetVariadicOutputHomogeneity = zero;
  op.CreateKernelV2 = create;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

OrtCustomOp linear_operator() {
  OrtCustomOp op = common();
  op.GetName = [](const OrtCustomOp*) { return "QuantizedLinear"; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index == 1 ? kUint8 : kFloat; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 3; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 2 ? kOptional : kRequired; };
  op.KernelComputeV2 = compute_linear;
  return op;
}

OrtCustomOp rows_operator() {
  OrtCustomOp op = common();
  op.GetName = [](const OrtCustomOp*) { return "QuantizedRows"; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index == 1 ? kUint8 : kInt64; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.KernelComputeV2 = compute_rows;
  return op;
}

// The domain lives as long as the process: sessions keep pointers to it.
struct Domain {
  OrtCustomOpDomain* domain = nullptr;
  OrtCustomOp operators[2] = {linear_operator(), rows_operator()};
};

OrtStatus* add_domain(OrtSessionOptions* options, const OrtApi* api) {
  Domain* made = new (std::nothrow) Domain;
  if (made == nullptr) return failure(api, kFail, "out of memory");
  CARRYALL_TRY((call<OrtStatus*, const char*, OrtCustomOpDomain**>(api, kCreateCustomOpDomain, "carryall",
                                                                  &made->domain)));
  for (const OrtCustomOp& each : made->operators)
    CARRYALL_TRY((call<OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*>(api, kCustomOpDomainAdd, made->domain,
                                                                          &each)));
  return call<OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*>(api, kAddCustomOpDomain, options, made->domain);
}

}  // namespace
}  // namespace carryall

extern "C" CARRYALL_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(carryall::kApiVersion);
  if (api != nullptr) return carryall::add_domain(options, api);
  return carryall::failure(base->GetApi(1), carryall::kFail, "the kernels need onnxruntime 1.17 or newer");
}
