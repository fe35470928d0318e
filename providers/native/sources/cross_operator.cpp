// The operator CrossAttention: writes keys and values of the encoder's rows into the cache, then every token attends to all
// of its row's.
//
//   0 query    float [..., heads * size]
//   1 key      float [..., kv_heads * size], of the encoder's rows of all rows that bring them, one behind the other
//   2 value    the same
//   3 keys     uint8 [blocks, kv_heads, block_size, row_bytes], written in place (see attention.h)
//   4 values   the same
//   5 begins   int32 [rows + 1], of the tokens
//   6 lengths  int32 [rows], the encoder's rows of each row, new ones included
//   7 table    int32 [rows, blocks of a row], of these
//   8 encoder_begins int32 [rows + 1], of the new encoder's rows; a row has none, or all of its
//   -> float [..., heads * size]
//
// Attributes: layout, num_heads, kv_num_heads, head_size, block_size, cache_type, scale, as those of PagedAttention.
#include <cstdlib>
#include <memory>
#include <new>

#include "attention_inputs.h"

namespace carryall {
namespace {

enum : size_t { kEncoderBegins = 8, kInputs = 9 };

struct Node {
  const OrtApi* api;
  const AttentionKernels* kernels;
  AttentionSizes sizes;
};

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  AttentionSizes s;
  const AttentionKernels* kernels = nullptr;
  CARRYALL_TRY(read_sizes(api, info, &s, &kernels));
  *kernel = new (std::nothrow) Node{api, kernels, s};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

// Sets the tokens of `read` and the encoder's rows of `write`; returns what is wrong with their shapes.
const char* read_rows(const Tensor* inputs, Attention* read, Attention* write) {
  const AttentionSizes& s = read->sizes;
  const int64_t query = s.heads * s.size, kv = s.kv_heads * s.size;
  if (!inputs[kQuery].ends_with(query)) return "the last axis of the query is not that of all heads";
  for (size_t i : {kKey, kValue})
    if (inputs[i].rank < 1 || inputs[i].dimensions[inputs[i].rank - 1] != kv || inputs[i].elements != inputs[kKey].elements)
      return "key or value does not have all KV heads of each of the encoder's rows";
  if (inputs[kEncoderBegins].rank != 1 || inputs[kEncoderBegins].elements != read->rows + 1)
    return "encoder_begins is not one longer than lengths";
  read->query_step = read->output_step = query;
  read->tokens = inputs[kQuery].elements / query;
  read->query = static_cast<const float*>(inputs[kQuery].data);
  read->whole = true;
  write->key_step = write->value_step = kv;
  write->tokens = inputs[kKey].elements / kv;
  write->key = static_cast<const float*>(inputs[kKey].data);
  write->value = static_cast<const float*>(inputs[kValue].data);
  write->begins = static_cast<const int32_t*>(inputs[kEncoderBegins].data);
  for (int64_t r = 0; r < read->rows; r++) {
    const int64_t count = int64_t{write->begins[r + 1]} - write->begins[r];
    if (count != 0 && count != read->past[r]) return "a row brings some of its encoder's rows, not all or none";
  }
  return nullptr;
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  const OrtApi* api = node.api;
  Tensor inputs[kInputs];
  for (size_t i = 0; i < kInputs; i++) CARRYALL_TRY(read_tensor(api, context, i, inputs + i));
  Attention read;
  read.sizes = node.sizes;
  const char* complaint = read_cache(inputs, &read);
  Attention write = read;
  if (complaint == nullptr) complaint = read_rows(inputs, &read, &write);
  if (complaint != nullptr) return failure(api, kInvalidArgument, complaint);
  const std::unique_ptr<int32_t, void (*)(void*)> none(
      static_cast<int32_t*>(calloc(static_cast<size_t>(read.rows) + 1, sizeof(int32_t))), free);
  if (none == nullptr) return failure(api, kFail, "out of memory for attention");
  write.past = none.get();
  char message[160];
  if (!write.check(message, sizeof message) || !read.check(message, sizeof message))
    return failure(api, kInvalidArgument, message);
  CARRYALL_TRY(output(api, context, inputs[kQuery].dimensions, inputs[kQuery].rank, &read.output));
  if (write.tokens != 0) {
    AttentionJob job(write, *node.kernels, kSeparate);
    if (!job.valid()) return failure(api, kFail, "out of memory for attention");
    CARRYALL_TRY(run_tasks(api, context, AttentionJob::write, job.write_tasks(), &job));
  }
  if (read.tokens == 0) return nullptr;
  AttentionJob job(read, *node.kernels, kSeparate);
  if (!job.valid()) return failure(api, kFail, "out of memory for attention");
  CARRYALL_TRY(run_tasks(api, context, AttentionJob::attend, job.attend_tasks(), &job, job.attend_tasks()));
  for (size_t item = 0; item < job.finish_tasks(); item++) AttentionJob::finish(&job, item);
  return nullptr;
}

}  // namespace

OrtCustomOp cross_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "CrossAttention"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputs; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int {
    return index == kEncoderBegins ? kInt32 : attention_type(index);
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace carryall
