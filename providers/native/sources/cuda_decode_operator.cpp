// PagedDecode: com.microsoft's PagedAttention with packed query, key and value. Steps of one token a row are computed by
// carryall's kernel, others by onnxruntime's.
//
// Which one computes, and in how many parts a context is read, depends on shapes and on the bounds of `attention_metadata`,
// which the host has; so a captured run always replays the one that it recorded.
//
// Inputs and attributes are those of PagedAttention (onnxruntime 1.31, docs/contrib_ops/cuda/paged_attention.md), without
// slot_mapping; there is a fourth output, memory for the parts. The caches are written in place: their outputs are the memory
// of their inputs.
#include <new>

#include "cuda_driver.h"
#include "cuda_operators.h"
#include "nested_operator.h"

namespace carryall {
namespace {

enum Input : size_t {
  kPacked = 0,
  kKeys = 3,
  kValues = 4,
  kBegins = 5,
  kPast = 6,
  kTable = 7,
  kCosines = 8,
  kSines = 9,
  kSinks = 11,
  kQueryNorm = 12,
  kKeyNorm = 13,
  kKeyScale = 14,
  kValueScale = 15,
  kBounds = 16,
  kInputs = 17,
  kOutputs = 4,
};
constexpr int kInt8 = 3, kFloat8 = 17, kInCpuMemory = -2;  // the latter of OrtMemType
constexpr int kThreads = 128, kMostGroup = 4, kLargest = 256;  // those of paged_decode.cu
constexpr int64_t kBlocks = 528, kMostParts = 64, kLeastPart = 128;      // 4 blocks for each of 132 processors; positions

// As in paged_decode.cu.
struct Sizes {
  int heads, kv_heads, size, rotary, interleaved, block, width, window, splits, channels;
  float scale, softcap, epsilon;
};

struct Node {
  const OrtApi* api;
  int type, cache;  // of query, key and value; of the caches
  NestedOperator other;
  char absence[300] = {};  // why onnxruntime has no PagedAttention here
  CudaKernel kernel, join;
  Sizes sizes = {};

  Node(const OrtApi* api, int type, int cache) : api(api), type(type), cache(cache), other(api) {}
  bool is_quantized() const { return cache != type; }
};

OrtStatus* find_other(const OrtKernelInfo* info, Node* node) {
  NestedOperator& op = node->other;
  const Sizes& sizes = node->sizes;
  const char* kind = !node->is_quantized() ? "NONE" : sizes.channels ? "PER_CHANNEL" : "PER_TENSOR";
  CARRYALL_TRY(op.set("num_heads", int64_t{sizes.heads}));
  CARRYALL_TRY(op.set("kv_num_heads", int64_t{sizes.kv_heads}));
  CARRYALL_TRY(op.set("local_window_size", int64_t{sizes.window > 0 ? sizes.window : -1}));
  CARRYALL_TRY(op.set("do_rotary", int64_t{sizes.rotary}));
  CARRYALL_TRY(op.set("rotary_interleaved", int64_t{sizes.interleaved}));
  CARRYALL_TRY(op.set("scale", sizes.scale));
  CARRYALL_TRY(op.set("softcap", sizes.softcap));
  CARRYALL_TRY(op.set("qk_norm_epsilon", sizes.epsilon));
  CARRYALL_TRY(op.set("k_quant_type", kind));
  CARRYALL_TRY(op.set("v_quant_type", kind));
  if (node->is_quantized()) CARRYALL_TRY(op.set("kv_cache_bit_width", int64_t{8}));
  const char* names[] = {"T", "T_CACHE", "T_KV_SCALE", "S"};
  const int types[] = {node->type, node->cache, kFloat, kInt32};
  if (OrtStatus* absent = op.find(info, "PagedAttention", names, types, static_cast<int>(kInputs), 3)) {
    snprintf(node->absence, sizeof node->absence, "rows of several tokens need onnxruntime's PagedAttention: %s",
             call<const char*, const OrtStatus*>(node->api, kGetErrorMessage, absent));
    call<void, OrtStatus*>(node->api, kReleaseStatus, absent);
  }
  return nullptr;
}

OrtStatus* find_kernels(Node* node) {
  const char* type = node->type == kFloat16 ? "half" : "bfloat16";
  const char* cache = !node->is_quantized() ? "" : node->cache == kInt8 ? "_int8" : "_float8";
  char name[64];
  snprintf(name, sizeof name, "paged_decode_%s%s_%d", type, cache, node->sizes.heads / node->sizes.kv_heads > 2 ? 4 : 2);
  if (const char* wrong = find_cuda_kernel(name, &node->kernel)) return failure(node->api, kFail, wrong);
  snprintf(name, sizeof name, "paged_join_%s", type);
  const char* wrong = find_cuda_kernel(name, &node->join);
  return wrong == nullptr ? nullptr : failure(node->api, kFail, wrong);
}

OrtStatus* read(const OrtKernelInfo* info, Node* node) {
  const OrtApi* api = node->api;
  int64_t heads = 0, kv_heads = 0, window = 0, rotary = 0, interleaved = 0, channels = 0;
  CARRYALL_TRY(attribute(api, info, "num_heads", &heads));
  CARRYALL_TRY(attribute(api, info, "kv_num_heads", &kv_heads));
  CARRYALL_TRY(attribute(api, info, "local_window_size", &window));
  CARRYALL_TRY(attribute(api, info, "do_rotary", &rotary));
  CARRYALL_TRY(attribute(api, info, "rotary_interleaved", &interleaved));
  CARRYALL_TRY(attribute(api, info, "channels", &channels));
  Sizes& sizes = node->sizes;
  CARRYALL_TRY(attribute(api, info, "scale", &sizes.scale));
  CARRYALL_TRY(attribute(api, info, "softcap", &sizes.softcap));
  CARRYALL_TRY(attribute(api, info, "qk_norm_epsilon", &sizes.epsilon));
  if (kv_heads < 1 || heads % kv_heads != 0 || heads / kv_heads > kMostGroup || heads > 1 << 16)
    return failure(api, kInvalidArgument, "num_heads or kv_num_heads are not those of carryall's PagedDecode");
  sizes.heads = static_cast<int>(heads);
  sizes.kv_heads = static_cast<int>(kv_heads);
  sizes.window = static_cast<int>(window > 0 ? window : 0);
  sizes.rotary = rotary != 0;
  sizes.interleaved = interleaved != 0;
  sizes.channels = channels != 0;
  CARRYALL_TRY(find_kernels(node));
  return find_other(info, node);
}

template <int kType, int kCache>
OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  Node* node = new (std::nothrow) Node(api, kType, kCache);
  if (node == nullptr) return failure(api, kFail, "out of memory");
  if (OrtStatus* status = read(info, node)) {
    delete node;
    return status;
  }
  *kernel = node;
  return nullptr;
}

OrtStatus* check(const Node& node, const Tensor* inputs) {
  const Sizes& sizes = node.sizes;
  const Tensor &packed = inputs[kPacked], &keys = inputs[kKeys], &values = inputs[kValues];
  const int64_t all = sizes.heads + 2 * int64_t{sizes.kv_heads};
  const bool known = packed.rank == 2 && keys.rank == 4 && values.rank == 4 && packed.dimensions[1] % all == 0 &&
                     packed.dimensions[1] / all <= kLargest && packed.dimensions[1] / all % 8 == 0;
  if (!known) return failure(node.api, kInvalidArgument, "packed query, key and value or caches are not those of PagedDecode");
  for (int i = 0; i < 4; i++)
    if (keys.dimensions[i] != values.dimensions[i])
      return failure(node.api, kInvalidArgument, "keys and values have caches of different shapes");
  if (keys.dimensions[2] != sizes.kv_heads || keys.dimensions[3] != packed.dimensions[1] / all)
    return failure(node.api, kInvalidArgument, "the caches do not have the heads of keys and values");
  if (inputs[kPast].rank != 1 || inputs[kTable].rank != 2 || inputs[kTable].dimensions[0] != inputs[kPast].elements ||
      inputs[kBounds].data == nullptr || inputs[kBounds].elements < 2)
    return failure(node.api, kInvalidArgument, "past lengths, block table or bounds have other shapes than PagedDecode's");
  return nullptr;
}

OrtStatus* run_other(const Node& node, OrtKernelContext* context, OrtValue* const* outputs) {
  if (!node.other.exists()) return failure(node.api, kFail, node.absence);
  const OrtValue* values[kInputs] = {};
  for (size_t i = 0; i < kInputs; i++) CARRYALL_TRY(input_value(node.api, context, i, values + i));
  return node.other.run(context, values, static_cast<int>(kInputs), outputs, 3);
}

// In how many parts rows with contexts of at most `longest` tokens are read, so that there are enough blocks.
int64_t parts_of(int64_t rows, int64_t kv_heads, int64_t longest) {
  const int64_t wanted = kBlocks / (rows * kv_heads), parts = (longest + kLeastPart - 1) / kLeastPart;
  const int64_t fewer = wanted < parts ? wanted : parts;
  return fewer < 1 ? 1 : fewer < kMostParts ? fewer : kMostParts;
}

OrtStatus* run_own(const Node& node, const OrtKernelContext* context, Tensor* inputs, Sizes sizes, void* parts,
                   void* y) {
  void* stream = nullptr;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, void**>(node.api, kKernelContextGetGPUComputeStream, context,
                                                                 &stream)));
  void* arguments[] = {&inputs[kPacked].data, &inputs[kKeys].data,     &inputs[kValues].data,     &inputs[kPast].data,
                       &inputs[kTable].data,  &inputs[kCosines].data,  &inputs[kSines].data,      &inputs[kSinks].data,
                       &inputs[kQueryNorm].data, &inputs[kKeyNorm].data, &inputs[kKeyScale].data, &inputs[kValueScale].data,
                       &parts,                &y,                      &sizes};
  const int64_t rows = inputs[kPast].elements;
  const char* wrong = node.kernel.launch(rows * sizes.kv_heads * sizes.splits, kThreads, stream, arguments);
  if (wrong == nullptr && sizes.splits > 1) {
    void* joined[] = {&parts, &inputs[kSinks].data, &inputs[kValueScale].data, &y, &sizes};
    wrong = node.join.launch(rows * sizes.heads, kThreads, stream, joined);
  }
  return wrong == nullptr ? nullptr : failure(node.api, kFail, wrong);
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  Tensor inputs[kInputs];
  for (size_t i = 0; i < kInputs; i++) CARRYALL_TRY(read_tensor(node.api, context, i, inputs + i));
  CARRYALL_TRY(check(node, inputs));
  Sizes sizes = node.sizes;
  const int64_t tokens = inputs[kPacked].dimensions[0], rows = inputs[kPast].elements;
  sizes.size = static_cast<int>(inputs[kKeys].dimensions[3]);
  sizes.block = static_cast<int>(inputs[kKeys].dimensions[1]);
  sizes.width = static_cast<int>(inputs[kTable].dimensions[1]);
  sizes.rotary = sizes.rotary ? static_cast<int>(2 * inputs[kCosines].dimensions[1]) : 0;
  const int32_t* bounds = static_cast<const int32_t*>(inputs[kBounds].data);
  const bool own = rows > 0 && tokens == rows && bounds[0] == 1;  // so each row has one
  sizes.splits = own ? static_cast<int>(parts_of(rows, sizes.kv_heads, bounds[1])) : 1;
  OrtValue* outputs[kOutputs] = {};
  void* places[kOutputs] = {};
  const int64_t attended[] = {tokens, int64_t{sizes.heads} * sizes.size};
  const int64_t held[] = {sizes.splits > 1 ? rows * sizes.heads * sizes.splits : 0, sizes.size + 2};
  CARRYALL_TRY(output_value(node.api, context, 0, attended, 2, outputs, places));
  for (size_t i = 1; i <= 2; i++) {
    const Tensor& cache = inputs[i == 1 ? kKeys : kValues];
    CARRYALL_TRY(output_value(node.api, context, i, cache.dimensions, cache.rank, outputs + i, places + i));
    if (places[i] != cache.data) return failure(node.api, kInvalidArgument, "a cache and its output are not the same memory");
  }
  CARRYALL_TRY(output_value(node.api, context, 3, held, 2, outputs + 3, places + 3));
  return own ? run_own(node, context, inputs, sizes, places[3], places[0]) : run_other(node, context, outputs);
}

template <int kType, int kCache>
OrtCustomOp decode() {
  OrtCustomOp op = common();
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return CARRYALL_CUDA_PROVIDER; };
  op.CreateKernelV2 = create<kType, kCache>;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "PagedDecode"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputs; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int {
    if (index == kKeys || index == kValues) return kCache;
    if (index == kKeyScale || index == kValueScale) return kFloat;
    return (index >= kBegins && index <= kTable) || index == kBounds ? kInt32 : kType;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int {
    const bool required = index == kPacked || (index >= kKeys && index <= kTable) || index == kBounds;
    return required ? kRequired : kOptional;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t index) -> int { return index == kBounds ? kInCpuMemory : 0; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return kOutputs; };
  op.GetOutputType = [](const OrtCustomOp*, size_t index) -> int { return index == 0 ? kType : index < 3 ? kCache : kFloat; };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace

void cuda_decode(OrtCustomOp* operators) {
  operators[0] = decode<kFloat16, kFloat16>();
  operators[1] = decode<kFloat16, kInt8>();
  operators[2] = decode<kFloat16, kFloat8>();
  operators[3] = decode<kBfloat16, kBfloat16>();
  operators[4] = decode<kBfloat16, kInt8>();
  operators[5] = decode<kBfloat16, kFloat8>();
}

}  // namespace carryall
