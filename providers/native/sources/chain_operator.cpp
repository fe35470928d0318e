// The operator Chain: consecutive operators of a decoder, computed in one parallel section (see chain.h).
//
//   0      program  int64 [n], see chain_program.h
//   1...   what its steps read, of any type
//   -> one or more float [..., width], with the leading axes of the input `lead`
//
// Attributes, integers: rank and ranks, of which the program adds up or joins rows; ranks is 0 if it does not.
#include <atomic>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "chain_program.h"
#include "ranks_operator.h"

namespace carryall {
namespace {

constexpr size_t kMostInputs = 1 << 15, kMostOutputs = 1 << 8;
constexpr size_t kKept = size_t{64} << 20;  // bytes of memory that stay for the next run
constexpr size_t kEntries = 256;            // of threads into a chain; more than there are threads

constexpr uintptr_t kPage = 4096;
constexpr size_t kHuge = size_t{4} << 20;  // the smallest number of bytes for which huge pages are asked for

// Asks for huge pages; where there are none, small ones serve. The 16 rows of a tile of results lie in as many small pages, and a
// picture of 3,600 patches takes 100 MB, which are mapped anew for each.
void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t size) {
#if defined(__linux__)
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + size) / kPage * kPage;
  if (size >= kHuge) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { free(data); }
  // Its first whole line: a vector of 64 bytes that lies in two lines takes twice as long.
  void* aligned() const {
    const uintptr_t line = kLine, first = reinterpret_cast<uintptr_t>(data);
    return reinterpret_cast<void*>((first + line - 1) / line * line);
  }
};

struct Node {
  const OrtApi* api;
  const Kernels* kernels;
  Ranks* group;
  std::atomic<Buffer*> registers{nullptr}, rounded{nullptr};
  ~Node() {
    delete registers.load();
    delete rounded.load();
  }
};

// Memory of a run, which the next run takes over.
class Memory {
 public:
  explicit Memory(std::atomic<Buffer*>* kept) : kept_(kept), buffer_(kept->exchange(nullptr)) {}
  ~Memory() {
    if (buffer_ != nullptr && buffer_->size <= kKept) buffer_ = kept_->exchange(buffer_);
    delete buffer_;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  // Returns `size` bytes from a whole line on, or nullptr.
  void* reserve(size_t size) {
    size += static_cast<size_t>(kLine);
    if (buffer_ == nullptr) buffer_ = new (std::nothrow) Buffer;
    if (buffer_ == nullptr) return nullptr;
    if (buffer_->size < size) {
      free(buffer_->data);
      buffer_->data = malloc(size);
      buffer_->size = buffer_->data == nullptr ? 0 : size;
      if (buffer_->data != nullptr) prefer_huge_pages(buffer_->data, size);
    }
    return buffer_->data == nullptr ? nullptr : buffer_->aligned();
  }

 private:
  std::atomic<Buffer*>* kept_;
  Buffer* buffer_;
};

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  const Kernels* kernels = nullptr;
  CARRYALL_TRY(find_kernels(api, &kernels));
  Ranks* group = nullptr;
  CARRYALL_TRY(join_ranks(api, info, &group));
  Node* node = new (std::nothrow) Node;
  if (node == nullptr) return failure(api, kFail, "out of memory");
  node->api = api;
  node->kernels = kernels;
  node->group = group;
  *kernel = node;
  return nullptr;
}

OrtStatus* run(Node* node, OrtKernelContext* context, Program* program) {
  const OrtApi* api = node->api;
  if (const char* wrong = program->read_header()) return failure(api, kInvalidArgument, wrong);
  if (program->outputs() > static_cast<int64_t>(kMostOutputs))
    return failure(api, kInvalidArgument, "a chain has more than 256 outputs");
  float* outputs[kMostOutputs];
  Tensor shape = program->lead();
  for (int64_t i = 0; i < program->outputs(); i++) {
    shape.dimensions[shape.rank - 1] = program->width(i);
    CARRYALL_TRY(output(api, context, shape.dimensions, shape.rank, outputs + i, static_cast<size_t>(i)));
  }
  Memory memory(&node->registers);
  const int64_t registers = program->register_bytes();
  void* values = memory.reserve(static_cast<size_t>(registers));
  if (values == nullptr) return failure(api, kFail, "out of memory for a chain");
  program->place(outputs, values);
  if (const char* wrong = program->read_steps()) return failure(api, kInvalidArgument, wrong);
  if (program->rows() == 0) return nullptr;
  Memory rounded(&node->rounded);
  const int64_t bytes = ChainRun::rows_bytes(program->steps(), program->count(), program->rows());
  void* rows = rounded.reserve(static_cast<size_t>(bytes));
  if (rows == nullptr) return failure(api, kFail, "out of memory for quantized rows");
  ChainRun chain(*node->kernels, program->steps(), program->count(), program->rows(), rows);
  CARRYALL_TRY(run_tasks(api, context, ChainRun::work, kEntries, &chain));
  const char* complaint = chain.complaint();
  return complaint == nullptr ? nullptr : failure(api, kFail, complaint);
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  Node* node = static_cast<Node*>(kernel);
  const OrtApi* api = node->api;
  size_t count = 0;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, size_t*>(api, kKernelContextGetInputCount, context, &count)));
  if (count < 2 || count > kMostInputs) return failure(api, kInvalidArgument, "a chain has 1 to 32767 inputs");
  Tensor* inputs = new (std::nothrow) Tensor[count];
  if (inputs == nullptr) return failure(api, kFail, "out of memory for a chain");
  OrtStatus* status = nullptr;
  for (size_t i = 0; i < count && status == nullptr; i++) status = read_tensor(api, context, i, inputs + i);
  if (status == nullptr) {
    Program program(inputs, static_cast<int64_t>(count), node->group);
    status = run(node, context, &program);
  }
  delete[] inputs;
  return status;
}

}  // namespace

OrtCustomOp chain_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "Chain"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return index == 0 ? kInt64 : kAnyType; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int { return index == 0 ? kRequired : kVariadic; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kVariadic; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace carryall
