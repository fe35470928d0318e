// The exponential function, and the gate between the products of an expert, over vectors `V` of 16 floats. Included by
// one source per instruction set, so in an anonymous namespace.
#pragma once
#include <cmath>
#include <cstring>

#include "attention.h"

namespace carryall {
namespace {

// e^x with an error of 1 unit in the last place (Cephes, expf); 0 below -87, e^88 above 88.
template <class V>
inline V exponential(V x) {
  const V least = V::all(-87.0f), bounded = minimum(V::all(88.0f), maximum(least, x));  // keeps a NaN
  const V shift = V::all(12582912.0f);                                                  // rounds to an integer
  const V shifted = fused(bounded, V::all(1.44269504f), shift), n = subtract(shifted, shift);
  const V r = fused(n, V::all(2.12194440e-4f), fused(n, V::all(-0.693359375f), bounded));
  V p = fused(V::all(1.9875691500e-4f), r, V::all(1.3981999507e-3f));
  p = fused(p, r, V::all(8.3334519073e-3f));
  p = fused(p, r, V::all(4.1665795894e-2f));
  p = fused(p, r, V::all(1.6666665459e-1f));
  p = fused(p, r, V::all(5.0000001201e-1f));
  p = fused(multiply(p, r), r, add(r, V::all(1.0f)));
  return zero_if_less(x, least, multiply(p, V::power_of_2(shifted)));
}

// y = e^(x - shift) of `count` floats.
template <class V>
void exponentials(const float* x, int64_t count, float shift, float* y) {
  const int64_t whole = count / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) V::store(y + i, exponential(subtract(V::load(x + i), V::all(shift))));
  if (whole == count) return;
  const size_t bytes = sizeof(float) * static_cast<size_t>(count - whole);
  float part[16] = {};
  memcpy(part, x + whole, bytes);
  V::store(part, exponential(subtract(V::load(part), V::all(shift))));
  memcpy(y + whole, part, bytes);
}

// -1 / (1 + 2^x) with an error of 2e-7 (1 + |x| / 4); x counts as at most 120 away from 0. Keeps a NaN. The difference of the bits
// of a constant and of d is near -1 / d: they are nearly logarithms. Halley's method and Newton's take the error from 5 % to
// 1.3e-4 and 6e-8. A division takes longer than these operations.
template <class V>
inline V negative_sigmoid(V x) {
  const V bounded = minimum(V::all(120.0f), maximum(V::all(-120.0f), x)), one = V::all(1.0f);
  V whole;
  const V f = V::fraction(bounded, &whole);
  V p = fused(V::all(1.326472731307149e-3f), f, V::all(9.671512991189957e-3f));
  p = fused(p, f, V::all(5.550733581185341e-2f));
  p = fused(p, f, V::all(2.4022242426872253e-1f));
  p = fused(p, f, V::all(6.931470036506653e-1f));
  p = fused(p, f, one);
  const V d = add(one, V::times_power_of_2(p, whole));
  V y = V::bits_less(V::all(-1.6150120148786728e38f), d);  // 0xfef30000
  const V error = fused(d, y, one);
  y = fused(y, fused(error, error, error), y);
  return fused(y, fused(d, y, one), y);
}

template <class V>
inline V gated(V g, V u, float factor, float beta) {
  return multiply(multiply(g, negative_sigmoid(multiply(g, V::all(factor)))), subtract(V::all(-beta), u));
}

// y = g / (1 + e^(-alpha g)) * (u + beta), g at most `limit`, u in [-limit, limit]; `count` is a multiple of 16.
template <class V>
void gate(const Gate& by, const float* g, const float* u, int64_t count, float* y) {
  const V most = V::all(by.limit), least = V::all(-by.limit);
  const float factor = -1.44269504f * by.alpha;  // e^x = 2^(x / log(2))
  if (by.limit == INFINITY) {
    for (int64_t i = 0; i < count; i += 16) V::store(y + i, gated(V::load(g + i), V::load(u + i), factor, by.beta));
    return;
  }
  for (int64_t i = 0; i < count; i += 16) {  // minimum keeps a NaN
    const V other = minimum(most, maximum(least, V::load(u + i)));
    V::store(y + i, gated(minimum(most, V::load(g + i)), other, factor, by.beta));
  }
}

}  // namespace
}  // namespace carryall
