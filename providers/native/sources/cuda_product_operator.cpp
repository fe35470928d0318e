// MatMulNBits of 4 bits in half: carryall's kernel for a few dozen rows.
//
// Without zero points, up to 16 rows and more than 128 are onnxruntime's: the former has kernels for them, and the latter
// are faster with weights that are unpacked once. Its operator reads the type of zero points from the graph, and a nested
// operator has none there. With zero points, up to 128 rows are therefore all carryall's, and more are multiplied by
// onnxruntime's product of half with weights that carryall's kernel unpacks; where the provider has no such product, by
// carryall's in parts of 128 rows.
//
// Which one computes depends on the shape alone, so that a captured run always replays the one that it recorded.
#include <new>

#include "cuda_driver.h"
#include "cuda_operators.h"
#include "nested_operator.h"

namespace carryall {
namespace {

constexpr int kThreads = 256;  // those of int4_product.cu
constexpr int kSizes = 4;
constexpr int64_t kMost[kSizes] = {16, 32, 64, 128}, kColumns[kSizes] = {16, 32, 64, 64}, kLeast = 17;
constexpr int64_t kUnpackBlocks = 2048;
constexpr size_t kInputs = 4;

struct Node {
  const OrtApi* api;
  NestedOperator symmetric, product;  // onnxruntime's: without zero points; of half
  CudaKernel kernels[kSizes], unpack;
  int64_t inner = 0, columns = 0, group = 0;

  explicit Node(const OrtApi* api) : api(api), symmetric(api), product(api) {}
};

OrtStatus* find_symmetric(const OrtKernelInfo* info, Node* node) {
  NestedOperator& op = node->symmetric;
  CARRYALL_TRY(op.set("K", node->inner));
  CARRYALL_TRY(op.set("N", node->columns));
  CARRYALL_TRY(op.set("bits", int64_t{4}));
  CARRYALL_TRY(op.set("block_size", node->group));
  CARRYALL_TRY(op.set("accuracy_level", int64_t{0}));
  const char* names[] = {"T1", "T2"};
  return op.find(info, "MatMulNBits", names, {kFloat16, kUint8}, 3, 1);
}

OrtStatus* find_product(const OrtKernelInfo* info, Node* node) {
  NestedOperator& op = node->product;
  CARRYALL_TRY(op.set("alpha", 1.0f));
  CARRYALL_TRY(op.set("transA", int64_t{0}));
  CARRYALL_TRY(op.set("transB", int64_t{1}));
  CARRYALL_TRY(op.set("transBatchA", int64_t{0}));
  CARRYALL_TRY(op.set("transBatchB", int64_t{0}));
  const char* names[] = {"T"};
  if (OrtStatus* absent = op.find(info, "FusedMatMul", names, {kFloat16}, 2, 1))
    call<void, OrtStatus*>(node->api, kReleaseStatus, absent);  // CPUs have none of half
  return nullptr;
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
  const char* names[kSizes] = {"int4_product_16", "int4_product_32", "int4_product_64", "int4_product_128"};
  for (int i = 0; i < kSizes; i++)
    if (const char* wrong = find_cuda_kernel(names[i], node->kernels + i)) return failure(api, kFail, wrong);
  if (const char* wrong = find_cuda_kernel("int4_weights", &node->unpack)) return failure(api, kFail, wrong);
  CARRYALL_TRY(find_symmetric(info, node));
  return find_product(info, node);
}

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  Node* node = new (std::nothrow) Node(api);
  if (node == nullptr) return failure(api, kFail, "out of memory");
  if (OrtStatus* status = read(api, info, node)) {
    delete node;
    return status;
  }
  *kernel = node;
  return nullptr;
}

// A run of the node: its inputs and outputs, and the stream.
struct Run {
  const Node& node;
  OrtKernelContext* context;
  const OrtValue* values[kInputs] = {};
  Tensor inputs[kInputs];
  OrtValue *y_value = nullptr, *whole_value = nullptr;
  void *y = nullptr, *whole = nullptr, *stream = nullptr;

  OrtStatus* launch(const CudaKernel& kernel, int64_t blocks, void** arguments) {
    const char* wrong = kernel.launch(blocks, kThreads, stream, arguments);
    return wrong == nullptr ? nullptr : failure(node.api, kFail, wrong);
  }

  // Multiplies up to 128 rows, from `begin` on.
  OrtStatus* multiply(int64_t begin, int64_t count) {
    int size = 0;
    while (count > kMost[size]) size++;
    const char* x = static_cast<const char*>(inputs[0].data) + 2 * begin * node.inner;
    char* to = static_cast<char*>(y) + 2 * begin * node.columns;
    int rows = static_cast<int>(count), columns = static_cast<int>(node.columns), inner = static_cast<int>(node.inner);
    int group = static_cast<int>(node.group);
    void* arguments[] = {&x, &inputs[1].data, &inputs[2].data, &inputs[3].data, &to, &rows, &columns, &inner, &group};
    return launch(node.kernels[size], (node.columns + kColumns[size] - 1) / kColumns[size], arguments);
  }

  // Multiplies many rows with weights that are unpacked first.
  OrtStatus* multiply_whole() {
    int64_t columns = node.columns;
    int inner = static_cast<int>(node.inner), group = static_cast<int>(node.group);
    void* arguments[] = {&inputs[1].data, &inputs[2].data, &inputs[3].data, &whole, &columns, &inner, &group};
    const int64_t blocks = (columns * inner / 8 + kThreads - 1) / kThreads;
    CARRYALL_TRY(launch(node.unpack, blocks < kUnpackBlocks ? blocks : kUnpackBlocks, arguments));
    const OrtValue* factors[] = {values[0], whole_value};
    return node.product.run(context, factors, 2, &y_value, 1);
  }
};

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

OrtStatus* check(const Node& node, const Tensor* inputs) {
  const int64_t groups = node.inner / node.group;
  if (!inputs[0].ends_with(node.inner)) return failure(node.api, kInvalidArgument, "the last axis of x is not K");
  if (inputs[1].elements != node.columns * node.inner / 2 || inputs[2].elements != node.columns * groups)
    return failure(node.api, kInvalidArgument, "weights or scales do not have K * N weights");
  if (inputs[3].data != nullptr && inputs[3].elements != node.columns * ((groups + 1) / 2))
    return failure(node.api, kInvalidArgument, "zero points are not those of K * N weights");
  if (inputs[3].data != nullptr && !(aligned(inputs[0].data) && aligned(inputs[1].data)))
    return failure(node.api, kInvalidArgument, "x or weights do not begin at a multiple of 16 bytes");
  return nullptr;
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Run run{node, context};
  for (size_t i = 0; i < kInputs; i++) {
    CARRYALL_TRY(input_value(node.api, context, i, run.values + i));
    CARRYALL_TRY(read_tensor(node.api, context, i, run.inputs + i));
  }
  CARRYALL_TRY(check(node, run.inputs));
  Tensor& x = run.inputs[0];
  const int64_t count = x.elements / node.inner, most = kMost[kSizes - 1];
  const bool has_zeros = run.inputs[3].data != nullptr, whole = has_zeros && count > most && node.product.exists();
  x.dimensions[x.rank - 1] = node.columns;
  CARRYALL_TRY(output_value(node.api, context, 0, x.dimensions, x.rank, &run.y_value, &run.y));
  if (has_zeros) {
    const int64_t unpacked[] = {whole ? node.columns : 0, node.inner};
    CARRYALL_TRY(output_value(node.api, context, 1, unpacked, 2, &run.whole_value, &run.whole));
  }
  if (!has_zeros && (count < kLeast || count > most || !aligned(x.data) || !aligned(run.inputs[1].data)))
    return node.symmetric.run(context, run.values, 3, &run.y_value, 1);
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, void**>(node.api, kKernelContextGetGPUComputeStream, context,
                                                                 &run.stream)));
  if (whole) return run.multiply_whole();
  for (int64_t begin = 0; begin < count; begin += most)
    CARRYALL_TRY(run.multiply(begin, count - begin < most ? count - begin : most));
  return nullptr;
}

}  // namespace

OrtCustomOp cuda_product() {
  OrtCustomOp op = common();
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return CARRYALL_CUDA_PROVIDER; };
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "MatMulNBits"; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index % 2 == 1 ? kUint8 : kFloat16; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputs; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 3 ? kOptional : kRequired; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 1 ? kOptional : kRequired; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat16; };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace carryall
