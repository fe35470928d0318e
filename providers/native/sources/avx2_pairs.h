// Products on AVX2 with 4-bit weights in groups of two blocks of 32, the default. What zero points subtract is one product of
// pairs: zero points times multiples, by the sums of the row's two blocks. The sums of the first block wait in memory.
#pragma once
#include "avx2_sums.h"

namespace carryall {
namespace {

inline bool in_pairs(const Weights& w) { return w.bits == 4 && w.group == 64 && w.block == 32 && w.inputs % w.group == 0; }

template <int kCount>
void multiply_pairs(const Part& part) {
  constexpr int64_t kBlock = 32, kBytes = kBlock * kColumns / 2;
  const Weights& w = *part.weights;
  const int64_t groups = part.shares, row_step = part.step, blocks = part.blocks;
  const uint8_t *lines = part.tile, *points = part.tile + w.points(), *multiples = part.tile + w.multiples();
  const float* scales = reinterpret_cast<const float*>(part.tile + w.group_scales());
  const int8_t* values = part.values;
  const int32_t* row_sums = part.sums;
  const float* row_scales = part.scales;
  Results<kCount> results;
  begin<kCount>(results, part);
  for (int64_t g = 0; g < groups; g++) {
    const __m128i first = columns(multiples), second = columns(multiples + kColumns);
    Int pairs[kCount][kHalves], sums[kCount][kHalves], zeros[kHalves];
    part.later.fetch(2 * g);
    sum_pairs<kBlock>(pairs, lines, Starts<kCount>(values, row_step));
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++)
      for (int h = 0; h < kHalves; h++) sums[m][h] = _mm256_madd_epi16(pairs[m][h], pairs_of(h, first, first));
    part.later.fetch(2 * g + 1);
    sum_pairs<kBlock>(pairs, lines + kBytes, Starts<kCount>(values + kBlock, row_step));
    const bool stored = w.offsets == Offsets::zero_points;
    const __m128i zero = stored ? columns(points) : _mm_set1_epi8(8), next = stored ? columns(points + kColumns) : zero;
    for (int h = 0; h < kHalves; h++) zeros[h] = _mm256_mullo_epi16(pairs_of(h, zero, next), pairs_of(h, first, second));
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const Int total = pair_of(row_sums + m * blocks);
      const Float factor = _mm256_set1_ps(row_scales[m * groups]);
      for (int h = 0; h < kHalves; h++) {
        add(sums[m][h], _mm256_madd_epi16(pairs[m][h], pairs_of(h, second, second)));
        const Int sum = _mm256_sub_epi32(sums[m][h], _mm256_madd_epi16(zeros[h], total));
        const Float scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(scales + kLanes * h));
        results[m][h] = _mm256_fmadd_ps(scaled, factor, results[m][h]);
      }
    }
    lines += 2 * kBytes, values += 2 * kBlock, points += 2 * kColumns, multiples += 2 * kColumns;
    scales += kColumns, row_sums += 2, row_scales++;
  }
  store<kCount>(results, part);
}

// `multiply` of products.h over `multiply_pairs`.
struct Pairs {
  static constexpr int kRows = 4;
  template <int kBits, int kCount>
  static void run(const Part& part) {
    if constexpr (kBits == 4) multiply_pairs<kCount>(part);
  }
};

}  // namespace
}  // namespace carryall
