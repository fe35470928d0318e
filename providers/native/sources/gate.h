// The exponential function, and the gate between the products of an expert, over vectors `V` of 16 floats. Included by
// one source per instruction set, so in an anonymous namespace.
#pragma once
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
  for (int64_t i = 0; i < count; i += 16) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(count - i < 16 ? count - i : 16);
    float part[16] = {};
    memcpy(part, x + i, bytes);
    V::store(part, exponential(subtract(V::load(part), V::all(shift))));
    memcpy(y + i, part, bytes);
  }
}

// y = g / (1 + e^(-alpha g)) * (u + beta), g at most `limit`, u in [-limit, limit]; `count` is a multiple of 16.
template <class V>
void gate(const Gate& by, const float* g, const float* u, int64_t count, float* y) {
  const V one = V::all(1.0f), most = V::all(by.limit), least = V::all(-by.limit);
  for (int64_t i = 0; i < count; i += 16) {
    const V x = minimum(most, V::load(g + i));  // keeps a NaN
    const V other = minimum(most, maximum(least, V::load(u + i)));
    const V sigmoid = divide(one, add(one, exponential(multiply(x, V::all(-by.alpha)))));
    V::store(y + i, multiply(multiply(x, sigmoid), add(other, V::all(by.beta))));
  }
}

}  // namespace
}  // namespace carryall
