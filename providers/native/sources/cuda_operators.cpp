// Operators of CUDA's execution provider, on the stream of the run; none waits for the device, so all can be captured.
//
//   SiluAndMul  x T [..., 2 * n] -> T [..., n], as on the CPU; T is float, float16 or bfloat16
//   DrawTokens  logits float [..., n], draw float [rows, 5] (optional) ->
//               top_logits float [..., count], top_token_ids int64 [..., count], logsumexp float [...],
//               drawn_tokens int64 [rows] (if there is an input `draw`)
//   MatMulNBits  as com.microsoft's, of 4 bits and half; with zero points (uint8) it has a second output, memory for the weights as
//               half [N, K]; see cuda_product_operator.cpp
//   PagedDecode  as com.microsoft's PagedAttention; see cuda_decode_operator.cpp
//
// Attributes: DrawTokens: count, integer, at most 256; MatMulNBits: K, N, bits, block_size.
#include "cuda_operators.h"

#include <new>

#include "cuda_driver.h"
#include "ort_kernel.h"

namespace carryall {
namespace {

constexpr int kSiluThreads = 256, kDrawThreads = 512;  // the latter is that of draw_tokens.cu
constexpr int64_t kSiluBlocks = 4096;                  // several for each of the most processors; threads loop
constexpr int64_t kMostResults = 256, kControls = 5;

struct Node {
  const OrtApi* api;
  CudaKernel kernel;
  int64_t count;
};

OrtStatus* make(const OrtApi* api, const char* name, int64_t count, void** kernel) {
  CudaKernel found;
  if (const char* wrong = find_cuda_kernel(name, &found)) return failure(api, kFail, wrong);
  *kernel = new (std::nothrow) Node{api, found, count};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

OrtStatus* launch(const Node& node, const OrtKernelContext* context, int64_t blocks, int threads, void** arguments) {
  void* stream = nullptr;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, void**>(node.api, kKernelContextGetGPUComputeStream, context,
                                                                 &stream)));
  const char* wrong = node.kernel.launch(blocks, threads, stream, arguments);
  return wrong == nullptr ? nullptr : failure(node.api, kFail, wrong);
}

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

OrtStatus* compute_gate(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor x;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &x));
  if (x.rank == 0 || x.dimensions[x.rank - 1] % 2 != 0)
    return failure(node.api, kInvalidArgument, "the last axis of x does not have two halves");
  int64_t width = x.dimensions[x.rank - 1] /= 2;
  float* y = nullptr;
  CARRYALL_TRY(output(node.api, context, x.dimensions, x.rank, &y));
  if (x.elements == 0) return nullptr;
  const int64_t part = 16 / (x.type == kFloat ? 4 : 2);
  int64_t rows = x.elements / (2 * width);
  int whole = width % part == 0 && aligned(x.data) && aligned(y);
  const int64_t parts = x.elements / 2 / (whole ? part : 1), blocks = (parts + kSiluThreads - 1) / kSiluThreads;
  void* arguments[] = {&x.data, &y, &rows, &width, &whole};
  return launch(node, context, blocks < kSiluBlocks ? blocks : kSiluBlocks, kSiluThreads, arguments);
}

template <int kType>
OrtCustomOp gate() {
  OrtCustomOp op = common();
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return CARRYALL_CUDA_PROVIDER; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo*, void** kernel) -> OrtStatus* {
    const char* name = kType == kFloat     ? "silu_and_mul_float"
                       : kType == kFloat16 ? "silu_and_mul_half"
                                           : "silu_and_mul_bfloat16";
    return make(api, name, 0, kernel);
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "SiluAndMul"; };
  op.GetInputType = [](const OrtCustomOp*, size_t) -> int { return kType; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kType; };
  op.KernelComputeV2 = compute_gate;
  return op;
}

OrtStatus* create_draw(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  int64_t count = 0;
  CARRYALL_TRY(attribute(api, info, "count", &count));
  if (count < 1 || count > kMostResults) return failure(api, kInvalidArgument, "count is not in [1, 256]");
  return make(api, "draw_tokens", count, kernel);
}

OrtStatus* compute_draw(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor logits, draws;
  CARRYALL_TRY(read_tensor(node.api, context, 0, &logits));
  CARRYALL_TRY(read_tensor(node.api, context, 1, &draws));
  if (logits.rank == 0 || logits.dimensions[logits.rank - 1] < node.count || logits.dimensions[logits.rank - 1] > 1 << 30)
    return failure(node.api, kInvalidArgument, "the last axis of logits is shorter than count, or too long");
  int size = static_cast<int>(logits.dimensions[logits.rank - 1]), count = static_cast<int>(node.count);
  int64_t rows = logits.elements / size;
  if (draws.data != nullptr && (draws.rank != 2 || draws.dimensions[0] != rows || draws.dimensions[1] != kControls))
    return failure(node.api, kInvalidArgument, "draw is not [rows, 5]");
  logits.dimensions[logits.rank - 1] = count;
  float *values = nullptr, *tokens = nullptr, *totals = nullptr, *drawn = nullptr;
  CARRYALL_TRY(output(node.api, context, logits.dimensions, logits.rank, &values, 0));
  CARRYALL_TRY(output(node.api, context, logits.dimensions, logits.rank, &tokens, 1));
  CARRYALL_TRY(output(node.api, context, logits.dimensions, logits.rank - 1, &totals, 2));
  if (draws.data != nullptr) CARRYALL_TRY(output(node.api, context, &rows, 1, &drawn, 3));
  void* arguments[] = {&logits.data, &draws.data, &size, &count, &values, &tokens, &totals, &drawn};
  return launch(node, context, rows, kDrawThreads, arguments);
}

OrtCustomOp draw() {
  OrtCustomOp op = common();
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return CARRYALL_CUDA_PROVIDER; };
  op.CreateKernelV2 = create_draw;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "DrawTokens"; };
  op.GetInputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 1 ? kOptional : kRequired; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 4; };
  op.GetOutputType = [](const OrtCustomOp*, size_t index) -> int { return index % 2 == 0 ? kFloat : kInt64; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 3 ? kOptional : kRequired; };
  op.KernelComputeV2 = compute_draw;
  return op;
}

}  // namespace

void cuda_operators(OrtCustomOp* operators) {
  operators[0] = gate<kFloat>();
  operators[1] = gate<kFloat16>();
  operators[2] = gate<kBfloat16>();
  operators[3] = draw();
  operators[4] = cuda_product();
  cuda_decode(operators + 5);
  cuda_collectives(operators + 5 + kCudaDecodes);
}

}  // namespace carryall

// Loads kernels for a device, see load_cuda_image; returns a complaint, or null.
extern "C" CARRYALL_EXPORT const char* carryall_cuda_load(const char* driver, int device, const void* image) {
  return carryall::load_cuda_image(driver, device, image);
}
