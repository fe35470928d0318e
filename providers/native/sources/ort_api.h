// The few entries of onnxruntime's C API that are used here.
//
// onnxruntime promises that `OrtApi` is append-only: an entry keeps its index in all later versions. The indices below
// are those of include/onnxruntime/core/session/onnxruntime_c_api.h (the same in 1.17 and 1.29); the newest entry,
// KernelContext_ParallelFor, is of version 1.17. `GetApi(17)` is null if onnxruntime is older.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define CARRYALL_EXPORT __declspec(dllexport)
#else
#define CARRYALL_EXPORT __attribute__((visibility("default")))
#endif

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;
struct OrtOp;
struct OrtOpAttr;
struct OrtApi;

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

namespace carryall {

constexpr uint32_t kApiVersion = 17;

enum Entry : size_t {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorShapeElementCount = 64,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeFloat = 85,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelContextGetInputCount = 88,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelContextGetGPUComputeStream = 193,
  kCreateOpAttr = 211,
  kReleaseOpAttr = 212,
  kCreateOp = 213,
  kInvokeOp = 214,
  kReleaseOp = 215,
  kKernelContextParallelFor = 274,
};

template <class Result = OrtStatus*, class... Arguments>
Result call(const OrtApi* api, Entry entry, Arguments... arguments) {
  using Function = Result (*)(Arguments...);
  return reinterpret_cast<Function>(reinterpret_cast<void* const*>(api)[entry])(arguments...);
}

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

inline OrtStatus* failure(const OrtApi* api, ErrorCode code, const char* message) {
  return call<OrtStatus*, int, const char*>(api, kCreateStatus, code, message);
}

enum ElementType : int { kAnyType = 0, kFloat = 1, kUint8 = 2, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBfloat16 = 16 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

}  // namespace carryall

// The fields of version 1.17, in their order. Later ones are not read because `version` says 17.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};
