// The inputs of attention besides the new tokens: caches, tables and what is optional.
#pragma once
#include <initializer_list>

#include "attention.h"
#include "ort_kernel.h"

namespace carryall {

enum AttentionInput : size_t {
  kQuery, kKey, kValue, kKeys, kValues, kBegins, kPast, kTable, kCosines, kSines, kPosition, kSinks, kSlopes,
  kAhead, kNear, kNearKeys, kNearQueries,
  kAttentionInputs
};

// The type of an input.
inline ElementType attention_type(size_t index) {
  if (index == kKeys || index == kValues) return kUint8;
  if (index == kPosition) return kInt64;
  return (index >= kBegins && index <= kTable) || index == kAhead ? kInt32 : kFloat;
}

// Reads what nodes that attend to blocks have in common, and finds the kernels of this processor.
inline OrtStatus* read_sizes(const OrtApi* api, const OrtKernelInfo* info, AttentionSizes* s,
                             const AttentionKernels** kernels) {
  int64_t layout, type;
  CARRYALL_TRY(attribute(api, info, "layout", &layout));
  CARRYALL_TRY(check_layout(api, "the KV cache has", layout, kCacheLayout));
  CARRYALL_TRY(attribute(api, info, "num_heads", &s->heads));
  CARRYALL_TRY(attribute(api, info, "kv_num_heads", &s->kv_heads));
  CARRYALL_TRY(attribute(api, info, "head_size", &s->size));
  CARRYALL_TRY(attribute(api, info, "block_size", &s->block));
  CARRYALL_TRY(attribute(api, info, "cache_type", &type));
  CARRYALL_TRY(attribute(api, info, "scale", &s->scale));
  s->set_cache(type);
  if (const char* complaint = s->complaint()) return failure(api, kInvalidArgument, complaint);
  const Kernels* all = nullptr;
  CARRYALL_TRY(find_kernels(api, &all));
  *kernels = all->attention;
  return nullptr;
}

// Sets the caches, the rows and their block tables.
inline const char* read_cache(const Tensor* inputs, Attention* a) {
  AttentionSizes& s = a->sizes;
  for (size_t i : {kKeys, kValues}) {
    const Tensor& cache = inputs[i];
    const int64_t* shape = cache.dimensions;
    if (cache.rank != 4 || shape[1] != s.kv_heads || shape[2] != s.block || shape[3] != s.row_bytes() ||
        shape[0] != inputs[kKeys].dimensions[0])
      return "a KV cache does not have the shape [blocks, kv_num_heads, block_size, bytes of a row]";
  }
  a->keys = static_cast<uint8_t*>(inputs[kKeys].data);
  a->values = static_cast<uint8_t*>(inputs[kValues].data);
  s.one = a->keys == a->values && a->keys != nullptr;
  if (const char* complaint = s.complaint()) return complaint;
  a->blocks = inputs[kKeys].dimensions[0];
  a->rows = inputs[kPast].elements;
  if (inputs[kPast].rank != 1 || inputs[kBegins].rank != 1 || inputs[kBegins].elements != a->rows + 1)
    return "begins is not one longer than past";
  if (inputs[kTable].rank != 2 || inputs[kTable].dimensions[0] != a->rows) return "table does not have one row per row";
  a->table_width = inputs[kTable].dimensions[1];
  a->past = static_cast<const int32_t*>(inputs[kPast].data);
  a->begins = static_cast<const int32_t*>(inputs[kBegins].data);
  a->table = static_cast<const int32_t*>(inputs[kTable].data);
  return nullptr;
}

inline const char* read_optional(const Tensor* inputs, Attention* a) {
  AttentionSizes& s = a->sizes;
  const Tensor& near = inputs[kNear];
  if (near.data != nullptr) {
    if (near.rank != 2 || near.dimensions[0] != s.heads || near.dimensions[1] < 3 || near.dimensions[1] % 2 == 0 ||
        near.dimensions[1] > kLargest || s.cache != CacheType::float32)
      return "near does not have the shape [heads, 2 * reach + 1], or the cache is not float32";
    s.reach = near.dimensions[1] / 2;
    a->near = static_cast<const float*>(near.data);
  }
  if (inputs[kNearKeys].data != nullptr || inputs[kNearQueries].data != nullptr) {
    const int64_t groups = inputs[kNearKeys].rank == 4 ? inputs[kNearKeys].dimensions[1] : 0;
    if (near.data != nullptr || a->key == nullptr || s.rotary != 0 || s.shared() != 1 || s.cache != CacheType::float32)
      return "keys by distance need new keys without rotary embedding, a head of keys for each, and a cache of float32";
    for (size_t i : {kNearKeys, kNearQueries}) {
      const int64_t* shape = inputs[i].dimensions;
      if (inputs[i].rank != 4 || shape[0] != s.heads || shape[1] != groups || groups < 1 || groups > kLargest / 16 ||
          shape[2] != s.size || shape[3] != kGroupPositions)
        return "near_keys or near_queries does not have the shape [heads, groups, head_size, 16]";
    }
    s.reach = groups * kGroupPositions / 2 - 1;
    a->near_groups = groups;
    a->near_keys = static_cast<const float*>(inputs[kNearKeys].data);
    a->near_queries = static_cast<const float*>(inputs[kNearQueries].data);
  }
  a->sinks = static_cast<const float*>(inputs[kSinks].data);
  if (a->sinks != nullptr && inputs[kSinks].elements != s.heads) return "sinks does not have one value per head";
  a->slopes = static_cast<const float*>(inputs[kSlopes].data);
  if (a->slopes != nullptr && inputs[kSlopes].elements != s.heads) return "slopes does not have one value per head";
  a->ahead = static_cast<const int32_t*>(inputs[kAhead].data);
  if (a->ahead != nullptr && inputs[kAhead].elements != a->tokens) return "ahead does not have one number per token";
  if (s.rotary == 0) return nullptr;
  for (size_t i : {kCosines, kSines})
    if (inputs[i].rank != 2 || !inputs[i].ends_with(s.rotary / 2) || inputs[i].elements != inputs[kCosines].elements)
      return "cosines and sines do not have the shape [positions, rotary_dim / 2]";
  if (inputs[kPosition].data == nullptr || inputs[kPosition].elements != a->tokens)
    return "there is not one position per token";
  a->cosines = static_cast<const float*>(inputs[kCosines].data);
  a->sines = static_cast<const float*>(inputs[kSines].data);
  a->angles = inputs[kCosines].dimensions[0];
  a->positions = static_cast<const int64_t*>(inputs[kPosition].data);
  return nullptr;
}

}  // namespace carryall
