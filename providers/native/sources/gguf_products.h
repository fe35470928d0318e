// Products with weights of GGUF files over an instruction set `Isa`. The inputs of one scale of the row become bytes once for
// all rows of a pass. Included by one source per instruction set, as products.h.
//
// Every instruction set computes the same: integers i and j are exact, and
//   with groups      y = fused(fused(j, minimum, i * scale), x scale, y), i the sum over blocks of block scale * products
//   without groups   y = fused(fused(minimum, sum of x, fused(i, scale, 0)), x scale, y)
// where j is the sum over blocks of -(block minimum) * sum of x, and what has no minima leaves out its part.
#pragma once
#include "gguf_blocks.h"
#include "products.h"

namespace carryall {
namespace {

// The floats of 16 float16.
struct Columns {
  float of[kColumns];
  CARRYALL_INLINE explicit Columns(const uint8_t* halves) {
    for (int64_t c = 0; c < kColumns; c++) of[c] = float_of_half(halves + 2 * c);
  }
  // Of the scales of a stretch.
  CARRYALL_INLINE Columns(const Weights& w, const uint8_t* factors) {
    for (int64_t c = 0; c < kColumns; c++) of[c] = stretch_scale(w, factors, c);
  }
};

template <class Isa, int kCount>
void multiply_stored(const Part& part) {
  using Int = typename Isa::Int;
  using Float = typename Isa::Float;
  constexpr int kSums = kCount == 1 ? 4 : kCount == 2 ? 2 : 1;
  constexpr int64_t kSlices = kColumns / Isa::kLanes;
  const Weights& w = *part.weights;
  const bool minima = w.offsets == Offsets::half_minima;
  const int64_t blocks_of_stretch = w.stretch() / w.block, units = w.share() / kUnit;
  const int zero = zero_of(w) - Isa::kByteOffset;
  float bias[kColumns] = {};
  if (part.bias != nullptr) memcpy(bias, part.bias, sizeof(float) * static_cast<size_t>(part.columns));
  Float result[kSlices][kCount];
  for (int64_t l = 0; l < kSlices; l++)
    for (int m = 0; m < kCount; m++) result[l][m] = Isa::load(bias + l * Isa::kLanes);
  uint8_t bytes[kSharedScale * kColumns];
  int32_t scales[kColumns], offsets[kColumns];
  for (int64_t s = 0, b = 0; s < part.shares; s++) {
    const int64_t end = b + part.share < part.blocks ? b + part.share : part.blocks;
    const int64_t first = b * w.block, count = (end - b) * w.block / kUnit;
    for (int64_t u = 0; u < count && u < units; u++) {
      const int64_t k = first + u * kUnit;
      unpack_unit(part.tile + k / w.stretch() * w.stretch_bytes() + k % w.stretch() / kUnit * w.unit_bytes(), w,
                  bytes + u * kUnit * kColumns);
    }
    Int totals[kSlices][kCount], added[kSlices][kCount];
    Float sums_of_blocks[kSlices][kCount];
    for (int64_t l = 0; l < kSlices; l++)
      for (int m = 0; m < kCount; m++) {
        totals[l][m] = added[l][m] = Isa::integers(0);
        sums_of_blocks[l][m] = Isa::floats(0);
      }
    const uint8_t* factors = nullptr;
    for (int64_t i = b; i < end; i++) {
      part.later.fetch(i);
      const int64_t of_stretch = i % blocks_of_stretch;
      factors = part.tile + i / blocks_of_stretch * w.stretch_bytes() + w.factors();
      if (w.group > 0)
        for (int64_t c = 0; c < kColumns; c++) {
          scales[c] = scale_of(w, factors, of_stretch, c);
          offsets[c] = minima ? minimum_of(w, factors, of_stretch, c) : 0;
        }
      for (int64_t l = 0; l < kSlices; l++) {
        Int sums[kCount][kSums];
        for (int m = 0; m < kCount; m++)
          for (int t = 0; t < kSums; t++) sums[m][t] = Isa::integers(t == 0 ? -zero * part.sums[m * part.blocks + i] : 0);
        Pairing<Isa>::turn(sums);
        for (int64_t k = (i - b) * w.block; k < (i - b + 1) * w.block; k += 16)
          Isa::template accumulate<8, kCount, kSums>(sums, bytes + k * kColumns + 4 * l * Isa::kLanes,
                                                     part.values + first + k, part.step);
        Pairing<Isa>::turn(sums);
        for (int m = 0; m < kCount; m++) {
          for (int t = 1; t < kSums; t++) sums[m][0] = Isa::add(sums[m][0], sums[m][t]);
          if (w.group > 0) {
            totals[l][m] = Isa::add(totals[l][m], Isa::product(sums[m][0], Isa::loaded(scales + l * Isa::kLanes)));
            if (minima)
              added[l][m] = Isa::add(added[l][m], Isa::negative_product(Isa::loaded(offsets + l * Isa::kLanes),
                                                                        part.sums[m * part.blocks + i]));
          } else {
            Float& sum = sums_of_blocks[l][m];
            sum = Isa::fused(Isa::converted(sums[m][0]), Isa::load(Columns(w, factors).of + l * Isa::kLanes), sum);
            if (minima)
              sum = Isa::fused(Isa::load(Columns(factors + 2 * kColumns).of + l * Isa::kLanes),
                               Isa::floats(static_cast<float>(part.sums[m * part.blocks + i])), sum);
          }
        }
      }
    }
    for (int64_t l = 0; l < kSlices; l++) {
      const Float scale = Isa::load(Columns(w, factors).of + l * Isa::kLanes);
      for (int m = 0; m < kCount; m++) {
        Float sum = sums_of_blocks[l][m];
        if (w.group > 0) sum = Isa::multiply(Isa::converted(totals[l][m]), scale);
        if (w.group > 0 && minima)
          sum = Isa::fused(Isa::converted(added[l][m]), Isa::load(Columns(factors + 2 * kColumns).of + l * Isa::kLanes), sum);
        result[l][m] = Isa::fused(sum, Isa::floats(part.scales[m * part.shares + s]), result[l][m]);
      }
    }
    b = end;
  }
  for (int64_t l = 0; l < kSlices; l++)
    for (int m = 0; m < kCount; m++)
      if (l * Isa::kLanes < part.columns) store_columns<Isa>(part.y.at(m, l * Isa::kLanes), result[l][m], part.columns - l * Isa::kLanes);
}

template <class Isa>
struct Stored {
  static constexpr int kRows = Isa::kRows;
  template <int, int kCount>
  static void run(const Part& part) { multiply_stored<Isa, kCount>(part); }
};

}  // namespace
}  // namespace carryall
