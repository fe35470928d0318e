// Products of quads in plain C++. Included by one source per instruction set, so in an anonymous namespace.
#pragma once
#include "attention_quads.h"

namespace carryall {
namespace {

template <class V>
struct PlainQuads {
  static constexpr float kRound = kShift;
  static constexpr int kTogether = 1, kColumns = 1, kByteColumns = 0;

  static void store(const V& x, uint8_t* row, int64_t first) {
    float values[16];
    V::store(values, x);
    for (int i = 0; i < 16; i++) {
      const uint16_t value = static_cast<uint16_t>(bits_of(values[i]));  // of kShift, these bits are 0
      memcpy(row + 2 * (first + i), &value, sizeof value);
    }
  }

  template <bool kFetch, int kRows, int kWidth, class Operand, class Later>
  static void multiply(const Sixteens& a, int64_t first, const Operand& b, const Later&, Range steps, float* y, int64_t) {
    uint32_t sums[16];  // modulo 2^32; the result fits
    for (uint32_t& sum : sums) sum = static_cast<uint32_t>(a.offsets[0]);
    for (int64_t k = steps.first; k < steps.last; k++) {
      const uint8_t* tile = b(first, k);
      int16_t row[16];
      memcpy(row, a.bytes + 32 * k, sizeof row);
      for (int quad = 0; quad < kQuad; quad++)
        for (int lane = 0; lane < 16; lane++)
          for (int i = 0; i < kQuad; i++)
            sums[lane] += static_cast<uint32_t>(row[kQuad * quad + i] * tile[64 * quad + kQuad * lane + i]);
    }
    for (int lane = 0; lane < 16; lane++)
      y[16 * first + lane] = static_cast<float>(static_cast<int32_t>(sums[lane])) * (Operand::kScaled ? a.scales[0] : 1.0f);
  }
};

}  // namespace
}  // namespace carryall
