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
      const int64_t whole = r.key_size / 16 * 16, rest = r.key_size - whole;
      for (int64_t i = 0; i < whole; i += 16) sum = fused(V::load(r.query + at + i), V::load(r.key + at + i), sum);
      if (rest > 0) sum = fused(load_part<V>(r.query + at + whole, rest), load_part<V>(r.key + at + whole, rest), sum);
      const float product = sum_of(sum);
      for (int64_t i = 0; i < shared; i++) products[token * r.heads + head * shared + i] = product;
    }
  }
}

// What a token reads for a head: its key and query, and its decay, or those of each element of the key.
struct HeadInputs {
  const float *key, *query, *decay;
};

// What a token needs of the states of some tiles: sums over the key of k s and q s, with s as the token before left it (times its
// decays, if each element of a key has its own). Even and odd elements have sums of their own, so that additions do not wait.
template <class V, int kTiles>
struct StateSums {
  V keys[2][kTiles], queries[2][kTiles];

  CARRYALL_INLINE StateSums() {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) keys[0][t] = keys[1][t] = queries[0][t] = queries[1][t] = V::all(0.0f);
  }
  template <bool by_key>
  CARRYALL_INLINE void add_states(const HeadInputs& x, int64_t i, int odd, const V (&states)[kTiles]) {
    const V k = V::all(x.key[i]), q = V::all(x.query[i]);
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      const V s = by_key ? multiply(V::all(x.decay[i]), states[t]) : states[t];
      keys[odd][t] = fused(k, s, keys[odd][t]);
      queries[odd][t] = fused(q, s, queries[odd][t]);
    }
  }
  CARRYALL_INLINE V key(int t) const { return add(keys[0][t], keys[1][t]); }
  CARRYALL_INLINE V query(int t) const { return add(queries[0][t], queries[1][t]); }
};

// The states [tiles, size, 16] of consecutive tiles.
template <class V, bool by_key, int kTiles>
struct States {
  float* first;
  int64_t size;  // of a key

  CARRYALL_INLINE float* at(int t, int64_t i) const { return first + (t * size + i) * 16; }

  CARRYALL_INLINE StateSums<V, kTiles> sums(const HeadInputs& x) const {
    StateSums<V, kTiles> sums;
    each_element([&](int64_t i, int odd) __attribute__((always_inline)) {
      V states[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) states[t] = V::load(at(t, i));
      sums.template add_states<by_key>(x, i, odd, states);
    });
    return sums;
  }

  // s = a s + k d. Returns the sums of the next token over it; without a next token zeros.
  template <bool has_next>
  CARRYALL_INLINE StateSums<V, kTiles> update(const HeadInputs& x, const V (&d)[kTiles], const HeadInputs& next) const {
    const V shared = V::all(x.decay[0]);
    StateSums<V, kTiles> sums;
    each_element([&](int64_t i, int odd) __attribute__((always_inline)) {
      const V k = V::all(x.key[i]), a = by_key ? V::all(x.decay[i]) : shared;
      V states[kTiles];  // all are read before one is written: tiles lie pages apart, and the lower bits of their addresses are equal
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) states[t] = fused(k, d[t], multiply(a, V::load(at(t, i))));
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) V::store(at(t, i), states[t]);
      if (has_next) sums.template add_states<by_key>(next, i, odd, states);
    });
    return sums;
  }

 private:
  template <class Work>
  CARRYALL_INLINE void each_element(const Work& work) const {
    int64_t i = 0;
    for (; i + 1 < size; i += 2) {
      work(i, 0);
      work(i + 1, 1);
    }
    if (i < size) work(i, 0);
  }
};

// Asks for what a token reads and writes. Tokens lie pages apart, so the processor does not guess these addresses.
template <int kTiles>
CARRYALL_INLINE void ask_for(const HeadInputs& x, int64_t size, const float* value, const float* output) {
  for (int64_t i = 0; i < size; i += 16) {
    __builtin_prefetch(x.key + i);
    __builtin_prefetch(x.query + i);
  }
  for (int t = 0; t < kTiles; t++) {
    __builtin_prefetch(value + t * 16);
    __builtin_prefetch(output + t * 16, 1);
  }
}

// The sums of a token are taken while the token before writes the state, so that each element is read and written once a
// token. The 16 columns of a tile do not depend on the others, and stay in the first-level cache over all tokens. Several tiles at a
// time read an element of a key or query once for all.
template <class V, bool by_key, int kTiles>
void delta_tiles(const DeltaRule& r, int64_t row, int64_t head, int64_t tile, const float* factors, const float* products) {
  const int64_t first = r.begins[row], last = r.begins[row + 1], size = r.key_size;
  if (first == last) return;
  const States<V, by_key, kTiles> states{r.states + ((r.places[row] * r.heads + head) * r.tiles() + tile) * size * 16, size};
  const int64_t of_keys = head / (r.heads / r.key_heads);
  const auto inputs = [&](int64_t token) {
    const int64_t at = (token * r.key_heads + of_keys) * size;
    return HeadInputs{r.key + at, r.query + at, factors + (token * r.heads + head) * (by_key ? size : 1)};
  };
  const V scale = V::all(r.scale);
  HeadInputs x = inputs(first);
  StateSums<V, kTiles> sums = states.sums(x);
  for (int64_t token = first; token < last; token++) {
    const int64_t at = (token * r.heads + head) * r.value_size + tile * 16;
    if (const int64_t ahead = token + kAhead; ahead < last) {
      const int64_t step = kAhead * r.heads * r.value_size;
      ask_for<kTiles>(inputs(ahead), size, r.value + at + step, r.output + at + step);
    }
    const V product = V::all(products[token * r.heads + head]), decay = V::all(x.decay[0]);
    V d[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      V read = sums.key(t), out = sums.query(t);
      if (!by_key) {
        read = multiply(decay, read);
        out = multiply(decay, out);
      }
      d[t] = V::load(r.value + at + t * 16);
      if (r.beta != nullptr) d[t] = multiply(V::all(r.beta[token * r.heads + head]), subtract(d[t], read));
      V::store(r.output + at + t * 16, multiply(scale, fused(product, d[t], out)));
    }
    const HeadInputs now = x;
    if (token + 1 == last) {
      states.template update<false>(now, d, now);
    } else {
      x = inputs(token + 1);
      sums = states.template update<true>(now, d, x);
    }
  }
}

template <class V, bool by_key>
void delta_task(const DeltaRule& r, int64_t row, int64_t head, int64_t tile, int64_t end, const float* factors, const float* products) {
  for (; tile + V::kStates <= end; tile += V::kStates) delta_tiles<V, by_key, V::kStates>(r, row, head, tile, factors, products);
  for (; tile < end; tile++) delta_tiles<V, by_key, 1>(r, row, head, tile, factors, products);
}

template <class V>
void delta_rule(const DeltaRule& r, int64_t row, int64_t head, int64_t tile, int64_t end, const float* factors, const float* products) {
  (r.by_key ? delta_task<V, true> : delta_task<V, false>)(r, row, head, tile, end, factors, products);
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
