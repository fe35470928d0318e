// The kernels of recurrent.h over vectors `V` of 16 floats. Included by one source per instruction set, so in an anonymous
// namespace. All instruction sets do the same operations in the same order.
#pragma once
#include "gate.h"
#include "recurrent.h"
#include "rows.h"

namespace carryall {
namespace {

constexpr int64_t kAhead = 3;  // tokens whose inputs are fetched in advance

template <class V>
void prepare_delta(const DeltaRule& r, int64_t first, int64_t last, float* factors, float* products) {
  const int64_t decays = r.heads * (r.by_key ? r.key_size : 1), shared = r.heads / r.key_heads;
  for (int64_t token = first; token < last; token++) {
    exponentials<V>(r.decay + token * decays, decays, 0.0f, factors + token * decays);
    for (int64_t head = 0; head < r.key_heads; head++) {
      const int64_t at = (token * r.key_heads + head) * r.key_size;
      V sum = V::all(0.0f);
      for (int64_t i = 0; i < r.key_size; i += 16) {
        const int64_t count = r.key_size - i < 16 ? r.key_size - i : 16;
        sum = fused(load_part<V>(r.query + at + i, count), load_part<V>(r.key + at + i, count), sum);
      }
      const float product = sum_of(sum);
      for (int64_t i = 0; i < shared; i++) products[token * r.heads + head * shared + i] = product;
    }
  }
}

// What a token needs of the state: sums over the key of k s and q s, with s as the token before left it (times its decays,
// if each element of a key has its own). Even and odd elements have sums of their own, so that additions do not wait.
template <class V>
struct StateSums {
  V even_key = V::all(0.0f), odd_key = V::all(0.0f), even_query = V::all(0.0f), odd_query = V::all(0.0f);

  V key() const { return add(even_key, odd_key); }
  V query() const { return add(even_query, odd_query); }
};

template <class V, bool by_key>
CARRYALL_INLINE void add_state(float k, float q, const float* a, V s, V* key, V* query) {
  if (by_key) s = multiply(V::all(*a), s);
  *key = fused(V::all(k), s, *key);
  *query = fused(V::all(q), s, *query);
}

template <class V, bool by_key>
CARRYALL_INLINE StateSums<V> first_sums(const float* s, int64_t size, const float* k, const float* q, const float* a) {
  StateSums<V> sums;
  for (int64_t i = 0; i + 1 < size; i += 2) {
    add_state<V, by_key>(k[i], q[i], a + i, V::load(s + 16 * i), &sums.even_key, &sums.even_query);
    add_state<V, by_key>(k[i + 1], q[i + 1], a + i + 1, V::load(s + 16 * i + 16), &sums.odd_key, &sums.odd_query);
  }
  const int64_t i = size - 1;
  if (size % 2 != 0) add_state<V, by_key>(k[i], q[i], a + i, V::load(s + 16 * i), &sums.even_key, &sums.even_query);
  return sums;
}

// s = a s + k d
template <class V, bool by_key>
CARRYALL_INLINE V next_state(float* s, float k, const float* a, V shared, V d) {
  const V state = fused(V::all(k), d, multiply(by_key ? V::all(*a) : shared, V::load(s)));
  V::store(s, state);
  return state;
}

// Updates the state, and returns the sums of the next token over it; without a next token zeros.
template <class V, bool by_key, bool has_next>
CARRYALL_INLINE StateSums<V> update(float* s, int64_t size, const float* k, const float* a, V d, const float* next_k,
                                    const float* next_q, const float* next_a) {
  const V shared = V::all(a[0]);
  StateSums<V> sums;
  for (int64_t i = 0; i + 1 < size; i += 2) {
    const V even = next_state<V, by_key>(s + 16 * i, k[i], a + i, shared, d);
    const V odd = next_state<V, by_key>(s + 16 * i + 16, k[i + 1], a + i + 1, shared, d);
    if (!has_next) continue;
    add_state<V, by_key>(next_k[i], next_q[i], next_a + i, even, &sums.even_key, &sums.even_query);
    add_state<V, by_key>(next_k[i + 1], next_q[i + 1], next_a + i + 1, odd, &sums.odd_key, &sums.odd_query);
  }
  if (size % 2 == 0) return sums;
  const int64_t i = size - 1;
  const V even = next_state<V, by_key>(s + 16 * i, k[i], a + i, shared, d);
  if (has_next) add_state<V, by_key>(next_k[i], next_q[i], next_a + i, even, &sums.even_key, &sums.even_query);
  return sums;
}

// Asks for what a token reads and writes. Tokens lie pages apart, so the processor does not guess these addresses.
CARRYALL_INLINE void ask_for(const float* k, const float* q, int64_t size, const float* value, const float* output) {
  for (int64_t i = 0; i < size; i += 16) {
    __builtin_prefetch(k + i);
    __builtin_prefetch(q + i);
  }
  __builtin_prefetch(value);
  __builtin_prefetch(output, 1);
}

// The sums of a token are taken while the token before writes the state, so that each element is read and written once a
// token. The 16 columns of a tile do not depend on the others, and stay in the first-level cache over all tokens.
template <class V, bool by_key>
void delta_tile(const DeltaRule& r, int64_t row, int64_t head, int64_t tile, const float* factors, const float* products) {
  const int64_t first = r.begins[row], last = r.begins[row + 1], size = r.key_size;
  if (first == last) return;
  float* s = r.states + ((r.places[row] * r.heads + head) * r.tiles() + tile) * size * 16;
  const int64_t of_keys = head / (r.heads / r.key_heads);
  const auto keys = [&](const float* x, int64_t token) { return x + (token * r.key_heads + of_keys) * size; };
  const auto decays = [&](int64_t token) { return factors + (token * r.heads + head) * (by_key ? size : 1); };
  const V scale = V::all(r.scale);
  StateSums<V> sums = first_sums<V, by_key>(s, size, keys(r.key, first), keys(r.query, first), decays(first));
  for (int64_t token = first; token < last; token++) {
    const float* a = decays(token);
    const int64_t at = (token * r.heads + head) * r.value_size + tile * 16;
    if (const int64_t ahead = token + kAhead; ahead < last) {
      const int64_t step = kAhead * r.heads * r.value_size;
      ask_for(keys(r.key, ahead), keys(r.query, ahead), size, r.value + at + step, r.output + at + step);
    }
    V read = sums.key(), out = sums.query();
    if (!by_key) {
      read = multiply(V::all(a[0]), read);
      out = multiply(V::all(a[0]), out);
    }
    V d = V::load(r.value + at);
    if (r.beta != nullptr) d = multiply(V::all(r.beta[token * r.heads + head]), subtract(d, read));
    V::store(r.output + at, multiply(scale, fused(V::all(products[token * r.heads + head]), d, out)));
    const float* k = keys(r.key, token);
    if (token + 1 == last)
      update<V, by_key, false>(s, size, k, a, d, nullptr, nullptr, nullptr);
    else
      sums = update<V, by_key, true>(s, size, k, a, d, keys(r.key, token + 1), keys(r.query, token + 1), decays(token + 1));
  }
}

template <class V>
void delta_rule(const DeltaRule& r, int64_t row, int64_t head, int64_t tile, const float* factors, const float* products) {
  r.by_key ? delta_tile<V, true>(r, row, head, tile, factors, products)
           : delta_tile<V, false>(r, row, head, tile, factors, products);
}

template <class V>
void convolve(const Convolution& c, int64_t row, int64_t first, int64_t last) {
  const int64_t begin = c.begins[row], end = c.begins[row + 1], past = c.taps - 1;
  float* state = c.states + c.places[row] * past * c.channels;
  for (int64_t channel = first; channel < last; channel += 16) {
    const int64_t count = last - channel < 16 ? last - channel : 16;
    const auto part = [&](const float* x) {
      return count == 16 ? V::load(x + channel) : load_part<V>(x + channel, count);
    };
    // The input `age` tokens before a token: of this run, or of the state.
    const auto input = [&](int64_t token, int64_t age) {
      const int64_t from = token - age;
      return part(from >= begin ? c.x + from * c.channels : state + (past + from - begin) * c.channels);
    };
    for (int64_t token = begin; token < end; token++) {
      V y = c.bias == nullptr ? V::all(0.0f) : part(c.bias);
      for (int64_t age = past; age >= 0; age--) y = fused(part(c.weights + (past - age) * c.channels), input(token, age), y);
      if (c.silu) y = gated(y, V::all(0.0f), -1.44269504f, 1.0f);
      store_part(c.output + token * c.channels + channel, count, y);
    }
    for (int64_t i = 0; i < past; i++)  // ascending: a newer input is read before its place is written
      store_part(state + i * c.channels + channel, count, input(end - 1, past - 1 - i));
  }
}

template <class V>
constexpr RecurrentKernels recurrent_kernels() {
  return {prepare_delta<V>, delta_rule<V>, convolve<V>};
}

}  // namespace
}  // namespace carryall
