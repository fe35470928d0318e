// MatMulNBits of 4 bits in half: carryall's kernel for 17 to 128 rows, onnxruntime's for others.
//
// Few rows are faster with onnxruntime's, which has kernels for up to 16; many with weights that are unpacked once. Which
// one computes depends on the shape alone, so that a captured run always replays the one that it recorded.
//
// There are no zero points: onnxruntime's kernel reads their type from the graph, and a nested operator has none there.
#include <new>

#include "cuda_driver.h"
#include "cuda_operators.h"
#include "ort_kernel.h"

namespace carryall {
namespace {

constexpr int kThreads = 256, kColumns = 16;  // those of int4_product.cu
constexpr int kSizes = 3, kAttributes = 5;
constexpr int64_t kMost[kSizes] = {32, 64, 128}, kLeast = 17;
constexpr size_t kInputs = 3;

struct Node {
  const OrtApi* api;
  OrtOp* other;  // onnxruntime's
  CudaKernel kernels[kSizes];
  int64_t inner, columns, group;
};

struct Attributes {
  const OrtApi* api;
  OrtOpAttr* made[kAttributes] = {};

  explicit Attributes(const OrtApi* api) : api(api) {}
  ~Attributes() {
    for (OrtOpAttr* each : made)
      if (each != nullptr) call<void, OrtOpAttr*>(api, kReleaseOpAttr, each);
  }
  OrtStatus* add(int index, const char* name, int64_t value) {
    constexpr int kInteger = 1;
    return call<OrtStatus*, const char*, const void*, int, int, OrtOpAttr**>(api, kCreateOpAttr, name, &value, 1, kInteger,
                                                                            made + index);
  }
};

// Finds onnxruntime's operator for the provider of the node.
OrtStatus* find_other(const OrtApi* api, const OrtKernelInfo* info, Node* node) {
  Attributes attributes(api);
  CARRYALL_TRY(attributes.add(0, "K", node->inner));
  CARRYALL_TRY(attributes.add(1, "N", node->columns));
  CARRYALL_TRY(attributes.add(2, "bits", 4));
  CARRYALL_TRY(attributes.add(3, "block_size", node->group));
  CARRYALL_TRY(attributes.add(4, "accuracy_level", 0));  // the default, which operators without a graph do not get
  const char* names[] = {"T1", "T2"};
  const int types[] = {kFloat16, kUint8};
  return call<OrtStatus*, const OrtKernelInfo*, const char*, const char*, int, const char**, const int*, int,
              const OrtOpAttr* const*, int, int, int, OrtOp**>(api, kCreateOp, info, "MatMulNBits", "com.microsoft", 1, names,
                                                              types, 2, attributes.made, kAttributes, kInputs, 1,
                                                              &node->other);
}

void destroy(void* kernel) {
  Node* node = static_cast<Node*>(kernel);
  if (node->other != nullptr) call<void, OrtOp*>(node->api, kReleaseOp, node->other);
  delete node;
}

OrtStatus* read(const OrtApi* api, const OrtKernelInfo* info, Node* node) {
  int64_t bits = 0;
  CARRYALL_TRY(attribute(api, info, "K", &node->inner));
  CARRYALL_TRY(attribute(api, info, "N", &node->columns));
  CARRYALL_TRY(attribute(api, info, "bits", &bits));
  CARRYALL_TRY(attribute(api, info, "block_size", &node->group));
  const bool fits = bits == 4 && node->inner > 0 && node->inner % 32 == 0 && node->inner < 1 << 30 && node->columns > 0 &&
                    node->columns < 1 << 30 && node->group >= 16 && node->inner % node->group == 0;
  if (!fits) return failure(api, kInvalidArgument, "bits, K, N or block_size are not those of carryall's MatMulNBits");
  const char* names[kSizes] = {"int4_product_32", "int4_product_64", "int4_product_128"};
  for (int i = 0; i < kSizes; i++)
    if (const char* wrong = find_cuda_kernel(names[i], node->kernels + i)) return failure(api, kFail, wrong);
  return find_other(api, info, node);
}

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  Node* node = new (std::nothrow) Node{api, nullptr, {}, 0, 0, 0};
  if (node == nullptr) return failure(api, kFail, "out of memory");
  if (OrtStatus* status = read(api, info, node)) {
    destroy(node);
    return status;
  }
  *kernel = node;
  return nullptr;
}

OrtStatus* compute_other(const Node& node, OrtKernelContext* context, OrtValue* y) {
  const OrtValue* inputs[kInputs] = {};
  for (size_t i = 0; i < kInputs; i++)
    CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**>(node.api, kKernelContextGetInput,
                                                                                     context, i, inputs + i)));
  return call<OrtStatus*, const OrtKernelContext*, const OrtOp*, const OrtValue* const*, int, OrtValue* const*, int>(
      node.api, kInvokeOp, context, node.other, inputs, kInputs, &y, 1);
}

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor inputs[kInputs];
  for (size_t i = 0; i < kInputs; i++) CARRYALL_TRY(read_tensor(node.api, context, i, inputs + i));
  Tensor& x = inputs[0];
  if (!x.ends_with(node.inner)) return failure(node.api, kInvalidArgument, "the last axis of x is not K");
  if (inputs[1].elements != node.columns * node.inner / 2 || inputs[2].elements != node.columns * (node.inner / node.group))
    return failure(node.api, kInvalidArgument, "weights or scales do not have K * N weights");
  const int64_t count = x.elements / node.inner;
  x.dimensions[x.rank - 1] = node.columns;
  OrtValue* value = nullptr;
  void* y = nullptr;
  CARRYALL_TRY((call<OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>(
      node.api, kKernelContextGetOutput, context, 0, x.dimensions, x.rank, &value)));
  CARRYALL_TRY((call<OrtStatus*, OrtValue*, void**>(node.api, kGetTensorMutableData, value, &y)));
  if (count < kLeast || count > kMost[kSizes - 1] || !aligned(x.data) || !aligned(inputs[1].data))
    return compute_other(node, context, value);
  const CudaKernel* own = node.kernels;
  while (count > kMost[own - node.kernels]) own++;
  void* stream = nullptr;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, void**>(node.api, kKernelContextGetGPUComputeStream, context,
                                                                 &stream)));
  int rows = static_cast<int>(count), columns = static_cast<int>(node.columns), inner = static_cast<int>(node.inner);
  int group = static_cast<int>(node.group);
  void* arguments[] = {&x.data, &inputs[1].data, &inputs[2].data, &y, &rows, &columns, &inner, &group};
  const char* wrong = own->launch((node.columns + kColumns - 1) / kColumns, kThreads, stream, arguments);
  return wrong == nullptr ? nullptr : failure(node.api, kFail, wrong);
}

}  // namespace

OrtCustomOp cuda_product() {
  OrtCustomOp op = common();
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return CARRYALL_CUDA_PROVIDER; };
  op.CreateKernelV2 = create;
  op.KernelDestroy = destroy;
  op.GetName = [](const OrtCustomOp*) { return "MatMulNBits"; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index == 1 ? kUint8 : kFloat16; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputs; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat16; };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace carryall
