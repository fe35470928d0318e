// AVX2 without VNNI.
#include <immintrin.h>

#include "avx2_gguf.h"
#include "avx2_pairs.h"
#include "cpu.h"

namespace carryall {
namespace {

// Adds factor * products of a block with 4 bits to the sums; a factor is two equal numbers of 16 bits.
template <int kInputs, int kCount>
CARRYALL_INLINE void add_nibbles(Int (&sums)[kCount][kHalves], const uint8_t* lines, const int8_t* values, const Part& part,
                                 const Int (&factors)[kHalves]) {
  for (int64_t k = 0; k < part.weights->block; k += kInputs, lines += kInputs * kColumns / 2) {
    Int pairs[kCount][kHalves];
    sum_pairs<kInputs>(pairs, lines, Starts<kCount>(values + k, part.step));
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++)
      for (int h = 0; h < kHalves; h++) add(sums[m][h], _mm256_madd_epi16(pairs[m][h], factors[h]));
  }
}

// Adds the products of a block with 8 bits, less 128, to the sums: of |w| and x with the sign of w, which in pairs of 16 bits
// reach 2 * 128 * 127 = 32,512.
template <int kCount>
CARRYALL_INLINE void add_bytes(Int (&sums)[kCount][kHalves], const uint8_t* lines, const int8_t* values, const Part& part) {
  const Starts<kCount> rows(values, part.step);
  for (int64_t k = 0; k < part.weights->block; k += 4, lines += kLine) {
    Int line[kHalves], magnitude[kHalves];
    for (int h = 0; h < kHalves; h++) {
      line[h] = _mm256_xor_si256(bytes(lines + h * kHalf), _mm256_set1_epi8(-128));
      magnitude[h] = _mm256_abs_epi8(line[h]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const Int x = four(rows.of[m] + k);
      for (int h = 0; h < kHalves; h++) {
        const Int pairs = _mm256_maddubs_epi16(magnitude[h], _mm256_sign_epi8(x, line[h]));
        add(sums[m][h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
      }
    }
  }
}

template <int kBits, int kCount>
class Tile {
 public:
  explicit Tile(const Part& p)
      : part_(p), weights_(*p.weights), offsets_(weights_.offsets), block_bytes_(weights_.block_bytes()),
        points_(p.tile + weights_.points()), multiples_(p.tile + weights_.multiples()),
        group_scales_(p.tile + weights_.group_scales()) {
    begin<kCount>(result_, p);
  }

  // Adds the blocks [b, end) of group s: their integer sums, times the multiples, are scaled once.
  CARRYALL_INLINE void add_group(int64_t s, int64_t b, int64_t end) {
    Int sums[kCount][kHalves] = {};
    for (; b < end; b++) {
      Int factors[kHalves], zeros[kHalves];
      for (int h = 0; h < kHalves; h++) {
        const Int multiple = widened(multiples_ + b * kColumns + kLanes * h);
        factors[h] = _mm256_or_si256(multiple, _mm256_slli_epi32(multiple, 16));
        zeros[h] = _mm256_mullo_epi16(zero(b, h), multiple);
      }
      add_block(sums, b, factors, zeros);
    }
    const float* scales = reinterpret_cast<const float*>(group_scales_ + s * kLine);
    Float scaled[kCount][kHalves];
    for (int m = 0; m < kCount; m++)
      for (int h = 0; h < kHalves; h++)
        scaled[m][h] = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[m][h]), _mm256_loadu_ps(scales + kLanes * h));
    add_scaled(scaled, s);
  }

  // Adds the blocks [b, end) of scale s of the row, each with its own scale.
  CARRYALL_INLINE void add_blocks(int64_t s, int64_t b, int64_t end) {
    const Int ones[kHalves] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
    Float scaled[kCount][kHalves] = {};
    for (; b < end; b++) {
      const Int zeros[kHalves] = {zero(b, 0), zero(b, 1)};
      Int sums[kCount][kHalves] = {};
      add_block(sums, b, ones, zeros);
      for (int m = 0; m < kCount; m++) add_floats(scaled[m], sums[m], m, b);
    }
    add_scaled(scaled, s);
  }

  // The same for blocks of 32 inputs with 4 bits, whose sums stay in registers.
  CARRYALL_INLINE void add_narrow(int64_t s, int64_t b, int64_t end) {
    Float scaled[kCount][kHalves] = {};
    for (; b < end; b++) {
      part_.later.fetch(b);
      Int pairs[kCount][kHalves];
      sum_pairs<32>(pairs, part_.tile + b * block_bytes_, Starts<kCount>(part_.values + b * 32, part_.step));
      const Int zeros[kHalves] = {zero(b, 0), zero(b, 1)};
#pragma GCC unroll 8
      for (int m = 0; m < kCount; m++) {
        const Int total = _mm256_set1_epi32(part_.sums[m * part_.blocks + b]);
        Int sums[kHalves];
        for (int h = 0; h < kHalves; h++) {
          sums[h] = _mm256_madd_epi16(pairs[m][h], _mm256_set1_epi16(1));
          if (offsets_ != Offsets::minima) sums[h] = _mm256_sub_epi32(sums[h], _mm256_madd_epi16(zeros[h], total));
        }
        add_floats(scaled[m], sums, m, b);
      }
    }
    add_scaled(scaled, s);
  }

  void store() const { carryall::store<kCount>(result_, part_); }

 private:
  // Adds the sums of block b times its scales, and its minima.
  CARRYALL_INLINE void add_floats(Float (&scaled)[kHalves], const Int (&sums)[kHalves], int m, int64_t b) const {
    const float* scales = reinterpret_cast<const float*>(part_.tile + b * block_bytes_ + weights_.value_bytes());
    for (int h = 0; h < kHalves; h++)
      scaled[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[h]), _mm256_loadu_ps(scales + kLanes * h), scaled[h]);
    if (offsets_ != Offsets::minima) return;
    const Float total = _mm256_set1_ps(static_cast<float>(part_.sums[m * part_.blocks + b]));
    for (int h = 0; h < kHalves; h++)
      scaled[h] = _mm256_fmadd_ps(_mm256_loadu_ps(scales + kColumns + kLanes * h), total, scaled[h]);
  }

  // What the values of block b in the products are relative to, in the lower 16 bits; the upper ones are 0.
  CARRYALL_INLINE Int zero(int64_t b, int h) const {
    constexpr int kMiddle = kBits == 8 ? 128 : 8, kOwn = kBits == 8 ? 128 : 0;  // add_bytes subtracts 128
    const Int lower = _mm256_set1_epi32(0xffff), own = _mm256_set1_epi32(kOwn);
    if (offsets_ == Offsets::zero_points)
      return _mm256_and_si256(_mm256_sub_epi32(widened(points_ + b * kColumns + kLanes * h), own), lower);
    return _mm256_and_si256(_mm256_sub_epi32(_mm256_set1_epi32(offsets_ == Offsets::middle ? kMiddle : 0), own), lower);
  }

  // Adds factor * products - zero * (sum of the row's values) of block b.
  CARRYALL_INLINE void add_block(Int (&sums)[kCount][kHalves], int64_t b, const Int (&factors)[kHalves],
                                 const Int (&zeros)[kHalves]) const {
    const int8_t* values = part_.values + b * weights_.block;
    const uint8_t* lines = part_.tile + b * block_bytes_;
    part_.later.fetch(b);
    if constexpr (kBits == 8) add_bytes(sums, lines, values, part_);
    else if (weights_.block == 16) add_nibbles<16>(sums, lines, values, part_, factors);
    else add_nibbles<32>(sums, lines, values, part_, factors);
    if (offsets_ == (kBits == 8 ? Offsets::middle : Offsets::minima)) return;  // zero is 0
    for (int m = 0; m < kCount; m++) {
      const Int total = _mm256_set1_epi32(part_.sums[m * part_.blocks + b]);
      for (int h = 0; h < kHalves; h++) sums[m][h] = _mm256_sub_epi32(sums[m][h], _mm256_madd_epi16(zeros[h], total));
    }
  }

  CARRYALL_INLINE void add_scaled(const Float (&scaled)[kCount][kHalves], int64_t s) {
    for (int m = 0; m < kCount; m++) {
      const Float factor = _mm256_set1_ps(part_.scales[m * part_.shares + s]);
      for (int h = 0; h < kHalves; h++) result_[m][h] = _mm256_fmadd_ps(scaled[m][h], factor, result_[m][h]);
    }
  }

  const Part& part_;
  const Weights& weights_;
  const Offsets offsets_;
  const int64_t block_bytes_;
  const uint8_t *const points_, *const multiples_, *const group_scales_;
  Results<kCount> result_;
};

struct BothHalves {
  static constexpr int kRows = 4;

  template <int kBits, int kCount>
  static void run(const Part& part) {
    Tile<kBits, kCount> tile(part);
    for (int64_t s = 0, b = 0; s < part.shares; s++) {
      const int64_t end = b + part.share < part.blocks ? b + part.share : part.blocks;
      if (kBits == 4 && part.weights->group > 0) tile.add_group(s, b, end);
      else if (kBits == 4 && part.weights->block == 32) tile.add_narrow(s, b, end);
      else tile.add_blocks(s, b, end);
      b = end;
    }
    tile.store();
  }
};

void multiply_avx2(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                   int64_t first_tile, int64_t last_tile, Outputs y) {
  if (w.halves()) return multiply<StoredAvx2>(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
  (in_pairs(w) ? multiply<Pairs> : multiply<BothHalves>)(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace

const Kernels kAvx2 = {"avx2", has_avx2, quantize, multiply_avx2, &kAvx2Attention, round_avx2, sweep_avx2};

}  // namespace carryall
