// Products of bytes on VNNI, over an instruction set `Isa` that multiplies unsigned by signed bytes. Included by one source per
// instruction set.
#pragma once
#include "products.h"

namespace carryall {
namespace {

// `accumulate` of products.h.
template <class Isa>
struct ByteProducts : Isa {
  using Int = typename Isa::Int;

  template <int kBits, int kCount, int kSums>
  static inline void accumulate(Int (&sums)[kCount][kSums], const uint8_t* lines, const int8_t* values,
                                int64_t row_step) {
    constexpr int kStep = kBits == 4 ? 8 : 4;  // inputs of a line
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += kStep, lines += kLine) {
      const Int line = Isa::line(lines), first = kBits == 4 ? Isa::low(line) : line, second = Isa::high(line);
      const int s = k / 4 % kSums, t = (k / 4 + 1) % kSums;
#pragma GCC unroll 16
      for (int m = 0; m < kCount; m++) {
        const int8_t* x = values + m * row_step + k;
        sums[m][s] = Isa::dot(sums[m][s], first, x);
        if constexpr (kBits == 4) sums[m][t] = Isa::dot(sums[m][t], second, x + 4);
      }
    }
  }
};

}  // namespace
}  // namespace carryall
