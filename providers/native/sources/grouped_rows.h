// Products on VNNI with 4-bit weights in groups of two blocks of 32, the default. Weights are bytes in units of their group's
// scale for a moment: a nibble times the multiple of its block, at most 225, is an unsigned byte, as the instruction takes it.
// What zero points subtract is one product of pairs: zero points times multiples, and sums of the row's values.
#pragma once
#include "products.h"

namespace carryall {
namespace {

inline bool in_pairs(const Weights& w) { return w.bits == 4 && w.group == 64 && w.block == 32 && w.inputs % w.group == 0; }

template <class Isa, int kCount>
void multiply_pairs(const Part& part) {
  using Int = typename Isa::Int;
  using Float = typename Isa::Float;
  const Weights& w = *part.weights;
  const int64_t groups = part.shares, row_step = part.step;
  Float result[kCount];
  for (int m = 0; m < kCount; m++) result[m] = load_columns<Isa>(part.bias, part.columns);
  const uint8_t *lines = part.tile, *points = part.tile + w.points(), *multiples = part.tile + w.multiples();
  const float* scales = reinterpret_cast<const float*>(part.tile + w.group_scales());
  const int8_t* values = part.values;
  const bool stored = w.offsets == Offsets::zero_points;
  for (int64_t g = 0; g < groups; g++, points += 2 * kColumns, multiples += 2 * kColumns) {
    const Int each[2] = {Isa::widened(multiples), Isa::widened(multiples + kColumns)};
    const Int first = stored ? Isa::widened(points) : Isa::integers(8);
    const Int second = stored ? Isa::widened(points + kColumns) : Isa::integers(8);
    const Int zeros = Isa::multiply_words(Isa::words(first, second), Isa::words(each[0], each[1]));
    Int sums[kCount];
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const int32_t* s = part.sums + m * part.blocks + 2 * g;  // at most 32 * 127
      const uint32_t pair = static_cast<uint32_t>(-s[1]) << 16 | (static_cast<uint32_t>(-s[0]) & 0xffff);
      sums[m] = Isa::dot_words(Isa::integers(0), zeros, static_cast<int32_t>(pair));
    }
#pragma GCC unroll 2
    for (int b = 0; b < 2; b++) {
      part.later.fetch(2 * g + b);
      const Int multiple = Isa::words(each[b], each[b]);
#pragma GCC unroll 4
      for (int k = 0; k < 32; k += 8, lines += kLine, values += 8) {
        const Int line = Isa::line(lines);
        const Int low = Isa::multiply_words(Isa::low(line), multiple), high = Isa::multiply_words(Isa::high(line), multiple);
#pragma GCC unroll 8
        for (int m = 0; m < kCount; m++) sums[m] = Isa::dot(sums[m], low, values + m * row_step);
#pragma GCC unroll 8
        for (int m = 0; m < kCount; m++) sums[m] = Isa::dot(sums[m], high, values + m * row_step + 4);
      }
    }
    const Float scale = Isa::load(scales + g * kColumns);
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const Float scaled = Isa::multiply(Isa::converted(sums[m]), scale);
      result[m] = Isa::fused(scaled, Isa::floats(part.scales[m * groups + g]), result[m]);
    }
  }
  for (int m = 0; m < kCount; m++) store_columns<Isa>(part.y.at(m, 0), result[m], part.columns);
}

// `multiply` of products.h over `multiply_pairs`.
template <class Isa>
struct Pairs {
  static constexpr int kRows = Isa::kRows;
  template <int kBits, int kCount>
  static void run(const Part& part) {
    if constexpr (kBits == 4) multiply_pairs<Isa, kCount>(part);
  }
};

}  // namespace
}  // namespace carryall
