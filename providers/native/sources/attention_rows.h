// Rows of queries, keys and values: rotary embedding, and the conversion to and from the cache's type. `V` holds 16
// floats. Included by one source per instruction set, so in an anonymous namespace.
#pragma once
#include "attention.h"
#include "quantize_block.h"

namespace carryall {
namespace {

// Copies a head of `size` floats times `factor`, rotated by the angles of token `token`.
template <class V>
inline void rotate(const Attention& a, int64_t token, const float* x, float factor, float* y) {
  const AttentionSizes& s = a.sizes;
  const int64_t half = s.rotary / 2;
  if (half > 0) {
    const float* c = a.cosines + a.positions[token] * half;
    const float* n = a.sines + a.positions[token] * half;
    if (s.interleaved != 0) {
      for (int64_t i = 0; i < half; i++) {
        const float first = x[2 * i], second = x[2 * i + 1];
        y[2 * i] = (first * c[i] - second * n[i]) * factor;
        y[2 * i + 1] = (second * c[i] + first * n[i]) * factor;
      }
    } else {
      int64_t i = 0;
      for (; i + 16 <= half; i += 16) {
        const V first = V::load(x + i), second = V::load(x + i + half), f = V::all(factor);
        const V cosine = V::load(c + i), sine = V::load(n + i);
        V::store(y + i, multiply(subtract(multiply(first, cosine), multiply(second, sine)), f));
        V::store(y + i + half, multiply(add(multiply(second, cosine), multiply(first, sine)), f));
      }
      for (; i < half; i++) {
        const float first = x[i], second = x[i + half];
        y[i] = (first * c[i] - second * n[i]) * factor;
        y[i + half] = (second * c[i] + first * n[i]) * factor;
      }
    }
  }
  for (int64_t i = s.rotary; i < s.size; i++) y[i] = x[i] * factor;
}

// Stores a key (step 16) or a value (step 1) of a cache of floats from element `first` of a group on.
inline void store_row(const AttentionSizes& s, const float* x, uint8_t* group, int64_t first, int64_t step) {
  if (s.cache == CacheType::float32) {
    float* to = reinterpret_cast<float*>(group) + first;
    for (int64_t i = 0; i < s.size; i++) to[i * step] = x[i];
  } else {
    uint16_t* to = reinterpret_cast<uint16_t*>(group) + first;
    for (int64_t i = 0; i < s.size; i++) to[i * step] = to_bfloat16(x[i]);
  }
}

// Calls `store(key, value, row, head, position)` for each KV head of tokens [first, last), whose keys are rotated.
template <class V, class Store>
inline void each_new_row(const Attention& a, int64_t first, int64_t last, const Store& store) {
  const AttentionSizes& s = a.sizes;
  alignas(64) float rotated[kLargestHead];
  int64_t row = 0;
  for (int64_t token = first; token < last; token++) {
    while (a.begins[row + 1] <= token) row++;
    const int64_t position = a.past[row] + token - a.begins[row];
    for (int64_t head = 0; head < s.kv_heads; head++) {
      rotate<V>(a, token, a.key + token * a.key_step + head * s.size, 1.0f, rotated);
      store(rotated, a.value + token * a.value_step + head * s.size, row, head, position);
    }
  }
}

template <class V>
void write_rows(const Attention& a, int64_t first, int64_t last) {
  const AttentionSizes& s = a.sizes;
  each_new_row<V>(a, first, last, [&](const float* key, const float* value, int64_t row, int64_t head, int64_t position) {
    const int64_t lane = position % kGroupPositions;
    if (!s.one) store_row(s, key, a.group(a.keys, row, head, position), lane, kGroupPositions);
    store_row(s, s.one ? key : value, a.group(a.values, row, head, position), lane * s.width(), 1);
  });
}

// Converts a group of keys [width, 16] or values [16, width] of bfloat16 to floats, and returns these.
template <class V>
inline const uint8_t* read_group(const AttentionSizes& s, const uint8_t* group, float* memory) {
  const uint16_t* from = reinterpret_cast<const uint16_t*>(group);
  for (int64_t i = 0; i < 16 * s.width(); i += 16) V::store(memory + i, V::from_bfloat16(from + i));
  return reinterpret_cast<const uint8_t*>(memory);
}

}  // namespace
}  // namespace carryall
