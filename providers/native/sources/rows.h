// Sums, products, norms and activation functions of rows, over vectors `V` of 16 floats. Included by one source per instruction set, so in an anonymous
// namespace. All instruction sets do the same operations in the same order.
#pragma once
#include <cmath>
#include <cstring>

#include "attention.h"
#include "gate.h"

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

// y = a * b.
template <class V>
void multiply_rows(const float* a, const float* b, int64_t count, float* y) {
  const int64_t whole = count / 16 * 16, rest = count - whole;
  for (int64_t i = 0; i < whole; i += 16) V::store(y + i, multiply(V::load(a + i), V::load(b + i)));
  if (rest > 0) store_part(y + whole, rest, multiply(load_part<V>(a + whole, rest), load_part<V>(b + whole, rest)));
}

// y = (x - mean) / sqrt(variance + epsilon) * weight + bias (LayerNormalization, arXiv:1607.06450); bias may be null. x and y
// may be the same. Sums are in 64 lanes.
template <class V>
void center(const float* x, const float* weight, const float* bias, int64_t count, float epsilon, float* y) {
  const int64_t whole = count / 16 * 16, rest = count - whole;
  const V zero = V::all(0.0f);
  V sums[4] = {zero, zero, zero, zero};
  for (int64_t i = 0; i < whole; i += 16) sums[i / 16 % 4] = add(sums[i / 16 % 4], V::load(x + i));
  if (rest > 0) sums[3] = add(sums[3], load_part<V>(x + whole, rest));
  const V mean = V::all(sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(count));
  V squares[4] = {zero, zero, zero, zero};
  for (int64_t i = 0; i < whole; i += 16) {
    const V part = subtract(V::load(x + i), mean);
    squares[i / 16 % 4] = fused(part, part, squares[i / 16 % 4]);
  }
  if (rest > 0) {
    float part[16] = {};
    store_part(part, rest, subtract(load_part<V>(x + whole, rest), mean));
    const V last = V::load(part);
    squares[3] = fused(last, last, squares[3]);
  }
  const float variance = sum_of(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(count);
  const V scale = V::all(1.0f / std::sqrt(variance + epsilon));
  for (int64_t i = 0; i < whole; i += 16) {
    const V part = multiply(multiply(subtract(V::load(x + i), mean), scale), V::load(weight + i));
    V::store(y + i, bias == nullptr ? part : add(part, V::load(bias + i)));
  }
  if (rest == 0) return;
  const V part = multiply(multiply(subtract(load_part<V>(x + whole, rest), mean), scale), load_part<V>(weight + whole, rest));
  store_part(y + whole, rest, bias == nullptr ? part : add(part, load_part<V>(bias + whole, rest)));
}

// x / 2 * (1 + erf(x / sqrt(2))); the quotient of two polynomials in x^2, fitted to erf(x / sqrt(2)) for |x| <= 5.5 by
// reweighted least squares, is off by at most 4e-7. Below -5.5 the result is less than 1.1e-7 and becomes 0.
template <class V>
inline V gelu(V x) {
  const V most = V::all(5.5f), least = V::all(-5.5f), z = minimum(most, maximum(least, x)), t = multiply(z, z);
  V p = fused(V::all(4.57638371642588e-8f), t, V::all(1.2629301636479795e-5f));
  p = fused(p, t, V::all(3.3138252911157906e-4f));
  p = fused(p, t, V::all(9.316516108810902e-3f));
  p = fused(p, t, V::all(6.712529063224792e-2f));
  p = fused(p, t, V::all(7.978845238685608e-1f));
  V q = fused(V::all(1.1985680430370849e-6f), t, V::all(7.255492528202012e-5f));
  q = fused(q, t, V::all(1.8669035052880645e-3f));
  q = fused(q, t, V::all(2.8476623818278313e-2f));
  q = fused(q, t, V::all(2.507953345775604e-1f));
  q = fused(q, t, V::all(1.0f));
  const V half = multiply(V::all(0.5f), x);
  return zero_if_less(x, least, fused(half, divide(multiply(z, p), q), half));
}

// x * sigmoid(y), where raised = -log2(e) * y.
template <class V>
inline V sigmoid_times(V x, V raised) { return multiply(subtract(V::all(0.0f), x), negative_sigmoid(raised)); }

template <class V>
inline V activated(Activation kind, V x) {
  switch (kind) {
    case Activation::gelu: return gelu(x);
    case Activation::gelu_tanh: {  // x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
      constexpr float kFactor = -2.0f * 0.7978845608f * 1.44269504f;
      const V cube = fused(multiply(multiply(x, x), V::all(0.044715f)), x, x);
      return sigmoid_times(x, multiply(cube, V::all(kFactor)));
    }
    case Activation::silu: return sigmoid_times(x, multiply(x, V::all(-1.44269504f)));
    case Activation::quick_gelu: return sigmoid_times(x, multiply(x, V::all(-1.702f * 1.44269504f)));
    default: return maximum(V::all(0.0f), x);
  }
}

template <class V>
void activate(Activation kind, const float* x, int64_t count, float* y) {
  const int64_t whole = count / 16 * 16, rest = count - whole;
  for (int64_t i = 0; i < whole; i += 16) V::store(y + i, activated(kind, V::load(x + i)));
  if (rest > 0) store_part(y + whole, rest, activated(kind, load_part<V>(x + whole, rest)));
}

}  // namespace
}  // namespace carryall
