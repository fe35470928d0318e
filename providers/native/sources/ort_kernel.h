// What the operators have in common: tensors, attributes and threads of onnxruntime.
#pragma once
#include <cstdio>

#include "linear.h"
#include "ort_api.h"

namespace carryall {

constexpr size_t kMostDimensions = 16;

struct Tensor {
  void* data = nullptr;
  int64_t dimensions[kMostDimensions + 1];
  size_t rank = 0;
  int64_t elements = 0;
  int type = 0;  // of the elements; 0 if the input is absent

  bool ends_with(int64_t axis) const { return data != nullptr && rank > 0 && dimensions[rank - 1] == axis; }
};

#define CARRYALL_TRY(expression) \
  if (OrtStatus* status = (expression)) return status

inline OrtStatus* attribute(const OrtApi* api, const OrtKernelInfo* info, const char* name, int64_t* value) {
  return call<OrtStatus*, const OrtKernelInfo*, const char*, int64_t*>(api, kKernelInfoGetAttributeInt64, info, name,
                                                                      value);
}

inline OrtStatus* attribute(const OrtApi* api, const OrtKernelInfo* info, const char* name, float* value) {
  return call<OrtStatus*, const OrtKernelInfo*, const char*, float*>(api, kKernelInfoGetAttributeFloat, info, name,
                                                                    value);
}

inline OrtStatus* read_tensor(const OrtApi* api, const OrtKernelContext* context, size_t index, Tensor* tensor) {
  const OrtValue* value = nullptr;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**>(api, kKernelContextGetInput,
                                                                                   context, index, &value)));
  if (value == nullptr) return nullptr;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  CARRYALL_TRY((call<OrtStatus*, const OrtValue*, OrtTensorTypeAndShapeInfo**>(api, kGetTensorTypeAndShape, value,
                                                                              &info)));
  size_t elements = 0;
  OrtStatus* status =
      call<OrtStatus*, const OrtTensorTypeAndShapeInfo*, int*>(api, kGetTensorElementType, info, &tensor->type);
  if (status == nullptr)
    status = call<OrtStatus*, const OrtTensorTypeAndShapeInfo*, size_t*>(api, kGetDimensionsCount, info, &tensor->rank);
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

inline OrtStatus* output(const OrtApi* api, OrtKernelContext* context, const int64_t* dimensions, size_t rank, float** data,
                         size_t index = 0) {
  OrtValue* value = nullptr;
  CARRYALL_TRY((call<OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>(
      api, kKernelContextGetOutput, context, index, dimensions, rank, &value)));
  return call<OrtStatus*, OrtValue*, void**>(api, kGetTensorMutableData, value, reinterpret_cast<void**>(data));
}

// Refuses another version of a layout.
inline OrtStatus* check_layout(const OrtApi* api, const char* what, int64_t found, int64_t version) {
  if (found == version) return nullptr;
  char message[160];
  snprintf(message, sizeof message, "%s layout version %lld; these kernels read version %lld", what,
           static_cast<long long>(found), static_cast<long long>(version));
  return failure(api, kInvalidArgument, message);
}

// Runs the tasks on the threads of the session, in as many pieces as there are threads; `pieces` states another number.
inline OrtStatus* run_tasks(const OrtApi* api, OrtKernelContext* context, void (*task)(void*, size_t), size_t count, void* job,
                           size_t pieces = 0) {
  if (count > 1)
    return call<OrtStatus*, const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*>(
        api, kKernelContextParallelFor, context, task, count, pieces, job);
  task(job, 0);
  return nullptr;
}

// Finds the kernels of this processor, or those that a variable names.
inline OrtStatus* find_kernels(const OrtApi* api, const Kernels** found) {
  *found = choose_kernels(nullptr);
  if (*found != nullptr) return nullptr;
  return failure(api, kInvalidArgument, "CARRYALL_KERNELS_ISA names no instruction set of this processor");
}

inline int zero(const OrtCustomOp*) { return 0; }

// An operator with one float output.
inline OrtCustomOp common() {
  OrtCustomOp op = {};
  op.version = kApiVersion;
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU's
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) -> int { return 0; };
  op.GetVariadicInputMinArity = zero;
  op.GetVariadicInputHomogeneity = zero;
  op.GetVariadicOutputMinArity = zero;
  op.GetVariadicOutputHomogeneity = zero;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

OrtCustomOp attention_operator();
OrtCustomOp chain_operator();
OrtCustomOp convolution_operator();
OrtCustomOp cross_operator();
OrtCustomOp delta_operator();
OrtCustomOp experts_operator();
OrtCustomOp gate_operator();
OrtCustomOp heads_operator();
OrtCustomOp join_operator();
OrtCustomOp sum_operator();

}  // namespace carryall
