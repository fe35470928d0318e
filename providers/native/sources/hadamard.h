// The Walsh-Hadamard transform of rows (QuaRot, arXiv:2404.00456), over vectors `V` of 16 floats. Included by one source per
// instruction set, so in an anonymous namespace.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>

namespace carryall {
namespace {

// Adds lanes `half` apart in the first of them and subtracts them in the second.
template <int half, class V>
inline V butterfly(V x) {
  alignas(64) static constexpr auto kSigns = [] {
    std::array<float, 16> signs{};
    for (size_t i = 0; i < signs.size(); i++) signs[i] = (i & half) != 0 ? -1.0f : 1.0f;
    return signs;
  }();
  return fused(x, V::load(kSigns.data()), V::template exchanged<half>(x));
}

// Transforms a row of `width` floats, a multiple of 16, in pieces of the largest power of two that divides it.
template <class V>
inline void spread(float* x, int64_t width) {
  const int64_t piece = width & -width;
  const V factor = V::all(1.0f / std::sqrt(static_cast<float>(piece)));
  for (int64_t i = 0; i < width; i += 16) {
    const V pairs = butterfly<1>(multiply(V::load(x + i), factor));
    V::store(x + i, butterfly<8>(butterfly<4>(butterfly<2>(pairs))));
  }
  for (int64_t half = 16; half < piece; half *= 2)
    for (int64_t first = 0; first < width; first += 2 * half)
      for (int64_t i = first; i < first + half; i += 16) {
        const V a = V::load(x + i), b = V::load(x + i + half);
        V::store(x + i, add(a, b));
        V::store(x + i + half, subtract(a, b));
      }
}

}  // namespace
}  // namespace carryall
