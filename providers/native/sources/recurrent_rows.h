// The kernels of recurrent.h over vectors `V` of 16 floats. Included by one source per instruction set, so in an anonymous
// namespace. All instruction sets do the same operations in the same order.
#pragma once
#include <initializer_list>

#include "gate.h"
#include "integers.h"
#include "recurrent.h"
#include "rows.h"

namespace carryall {
namespace {

constexpr int64_t kAhead = 4;   // tokens whose keys and queries are fetched in advance

// Calls work(i, count) for vectors of `count` elements from i on.
template <class Work>
CARRYALL_INLINE void each_vector(int64_t size, const Work& work) {
  for (int64_t i = 0; i < size; i += 16) work(i, size - i < 16 ? size - i : 16);
}

template <class V>
CARRYALL_INLINE V some(const float* x, int64_t count) {
  return count == 16 ? V::load(x) : load_part<V>(x, count);
}

template <class V>
CARRYALL_INLINE void store_some(float* y, int64_t count, const V& x) {
  if (count == 16) return V::store(y, x);
  store_part(y, count, x);
}

template <class V>
float dot(const float* a, const float* b, int64_t size) {
  V sum = V::all(0.0f);
  each_vector(size, [&](int64_t i, int64_t count) { sum = fused(some<V>(a + i, count), some<V>(b + i, count), sum); });
  return sum_of(sum);
}

// A token whose states are not read yet: its row, and whether it is the second of its pair.
struct PlacedToken {
  int64_t row, token;
  bool second;

  bool first_is_held(const DeltaRule& r) const { return token == r.first(row); }
  int64_t slot(const DeltaRule& r) const { return r.slot(row, token); }
};

// The vectors of a token and head with decays of each element of the key.
inline float* vectors_of(const DeltaRule& r, const DeltaTokens& tokens, int64_t slot, int64_t head) {
  return tokens.vectors + (slot * r.heads + head) * kKeyVectors * r.key_size;
}

template <class V>
void prepare_by_head(const DeltaRule& r, const PlacedToken& t, const DeltaTokens& tokens) {
  const int64_t shared = r.heads / r.key_heads, size = r.key_size;
  exponentials<V>(r.decay + t.token * r.heads, r.heads, 0.0f, tokens.factors + t.slot(r) * r.heads);
  for (int64_t head = 0; head < r.key_heads; head++) {
    const int64_t at = (t.token * r.key_heads + head) * size;
    const float *query = r.query + at, *key = r.key + at;
    float products[3] = {dot<V>(query, key, size), 0.0f, 0.0f};
    if (t.second) {
      const float* first = t.first_is_held(r) ? r.held(t.row, head * shared).key : key - r.key_heads * size;
      products[1] = dot<V>(key, first, size);
      products[2] = dot<V>(query, first, size);
    }
    for (int64_t i = 0; i < shared; i++) memcpy(tokens.products + (t.slot(r) * r.heads + head * shared + i) * 3, products, sizeof products);
  }
}

template <class V>
void prepare_by_key(const DeltaRule& r, const PlacedToken& t, const DeltaTokens& tokens) {
  const int64_t shared = r.heads / r.key_heads, size = r.key_size;
  for (int64_t head = 0; head < r.heads; head++) {
    const int64_t own = (t.token * r.heads + head) * size, at = (t.token * r.key_heads + head / shared) * size;
    float *key = vectors_of(r, tokens, t.slot(r), head), *keys = key + size, *queries = keys + size, *factors = queries + size;
    float *first_keys = factors + size, *products = tokens.products + (t.slot(r) * r.heads + head) * 3;
    exponentials<V>(r.decay + own, size, 0.0f, factors);
    memcpy(key, r.key + at, sizeof(float) * static_cast<size_t>(size));
    multiply_rows<V>(factors, key, size, keys);
    multiply_rows<V>(factors, r.query + at, size, queries);
    products[0] = dot<V>(r.query + at, key, size);
    if (!t.second) continue;
    const HeldToken held = r.held(t.row, head);
    const float* first = t.first_is_held(r) ? held.key : r.key + at - r.key_heads * size;
    products[1] = dot<V>(keys, first, size);
    products[2] = dot<V>(queries, first, size);
    multiply_rows<V>(factors, first, size, first_keys);
    each_vector(size, [&](int64_t i, int64_t count) {
      const V decay = t.first_is_held(r) ? V::load(held.decay + i) : exponential(some<V>(r.decay + own - r.heads * size + i, count));
      for (float* y : {factors, keys, queries}) store_some<V>(y + i, count, multiply(decay, some<V>(y + i, count)));
    });
  }
}

// Copies what the states of a row hold, since tasks of other columns will overwrite it.
inline void copy_held(const DeltaRule& r, int64_t row, const DeltaTokens& tokens) {
  tokens.held[row] = *r.held(row, 0).count;
  for (int64_t head = 0; head < r.heads; head++) {
    const HeldToken held = r.held(row, head);
    const int64_t at = row * r.heads + head;
    tokens.held_factors[at] = *held.decay;
    if (!r.by_key) memcpy(tokens.held_keys + at * r.key_size, held.key, sizeof(float) * static_cast<size_t>(r.key_size));
  }
}

template <class V>
void prepare_delta(const DeltaRule& r, int64_t row, int64_t first, int64_t last, const DeltaTokens& tokens) {
  for (int64_t token = first; token < last; token++) {
    const int64_t before = token - r.first(row);
    if (before == 0) copy_held(r, row, tokens);
    const PlacedToken placed{row, token, (before + (*r.held(row, 0).count > 0.0f)) % 2 == 1};
    (r.by_key ? prepare_by_key<V> : prepare_by_head<V>)(r, placed, tokens);
  }
}

// What two tokens need of the states of some tiles: sums over the key of k s and q s, in order.
template <class V, int kTiles>
struct StateSums {
  V keys[2][kTiles], queries[2][kTiles];
};

// Keys and queries that read the states, of one token or two.
struct Readers {
  const float *keys[2], *queries[2];
};

// The update by a pair: s = decay s + k1 d1 + k2 d2.
template <class V, int kTiles>
struct PairUpdate {
  const float *keys[2], *decays;  // the keys; with `by_key` the decays of both tokens, else one for all
  V d[2][kTiles];
};

// Elements of a state, which are float or bfloat16.
template <class V>
CARRYALL_INLINE V load_state(const float* x) {
  return V::load(x);
}
template <class V>
CARRYALL_INLINE V load_state(const uint16_t* x) {
  return V::from_bfloat16(x);
}

// Stores elements; returns what `load_state` reads, so that the next tokens of a run see what those of another run would.
template <class V>
CARRYALL_INLINE V store_state(float* y, const V& x) {
  V::store(y, x);
  return x;
}
template <class V>
CARRYALL_INLINE V store_state(uint16_t* y, const V& x) {
  return V::store_bfloat16(y, x);
}

// Passes over the states [tiles, size, 16] of consecutive tiles. Functions of their own, so that their operands stay in registers.
template <class V, bool by_key, int kTiles, class State>
struct StatePass {
  // Updates the states by a pair, if there is one, and sums for the next tokens.
  template <bool updates, int readers>
  [[gnu::noinline]] static void run(State* first, int64_t size, const PairUpdate<V, kTiles>* pair, const Readers& next,
                                    StateSums<V, kTiles>* result) {
    V keys[2][kTiles], queries[2][kTiles], d[2][kTiles];
    // Vectors that are written may alias these pointers, as far as the compiler knows.
    const float *const key1 = updates ? pair->keys[0] : nullptr, *const key2 = updates ? pair->keys[1] : nullptr;
    const float *const decays = updates ? pair->decays : nullptr;
    const Readers x = next;
    V decay = V::all(updates && !by_key ? *decays : 1.0f);
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      keys[0][t] = keys[1][t] = queries[0][t] = queries[1][t] = V::all(0.0f);
      if (updates) d[0][t] = pair->d[0][t], d[1][t] = pair->d[1][t];
    }
    for (int64_t i = 0; i < size; i++) {
      State* at = first + i * 16;
      V states[kTiles];  // all are read before one is written: tiles lie pages apart, and the lower bits of their addresses are equal
      if (updates && by_key) decay = V::all(decays[i]);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) states[t] = load_state<V>(at + t * size * 16);
      if (updates) {
        const V k1 = V::all(key1[i]), k2 = V::all(key2[i]);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; t++) states[t] = fused(k2, d[1][t], fused(k1, d[0][t], multiply(decay, states[t])));
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; t++) states[t] = store_state<V>(at + t * size * 16, states[t]);
      }
#pragma GCC unroll 2
      for (int n = 0; n < readers; n++) {
        const V k = V::all(x.keys[n][i]), q = V::all(x.queries[n][i]);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; t++) {
          keys[n][t] = fused(k, states[t], keys[n][t]);
          queries[n][t] = fused(q, states[t], queries[n][t]);
        }
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < readers; n++)
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) result->keys[n][t] = keys[n][t], result->queries[n][t] = queries[n][t];
  }
};

// The tokens of a row, for some tiles of a head.
template <class V, bool by_key, int kTiles, class State>
class DeltaTiles {
 public:
  CARRYALL_INLINE DeltaTiles(const DeltaRule& r, const DeltaTokens& tokens, int64_t row, int64_t head, int64_t tile)
      : r_(r), tokens_(tokens), row_(row), head_(head), tile_(tile), first_(r.first(row)), last_(r.last(row)),
        key_step_(by_key ? r.heads * kKeyVectors * r.key_size : r.key_heads * r.key_size),
        key_(by_key ? vectors_of(r, tokens, r.slot(row, first_), head) : of_first(r.key)),
        reading_key_(by_key ? key_ + r.key_size : key_), query_(by_key ? key_ + 2 * r.key_size : of_first(r.query)),
        states_(reinterpret_cast<State*>(r.state(row, head)) + tile * r.key_size * 16) {}

  // A pair reads the states while they are written by the pair before, so that each element is read and written once for two
  // tokens. The 16 columns of a tile do not depend on the others, and stay in the first-level cache over all tokens. Several tiles
  // at a time read an element of a key or query once for all.
  CARRYALL_INLINE void run() {
    const bool held = tokens_.held[row_] > 0.0f;
    const HeldToken kept = r_.held(row_, head_);
    V d[2][kTiles];
    StateSums<V, kTiles> sums;
    int64_t token = first_;  // the first of a pair that is not held
    if (held) {
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) d[0][t] = V::load(kept.d + (tile_ + t) * 16);
      Pass::template run<false, 1>(states_, r_.key_size, nullptr, readers(first_), &sums);
      second(first_, sums.keys[0], sums.queries[0], d);
      update(first_, d, &sums);
      token++;
    } else {
      (first_ + 1 < last_ ? Pass::template run<false, 2> : Pass::template run<false, 1>)(states_, r_.key_size, nullptr, readers(first_), &sums);
    }
    for (; token < last_; token += 2) {
      first(token, sums.keys[0], sums.queries[0], d);
      if (token + 1 == last_) return hold(token, d[0], kept);
      ask_for(token + kAhead);
      ask_for(token + kAhead + 1);
      second(token + 1, sums.keys[1], sums.queries[1], d);
      update(token + 1, d, &sums);
    }
    if (held) clear(kept);
  }

 private:
  using Pass = StatePass<V, by_key, kTiles, State>;

  // Keys or queries of the first token, without decays by key.
  CARRYALL_INLINE const float* of_first(const float* x) const {
    return x + (first_ * r_.key_heads + head_ / (r_.heads / r_.key_heads)) * r_.key_size;
  }
  CARRYALL_INLINE int64_t own(int64_t token) const { return token * r_.heads + head_; }
  CARRYALL_INLINE int64_t prepared(int64_t token) const { return r_.slot(row_, token) * r_.heads + head_; }
  CARRYALL_INLINE int64_t value_at(int64_t token) const { return own(token) * r_.value_size + tile_ * 16; }
  CARRYALL_INLINE const float* key(int64_t token) const { return key_ + (token - first_) * key_step_; }

  // Those of a token and the next one; of the last token where there is none.
  CARRYALL_INLINE Readers readers(int64_t token) const {
    const int64_t one = token < last_ ? token : last_ - 1, two = token + 1 < last_ ? token + 1 : last_ - 1;
    return {{reading_key_ + (one - first_) * key_step_, reading_key_ + (two - first_) * key_step_},
            {query_ + (one - first_) * key_step_, query_ + (two - first_) * key_step_}};
  }

  // e^decay of the first token of a pair, which may be held.
  CARRYALL_INLINE float first_factor(int64_t token) const {
    return token < first_ ? tokens_.held_factors[row_ * r_.heads + head_] : tokens_.factors[prepared(token)];
  }

  // d and the output of a token whose key and query have read the states before it.
  CARRYALL_INLINE V finish(int64_t token, int t, const V& read, const V& out) {
    V d = V::load(r_.value + value_at(token) + t * 16);
    if (r_.beta != nullptr) d = multiply(V::all(r_.beta[own(token)]), subtract(d, read));
    V::store(r_.output + value_at(token) + t * 16, multiply(V::all(r_.scale), fused(V::all(tokens_.products[prepared(token) * 3]), d, out)));
    return d;
  }

  CARRYALL_INLINE void first(int64_t token, const V (&read)[kTiles], const V (&out)[kTiles], V (&d)[2][kTiles]) {
    const V decay = V::all(by_key ? 1.0f : first_factor(token));
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++)
      d[0][t] = by_key ? finish(token, t, read[t], out[t]) : finish(token, t, multiply(decay, read[t]), multiply(decay, out[t]));
  }

  CARRYALL_INLINE void second(int64_t token, const V (&read)[kTiles], const V (&out)[kTiles], V (&d)[2][kTiles]) {
    const float* products = tokens_.products + prepared(token) * 3;
    const V of_key = V::all(products[1]), of_query = V::all(products[2]);
    const V before = V::all(by_key ? 1.0f : first_factor(token - 1)), decay = V::all(by_key ? 1.0f : tokens_.factors[prepared(token)]);
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      if (by_key) {
        d[1][t] = finish(token, t, fused(of_key, d[0][t], read[t]), fused(of_query, d[0][t], out[t]));
      } else {
        d[1][t] = finish(token, t, multiply(decay, fused(of_key, d[0][t], multiply(before, read[t]))),
                         multiply(decay, fused(of_query, d[0][t], multiply(before, out[t]))));
        d[0][t] = multiply(decay, d[0][t]);
      }
    }
  }

  // The update by a pair that ends with `token`, and the sums of the next pair.
  CARRYALL_INLINE void update(int64_t token, const V (&d)[2][kTiles], StateSums<V, kTiles>* sums) const {
    const float *held = tokens_.held_keys + (row_ * r_.heads + head_) * r_.key_size, *factors = key(token) + 3 * r_.key_size;
    const float* first_key = by_key ? factors + r_.key_size : token == first_ ? held : key(token - 1);
    const float decay = by_key ? 1.0f : first_factor(token - 1) * tokens_.factors[prepared(token)];
    PairUpdate<V, kTiles> pair{{first_key, key(token)}, by_key ? factors : &decay, {}};
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) pair.d[0][t] = d[0][t], pair.d[1][t] = d[1][t];
    const int64_t left = last_ - token - 1;
    const auto pass = left > 1 ? Pass::template run<true, 2> : left > 0 ? Pass::template run<true, 1> : Pass::template run<true, 0>;
    pass(states_, r_.key_size, &pair, readers(token + 1), sums);
  }

  // Leaves a first token beside the states.
  CARRYALL_INLINE void hold(int64_t token, const V (&d)[kTiles], const HeldToken& kept) const {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) V::store(kept.d + (tile_ + t) * 16, d[t]);
    if (tile_ > 0) return;
    memcpy(kept.key, key(token), sizeof(float) * static_cast<size_t>(r_.key_size));
    *kept.count = 1.0f;
    if (by_key) exponentials<V>(r_.decay + own(token) * r_.key_size, r_.key_size, 0.0f, kept.decay);
    else *kept.decay = tokens_.factors[prepared(token)];
  }

  // So that a state has the same bits however its text was cut.
  CARRYALL_INLINE void clear(const HeldToken& kept) const {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) V::store(kept.d + (tile_ + t) * 16, V::all(0.0f));
    if (tile_ > 0) return;
    for (float* line = kept.key; line < kept.d; line += 16) V::store(line, V::all(0.0f));
    *kept.count = 0.0f;
  }

  // Asks for the key and query of a token. Tokens lie pages apart, so the processor does not guess these addresses.
  CARRYALL_INLINE void ask_for(int64_t token) const {
    if (token >= last_) return;
    for (int64_t i = 0; !by_key && i < r_.key_size; i += 16) {
      __builtin_prefetch(key(token) + i);
      __builtin_prefetch(query_ + (token - first_) * key_step_ + i);
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      __builtin_prefetch(r_.value + value_at(token) + t * 16);
      __builtin_prefetch(r_.output + value_at(token) + t * 16, 1);
    }
  }

  const DeltaRule& r_;
  const DeltaTokens& tokens_;
  const int64_t row_, head_, tile_, first_, last_, key_step_;  // floats from the keys of a token to those of the next
  const float *const key_, *const reading_key_, *const query_;  // of the first token
  State* const states_;
};

template <class V, bool by_key, class State, int kTiles>
int64_t delta_tiles(const DeltaRule& r, int64_t row, int64_t head, int64_t tile, int64_t end, const DeltaTokens& tokens) {
  for (; tile + kTiles <= end; tile += kTiles) DeltaTiles<V, by_key, kTiles, State>(r, tokens, row, head, tile).run();
  return tile;
}

template <class V, bool by_key, class State>
void delta_task(const DeltaRule& r, int64_t row, int64_t head, int64_t tile, int64_t end, const DeltaTokens& tokens) {
  const int64_t count = r.last(row) - r.first(row);
  if (count == 0) return;
  tile = (count == 1 ? delta_tiles<V, by_key, State, V::kStatesOfOne> : delta_tiles<V, by_key, State, V::kStates>)(r, row, head, tile, end, tokens);
  delta_tiles<V, by_key, State, 1>(r, row, head, tile, end, tokens);
}

template <class V>
void delta_rule(const DeltaRule& r, int64_t row, int64_t head, int64_t tile, int64_t end, const DeltaTokens& tokens) {
  const auto by_head = r.bfloat16 ? delta_task<V, false, uint16_t> : delta_task<V, false, float>;
  const auto by_key = r.bfloat16 ? delta_task<V, true, uint16_t> : delta_task<V, true, float>;
  (r.by_key ? by_key : by_head)(r, row, head, tile, end, tokens);
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
