// The operator PagedAttention: writes the keys and values of new tokens into the cache, then attends to it.
//
//   0 query    float [..., heads * size], or with keys and values behind it [..., (heads + 2 * kv_heads) * size]
//   1 key      float [..., kv_heads * size], absent if the query holds it, or with reads_only
//   2 value    the same
//   3 keys     uint8 [blocks, kv_heads, block_size, row_bytes], written in place (see attention.h)
//   4 values   the same
//   5 begins   int32 [rows + 1]
//   6 past     int32 [rows]
//   7 table    int32 [rows, blocks of a row]
//   8 cosines  float [positions, rotary_dim / 2], absent without rotary embedding
//   9 sines    the same
//  10 position int64 [tokens], rows of 8 and 9
//  11 sinks    float [heads], optional
//  12 slopes   float [heads], optional
//  13 ahead    int32 [tokens], optional: how many positions behind a token it sees too
//  14 near    float [heads, 2 * reach + 1], optional: added to scores by distance, see attention.h; with a cache of float32
//  15 near_keys    float [heads, groups, head_size, 16], optional: keys of each distance from 1 - 8 * groups to 8 * groups - 1,
//                  see attention.h
//  16 near_queries the same, with 15 only
//  -> float [..., heads * size]
//
// Attributes: layout, num_heads, kv_num_heads, head_size, block_size, window (0 is none), rotary_dim, interleaved,
// cache_type (0 float32, 1 bfloat16, 2 int8, 3 int8 with queries of 8 bits, 4 bfloat16 with queries of bfloat16), scale, softcap (0 is none), reads_only (1 if an earlier node writes the
// cache). A block that a row writes must be no other row's.
#include <cstdio>
#include <initializer_list>
#include <new>

#include "attention_inputs.h"

namespace carryall {
namespace {

constexpr int64_t kSerial = 8192;  // floats of new keys that one thread writes faster than several

struct Node {
  const OrtApi* api;
  const AttentionKernels* kernels;
  AttentionSizes sizes;
  bool reads_only;
};

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  int64_t reads_only;
  AttentionSizes s;
  CARRYALL_TRY(attribute(api, info, "window", &s.window));
  CARRYALL_TRY(attribute(api, info, "rotary_dim", &s.rotary));
  CARRYALL_TRY(attribute(api, info, "interleaved", &s.interleaved));
  CARRYALL_TRY(attribute(api, info, "softcap", &s.softcap));
  CARRYALL_TRY(attribute(api, info, "reads_only", &reads_only));
  const AttentionKernels* kernels = nullptr;
  CARRYALL_TRY(read_sizes(api, info, &s, &kernels));
  *kernel = new (std::nothrow) Node{api, kernels, s, reads_only != 0};
  return *kernel == nullptr ? failure(api, kFail, "out of memory") : nullptr;
}

// Sets query, key, value and tokens; returns what is wrong with their shapes.
const char* read_tokens(const Tensor* inputs, bool reads_only, Attention* a) {
  const AttentionSizes& s = a->sizes;
  const int64_t query = s.heads * s.size, kv = s.kv_heads * s.size;
  const bool none = inputs[kKey].data == nullptr && inputs[kValue].data == nullptr;
  const bool packed = none && !reads_only;
  a->output_step = query;
  a->query_step = packed ? query + 2 * kv : query;
  if (inputs[kQuery].rank < 1 || inputs[kQuery].dimensions[inputs[kQuery].rank - 1] != a->query_step)
    return packed ? "the last axis of the query is not that of all heads of query, key and value"
                  : "the last axis of the query is not that of all heads";
  a->tokens = inputs[kQuery].elements / a->query_step;
  a->query = static_cast<const float*>(inputs[kQuery].data);
  if (reads_only) return none ? nullptr : "a node that reads the cache of another has no keys and values";
  a->key_step = a->value_step = packed ? a->query_step : kv;
  if (packed) {
    a->key = a->query + query;
    a->value = a->key + kv;
    return nullptr;
  }
  for (size_t i : {kKey, kValue})
    if (!inputs[i].ends_with(kv) || inputs[i].elements != a->tokens * kv)
      return "key or value does not have all KV heads of each token";
  a->key = static_cast<const float*>(inputs[kKey].data);
  a->value = static_cast<const float*>(inputs[kValue].data);
  return nullptr;
}

OrtStatus* run_job(const OrtApi* api, OrtKernelContext* context, AttentionJob* job, bool reads_only, bool serial) {
  if (reads_only) {
    // an earlier node has written the keys and values of these tokens
  } else if (serial) {
    for (size_t task = 0; task < job->write_tasks(); task++) AttentionJob::write(job, task);
  } else {
    CARRYALL_TRY(run_tasks(api, context, AttentionJob::write, job->write_tasks(), job));
  }
  // One piece per task, because tasks differ in length: a thread that is ready takes the next one.
  CARRYALL_TRY(run_tasks(api, context, AttentionJob::attend, job->attend_tasks(), job, job->attend_tasks()));
  for (size_t item = 0; item < job->finish_tasks(); item++) AttentionJob::finish(job, item);
  return nullptr;
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  const OrtApi* api = node.api;
  Tensor inputs[kAttentionInputs];
  size_t given = 0;
  CARRYALL_TRY((call<OrtStatus*, const OrtKernelContext*, size_t*>(api, kKernelContextGetInputCount, context, &given)));
  for (size_t i = 0; i < given && i < kAttentionInputs; i++) CARRYALL_TRY(read_tensor(api, context, i, inputs + i));
  Attention a;
  a.sizes = node.sizes;
  const char* complaint = read_tokens(inputs, node.reads_only, &a);
  if (complaint == nullptr) complaint = read_cache(inputs, &a);
  if (complaint == nullptr) complaint = read_optional(inputs, &a);
  if (complaint != nullptr) return failure(api, kInvalidArgument, complaint);
  char message[160];
  if (!a.check(message, sizeof message)) return failure(api, kInvalidArgument, message);
  Tensor& query = inputs[kQuery];
  query.dimensions[query.rank - 1] = a.sizes.heads * a.sizes.size;
  CARRYALL_TRY(output(api, context, query.dimensions, query.rank, &a.output));
  if (a.tokens == 0) return nullptr;
  AttentionJob job(a, *node.kernels, kSeparate);
  if (!job.valid()) return failure(api, kFail, "out of memory for attention");
  return run_job(api, context, &job, node.reads_only, a.tokens * a.sizes.kv_heads * a.sizes.size < kSerial);
}

}  // namespace

OrtCustomOp attention_operator() {
  OrtCustomOp op = common();
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetName = [](const OrtCustomOp*) { return "PagedAttention"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kAttentionInputs; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return attention_type(index); };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int {
    return index == kKey || index == kValue || index >= kCosines ? kOptional : kRequired;
  };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace carryall
