// Sums and norms of rows, over vectors `V` of 16 floats. Included by one source per instruction set, so in an anonymous
// namespace. All instruction sets do the same operations in the same order.
#pragma once
#include <cmath>
#include <cstring>

#include "attention.h"

namespace carryall {
namespace {

// The first `count` floats of a vector; the others are zeros.
template <class V>
inline V load_part(const float* x, int64_t count) {
  float part[16] = {};
  memcpy(part, x, sizeof(float) * static_cast<size_t>(count));
  return V::load(part);
}

template <class V>
inline void store_part(float* y, int64_t count, V x) {
  float part[16];
  V::store(part, x);
  memcpy(y, part, sizeof(float) * static_cast<size_t>(count));
}

// The sum of 16 floats, in a fixed order.
template <class V>
inline float sum_of(V x) {
  x = add(x, V::template exchanged<8>(x));
  x = add(x, V::template exchanged<4>(x));
  x = add(x, V::template exchanged<2>(x));
  x = add(x, V::template exchanged<1>(x));
  float y[16];
  V::store(y, x);
  return y[0];
}

// y = a + b, or (a + b) + bias.
template <class V>
void add_rows(const float* a, const float* b, const float* bias, int64_t count, float* y) {
  const int64_t whole = count / 16 * 16, rest = count - whole;
  for (int64_t i = 0; i < whole; i += 16) {
    const V sum = add(V::load(a + i), V::load(b + i));
    V::store(y + i, bias == nullptr ? sum : add(sum, V::load(bias + i)));
  }
  if (rest == 0) return;
  const V sum = add(load_part<V>(a + whole, rest), load_part<V>(b + whole, rest));
  store_part(y + whole, rest, bias == nullptr ? sum : add(sum, load_part<V>(bias + whole, rest)));
}

// y = x / sqrt(mean(x^2) + epsilon) * weight (RMSNormalization, arXiv:1910.07467). Squares are summed in 64 lanes.
template <class V>
void normalize(const float* x, const float* weight, int64_t count, float epsilon, float* y) {
  const int64_t whole = count / 16 * 16, rest = count - whole;
  V sums[4] = {V::all(0.0f), V::all(0.0f), V::all(0.0f), V::all(0.0f)};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int k = 0; k < 4; k++) {
      const V part = V::load(x + i + 16 * k);
      sums[k] = fused(part, part, sums[k]);
    }
  for (int k = 0; i < whole; i += 16, k++) {
    const V part = V::load(x + i);
    sums[k] = fused(part, part, sums[k]);
  }
  if (rest > 0) {
    const V part = load_part<V>(x + whole, rest);
    sums[3] = fused(part, part, sums[3]);
  }
  const float squares = sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const V scale = V::all(1.0f / std::sqrt(squares / static_cast<float>(count) + epsilon));
  for (i = 0; i < whole; i += 16) V::store(y + i, multiply(multiply(V::load(x + i), scale), V::load(weight + i)));
  if (rest > 0)
    store_part(y + whole, rest, multiply(multiply(load_part<V>(x + whole, rest), scale), load_part<V>(weight + whole, rest)));
}

}  // namespace
}  // namespace carryall
