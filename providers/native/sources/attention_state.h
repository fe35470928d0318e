// The running softmax of queries over parts of 256 positions, with vectors `V` of 16 floats. Included by one source per
// kernel, so in an anonymous namespace.
#pragma once
#include "attention_rows.h"
#include "gate.h"
#include "rows.h"

namespace carryall {
namespace {

constexpr int64_t kTokensAhead = 4;  // rows of queries and outputs are far apart, which hardware does not foresee
constexpr int64_t kLineFloats = 16;
constexpr float kLowest = -3.0e38f;  // below every score that matters; differences of two are finite

template <class V>
inline float exponential_of(float x) {
  float y[16];
  V::store(y, exponential(V::all(x)));
  return y[0];
}

// cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1).
template <class V>
inline V capped(V x, float cap) {
  const V e = exponential(multiply(x, V::all(2.0f / cap)));
  const V one = V::all(1.0f);
  return multiply(V::all(cap), subtract(one, divide(V::all(2.0f), add(e, one))));
}

// The slope of ALiBi (arXiv:2108.12409) of a query of the item; 0 is none.
inline float slope_of(const Attention& a, const AttentionItem& item, int64_t query) {
  const int64_t shared = a.sizes.shared();
  return a.slopes == nullptr ? 0.0f : a.slopes[item.head * shared + (item.first + query) % shared];
}

// The biases by distance of a query of the item, or nullptr.
inline const float* near_by(const Attention& a, const AttentionItem& item, int64_t query) {
  const int64_t shared = a.sizes.shared();
  return a.near == nullptr ? nullptr : a.near + (item.head * shared + (item.first + query) % shared) * (2 * a.sizes.reach + 1);
}

// Scores of 16 positions, the first of them `behind` the query, less the slope times the distance.
template <class V>
inline V sloped(V x, float slope, int64_t behind) {
  alignas(64) static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return fused(V::all(slope), add(V::load(kLanes), V::all(-static_cast<float>(behind))), x);
}

// The maximum score, the sum of weights and the weighted sum of values of some queries.
struct State {
  float *most, *sum, *result;  // [count], [count], [count, step]
  int64_t step;                // floats from one result to the next

  CARRYALL_INLINE State from(int64_t query) const {
    return {most + query, sum + query, result + query * step, step};
  }
};

inline void clear(const State& state, int64_t count, int64_t width) {
  for (int64_t m = 0; m < count; m++) {
    state.most[m] = kLowest;
    state.sum[m] = 0.0f;
    memset(state.result + m * state.step, 0, sizeof(float) * static_cast<size_t>(width));
  }
}

// Adds the state of the next part to that of those before.
template <class V>
inline void merge(const State& all, const State& next, int64_t count, int64_t width) {
  for (int64_t first = 0; first < count; first += 16) {
    const int64_t rows = count - first < 16 ? count - first : 16;
    const size_t bytes = sizeof(float) * static_cast<size_t>(rows);
    const State a = all.from(first), b = next.from(first);
    float before[16] = {}, after[16] = {}, most[16];
    memcpy(before, a.most, bytes);
    memcpy(after, b.most, bytes);
    const V x = V::load(before), y = V::load(after), larger = maximum(y, x);
    V::store(most, larger);
    V::store(before, exponential(subtract(x, larger)));
    V::store(after, exponential(subtract(y, larger)));
    memcpy(a.most, most, bytes);
    for (int64_t m = 0; m < rows; m++) {
      a.sum[m] = a.sum[m] * before[m] + b.sum[m] * after[m];
      const V factor = V::all(before[m]), other = V::all(after[m]);
      float *to = a.result + m * a.step, *from = b.result + m * b.step;
      for (int64_t i = 0; i < width; i += 16)
        V::store(to + i, fused(V::load(from + i), other, multiply(V::load(to + i), factor)));
    }
  }
}

template <class V>
inline void write_outputs(const Attention& a, const AttentionItem& item, const State& state) {
  const AttentionSizes& s = a.sizes;
  const int64_t shared = s.shared();
  for (int64_t m = 0; m < item.count; m++) {
    const int64_t query = item.first + m, head = item.head * shared + query % shared;
    float sum = state.sum[m], factor = 1.0f;
    if (a.sinks != nullptr) {
      const float sink = a.sinks[head], most = sink > state.most[m] ? sink : state.most[m];
      factor = exponential_of<V>(state.most[m] - most);
      sum = sum * factor + exponential_of<V>(sink - most);
    }
    factor /= sum;
    float* y = a.output + (a.begins[item.row] + query / shared) * a.output_step + head * s.size;
    if (m + kTokensAhead * shared < item.count)
      for (int64_t i = 0; i < s.size; i += kLineFloats) __builtin_prefetch(y + kTokensAhead * a.output_step + i, 1);
    for (int64_t i = 0; i < s.size; i++) y[i] = state.result[m * state.step + i] * factor;
  }
}

inline State part_state(const Attention& a, const AttentionItem& item, int64_t part) {
  const int64_t width = a.sizes.width();
  float* first = item.states + (part - item.first_part) * item.count * (width + 2);
  return {first, first + item.count, first + 2 * item.count, width};
}

template <class V>
void finish(const Attention& a, const AttentionItem& item) {
  const int64_t width = a.sizes.width();
  alignas(64) float results[16 * kLargestHead];
  float most[16], sum[16];
  const State all = {most, sum, results, width};
  for (int64_t first = 0; first < item.count; first += 16) {
    AttentionItem some = item;
    some.first += first;
    some.count = item.count - first < 16 ? item.count - first : 16;
    clear(all, some.count, width);
    for (int64_t part = item.first_part; part < item.last_part; part++)
      merge<V>(all, part_state(a, item, part).from(first), some.count, width);
    write_outputs<V>(a, some, all);
  }
}

}  // namespace
}  // namespace carryall
