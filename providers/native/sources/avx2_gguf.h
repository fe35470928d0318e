// Products on AVX2 with weights of GGUF files, from their bits as they are stored. The results are those of gguf_products.h.
// maddubs adds two products of unsigned and signed bytes in 16 bits; products of `kRun` inputs, two to a step of 4 inputs,
// stay below 32,768: 16 * 15 * 127 with 4 bits and fewer, 8 * 31 * 127 with 5, 4 * 63 * 127 with 6.
#pragma once
#include "avx2_sums.h"
#include "gguf_blocks.h"

namespace carryall {
namespace {

CARRYALL_INLINE Float floats_of(const uint8_t* halves, int h) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 2 * kLanes * h)));
}

// Inputs k to k + 3 of a unit as unsigned bytes, for the columns of half `h`.
template <int kBits>
CARRYALL_INLINE Int four_inputs(const uint8_t* unit, int k, int h) {
  if constexpr (kBits < 4) {
    const Int pairs = _mm256_srli_epi16(bytes(unit + k / 16 * kLine + h * kHalf), k / 4 % 4 * 2);
    const Int low = _mm256_and_si256(pairs, _mm256_set1_epi8(3));
    if constexpr (kBits == 2) return low;
    const Int bits = bytes(unit + 2 * kLine + h * kHalf);
    const int left = 2 - k / 4;  // bit k / 4 to bit 2
    const Int moved = left >= 0 ? _mm256_slli_epi16(bits, left) : _mm256_srli_epi16(bits, -left);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(4)));
  }
  const Int line = bytes(unit + k / 8 * kLine + h * kHalf);
  const Int low = _mm256_and_si256(k % 8 == 0 ? line : _mm256_srli_epi16(line, 4), _mm256_set1_epi8(15));
  if constexpr (kBits == 4) return low;
  const uint8_t* high = unit + 4 * kLine + h * kHalf;
  if constexpr (kBits == 5) {
    const Int bits = bytes(high);
    const int left = 4 - k / 4;  // bit k / 4 to bit 4
    const Int moved = left >= 0 ? _mm256_slli_epi16(bits, left) : _mm256_srli_epi16(bits, -left);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
  }
  const Int bits = bytes(high + k / 16 * kLine);
  const int left = 4 - k / 4 % 4 * 2;
  const Int moved = left >= 0 ? _mm256_slli_epi16(bits, left) : _mm256_srli_epi16(bits, -left);
  return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
}

// Adds the products of a unit to the sums: factor [block of 32 / kParts inputs] times products. A factor is two equal numbers of
// 16 bits.
template <int kBits, int kCount, int kParts>
CARRYALL_INLINE void add_unit(Int (&sums)[kCount][kHalves], const uint8_t* unit, const Starts<kCount>& rows,
                              const Int (&factors)[kParts][kHalves]) {
  constexpr int kRun = kBits <= 4 ? 32 / kParts : kBits == 5 ? 16 : 8;
#pragma GCC unroll 4
  for (int first = 0; first < 32; first += kRun) {
    Int pairs[kCount][kHalves];
#pragma GCC unroll 8
    for (int k = first; k < first + kRun; k += 4) {
      Int weights[kHalves];
      for (int h = 0; h < kHalves; h++) weights[h] = four_inputs<kBits>(unit, k, h);
#pragma GCC unroll 8
      for (int m = 0; m < kCount; m++) {
        const Int x = four(rows.of[m] + k);
        for (int h = 0; h < kHalves; h++) {
          const Int product = _mm256_maddubs_epi16(weights[h], x);
          if (k == first) pairs[m][h] = product;
          else add_pairs(pairs[m][h], product);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++)
      for (int h = 0; h < kHalves; h++) add(sums[m][h], _mm256_madd_epi16(pairs[m][h], factors[first * kParts / 32][h]));
  }
}

// Blocks of 32 with integer scales and minima: Q4_K, Q5_K.
template <int kBits, int kCount>
void multiply_k_minima(const Part& part) {
  const Weights& w = *part.weights;
  const int64_t unit = w.unit_bytes(), stretch = w.stretch_bytes(), factors_at = w.factors();
  const uint8_t* tile = part.tile;
  Results<kCount> results;
  begin<kCount>(results, part);
  for (int64_t s = 0; s < part.shares; s++) {
    const int64_t p = s % 4;
    const uint8_t *units = tile + 2 * p * unit, *halves = tile + factors_at, *factors = halves + kLine;
    const Sixes sixes(factors, p);
    Int sums[kCount][kHalves] = {};
    part.later.fetch(2 * s);
    const Int of_first[1][kHalves] = {{pairs_of(0, sixes.scales[0], sixes.scales[0]), pairs_of(1, sixes.scales[0], sixes.scales[0])}};
    add_unit<kBits, kCount, 1>(sums, units, Starts<kCount>(part.values + s * 64, part.step), of_first);
    part.later.fetch(2 * s + 1);
    const Int of_second[1][kHalves] = {{pairs_of(0, sixes.scales[1], sixes.scales[1]), pairs_of(1, sixes.scales[1], sixes.scales[1])}};
    add_unit<kBits, kCount, 1>(sums, units + unit, Starts<kCount>(part.values + s * 64 + 32, part.step), of_second);
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const Int total = pair_of(part.sums + m * part.blocks + 2 * s);
      const Float row = _mm256_set1_ps(part.scales[m * part.shares + s]);
      for (int h = 0; h < kHalves; h++) {
        const Int minima = _mm256_madd_epi16(pairs_of(h, sixes.minima[0], sixes.minima[1]), total);
        const Float scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[m][h]), floats_of(halves, h));
        const Float sum = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(minima), floats_of(halves + 2 * kColumns, h), scaled);
        results[m][h] = _mm256_fmadd_ps(sum, row, results[m][h]);
      }
    }
    if (p == 3) tile += stretch;
  }
  store<kCount>(results, part);
}

// Blocks of 16 with integer scales, and minima with 2 bits: Q2_K, Q3_K, Q6_K.
template <int kBits, int kCount>
void multiply_k_sixteen(const Part& part) {
  const Weights& w = *part.weights;
  const int64_t unit = w.unit_bytes(), stretch = w.stretch_bytes(), factors_at = w.factors();
  const uint8_t* tile = part.tile;
  Results<kCount> results;
  begin<kCount>(results, part);
  for (int64_t s = 0; s < part.shares; s++) {
    const int64_t p = s % 4;
    const uint8_t *units = tile + 2 * p * unit, *halves = tile + factors_at;
    const Fours<kBits> fours(halves, p);
    const __m128i* middles = kBits == 2 ? fours.minima : fours.scales;  // the sums of a row's blocks times these are subtracted
    Int sums[kCount][kHalves] = {};
    for (int u = 0; u < 2; u++) {
      part.later.fetch(4 * s + 2 * u);
      part.later.fetch(4 * s + 2 * u + 1);
      Int of_unit[2][kHalves];
      for (int j = 0; j < 2; j++)
        for (int h = 0; h < kHalves; h++) of_unit[j][h] = signed_pairs_of(h, fours.scales[2 * u + j], fours.scales[2 * u + j]);
      add_unit<kBits, kCount, 2>(sums, units + u * unit, Starts<kCount>(part.values + s * 64 + u * 32, part.step), of_unit);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const int32_t* totals = part.sums + m * part.blocks + 4 * s;
      const Int left = pair_of(totals), right = pair_of(totals + 2);
      const Float row = _mm256_set1_ps(part.scales[m * part.shares + s]);
      for (int h = 0; h < kHalves; h++) {
        const Int middle = _mm256_add_epi32(_mm256_madd_epi16(signed_pairs_of(h, middles[0], middles[1]), left),
                                            _mm256_madd_epi16(signed_pairs_of(h, middles[2], middles[3]), right));
        const Int sum = kBits == 2 ? sums[m][h] : _mm256_sub_epi32(sums[m][h], _mm256_slli_epi32(middle, kBits - 1));
        Float scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), floats_of(halves, h));
        if (kBits == 2) scaled = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(middle), floats_of(halves + 2 * kColumns, h), scaled);
        results[m][h] = _mm256_fmadd_ps(scaled, row, results[m][h]);
      }
    }
    if (p == 3) tile += stretch;
  }
  store<kCount>(results, part);
}

// The sum of a block times its scale. From zero, as sums of several blocks begin.
CARRYALL_INLINE Float scaled_block(Int sum, Float scale) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, _mm256_setzero_ps()); }

// Blocks of 32 with 4 or 5 bits and a float16 scale, and a scale of the row: Q4_0, Q4_1, Q5_0, Q5_1.
template <int kBits, int kCount>
void multiply_single(const Part& part) {
  const Weights& w = *part.weights;
  const bool minima = w.offsets == Offsets::half_minima;
  const int64_t stretch = w.stretch_bytes(), factors_at = w.factors();
  const uint8_t* tile = part.tile;
  const Int ones[1][kHalves] = {{_mm256_set1_epi16(1), _mm256_set1_epi16(1)}};
  Results<kCount> results;
  begin<kCount>(results, part);
  for (int64_t b = 0; b < part.blocks; b++, tile += stretch) {
    part.later.fetch(b);
    Int sums[kCount][kHalves] = {};
    add_unit<kBits, kCount, 1>(sums, tile, Starts<kCount>(part.values + b * 32, part.step), ones);
    const uint8_t* halves = tile + factors_at;
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      const int32_t total = part.sums[m * part.blocks + b];
      const Int zero = _mm256_set1_epi32(minima ? 0 : total * (1 << (kBits - 1)));
      const Float row = _mm256_set1_ps(part.scales[m * part.blocks + b]);
      for (int h = 0; h < kHalves; h++) {
        Float scaled = scaled_block(_mm256_sub_epi32(sums[m][h], zero), floats_of(halves, h));
        if (minima)
          scaled = _mm256_fmadd_ps(floats_of(halves + 2 * kColumns, h), _mm256_set1_ps(static_cast<float>(total)), scaled);
        results[m][h] = _mm256_fmadd_ps(scaled, row, results[m][h]);
      }
    }
  }
  store<kCount>(results, part);
}

// Blocks of 32 with 8 bits and a float16 scale: Q8_0. Products are those of |w| and x with the sign of w, which in pairs of 16
// bits reach 2 * 128 * 127 = 32,512.
template <int kCount>
void multiply_bytes(const Part& part) {
  const Weights& w = *part.weights;
  const int64_t stretch = w.stretch_bytes(), factors_at = w.factors();
  const uint8_t* tile = part.tile;
  Results<kCount> results;
  begin<kCount>(results, part);
  for (int64_t b = 0; b < part.blocks; b++, tile += stretch) {
    part.later.fetch(b);
    const Starts<kCount> rows(part.values + b * 32, part.step);
    Int sums[kCount][kHalves] = {};
#pragma GCC unroll 8
    for (int k = 0; k < 32; k += 4) {
      Int line[kHalves], magnitude[kHalves];
      for (int h = 0; h < kHalves; h++) {
        line[h] = bytes(tile + k / 4 * kLine + h * kHalf);
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
    for (int m = 0; m < kCount; m++) {
      const Float row = _mm256_set1_ps(part.scales[m * part.shares + b]);
      for (int h = 0; h < kHalves; h++) {
        results[m][h] = _mm256_fmadd_ps(scaled_block(sums[m][h], floats_of(tile + factors_at, h)), row, results[m][h]);
      }
    }
  }
  store<kCount>(results, part);
}

// The scales of a stretch, for the columns of half `h`.
CARRYALL_INLINE Float scales_of(const Weights& w, const uint8_t* factors, int h) {
  if (w.offsets == Offsets::short_grid) return _mm256_mul_ps(floats_of(factors, h), _mm256_set1_ps(0.25f));
  if (w.offsets != Offsets::exponent_codes) return floats_of(factors, h);
  // As float_of_exponent.
  const Int exponents = widened(factors + kLanes * h), one = _mm256_set1_epi32(1);
  const Int normal = _mm256_slli_epi32(_mm256_sub_epi32(exponents, one), 23);
  const Int small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponents);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(exponents, one)));
}

// Codes of 4 bits: IQ4_NL, MXFP4, IQ4_XS.
class Codes {
 public:
  CARRYALL_INLINE explicit Codes(const Weights& w)
      : codes_(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(codes_of(w))))) {}

  // Inputs k to k + 3 of a unit for the columns of half `h`.
  CARRYALL_INLINE Int four(const uint8_t* unit, int k, int h) const {
    const Int line = bytes(unit + k / 8 * kLine + h * kHalf);
    return _mm256_shuffle_epi8(codes_, _mm256_and_si256(k % 8 == 0 ? line : _mm256_srli_epi16(line, 4), _mm256_set1_epi8(15)));
  }

  // The integers of a block of a stretch, whose unit is given too.
  CARRYALL_INLINE Int integers(const uint8_t*, const uint8_t* factors, int64_t block, int h) const {
    const uint8_t* of_block = factors + (2 + block) * kColumns + kLanes * h;
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(of_block)));
  }

 private:
  Int codes_;
};

// Numbers of four magnitudes, and signs: IQ3_XXS and, `kLong`, IQ3_S. As Codes. Eight loads take less time than a gather.
template <bool kLong>
class Grid {
 public:
  CARRYALL_INLINE explicit Grid(const Weights&) {}

  CARRYALL_INLINE Int four(const uint8_t* unit, int k, int h) const {
    const int j = k / 4, eighth = k / 8;
    alignas(32) uint32_t magnitudes[kLanes];
    for (int64_t c = 0; c < kLanes; c++) {
      const int64_t column = kLanes * h + c;
      const int number = unit[j * kColumns + column] | (kLong ? (unit[kGridHigh + column] >> j & 1) << 8 : 0);
      magnitudes[c] = kLong ? kLongGridBytes[number] : kShortGridBytes[number];
    }
    const Int words = bytes(unit + kGridSigns + h * kHalf);
    Int signs = kLong ? _mm256_srli_epi32(words, 8 * eighth) : _mm256_and_si256(_mm256_srli_epi32(words, 7 * eighth), _mm256_set1_epi32(127));
    if (!kLong && j % 2 == 1) {  // the eighth sign
      const Int folded = _mm256_xor_si256(signs, _mm256_srli_epi32(signs, 4)), twice = _mm256_xor_si256(folded, _mm256_srli_epi32(folded, 2));
      const Int parity = _mm256_and_si256(_mm256_xor_si256(twice, _mm256_srli_epi32(twice, 1)), _mm256_set1_epi32(1));
      signs = _mm256_or_si256(signs, _mm256_slli_epi32(parity, 7));
    }
    const Int bits = _mm256_set1_epi32(j % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010));
    const Int spread = _mm256_shuffle_epi8(signs, _mm256_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0));
    const Int minus = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
    const Int values = _mm256_load_si256(reinterpret_cast<const Int*>(magnitudes));
    return _mm256_sub_epi8(_mm256_xor_si256(values, minus), minus);
  }

  CARRYALL_INLINE Int integers(const uint8_t* unit, const uint8_t* factors, int64_t block, int h) const {
    Int scales;
    if (kLong) {
      const Int both = widened(factors + (2 + block / 2) * kColumns + kLanes * h);
      scales = _mm256_and_si256(_mm256_srl_epi32(both, _mm_cvtsi32_si128(static_cast<int>(block % 2 * 4))), _mm256_set1_epi32(15));
    } else {
      scales = _mm256_srli_epi32(bytes(unit + kGridSigns + h * kHalf), 28);
    }
    return _mm256_or_si256(_mm256_slli_epi32(scales, 1), _mm256_set1_epi32(1));
  }
};

// Blocks of 32 of values from a table: each with a scale and a scale of the row, or, kGroups, two with integer scales. Products as of
// Q8_0.
template <class Values, bool kGroups, int kCount>
void multiply_codes(const Part& part) {
  constexpr int64_t kBlocks = kGroups ? kSharedScale / kUnit : 1;
  const Weights& w = *part.weights;
  const int64_t unit = w.unit_bytes(), blocks = kGroups ? w.stretch() / w.block : 1, factors_at = w.factors();
  const uint8_t* tile = part.tile;
  const Values values(w);
  Results<kCount> results;
  begin<kCount>(results, part);
  for (int64_t s = 0; s < part.shares; s++) {
    Int totals[kCount][kHalves] = {};
    const uint8_t* factors = nullptr;
    for (int64_t b = s * kBlocks; b < (s + 1) * kBlocks; b++) {
      part.later.fetch(b);
      const uint8_t* stretch = tile + b / blocks * w.stretch_bytes();
      const uint8_t* lines = stretch + b % blocks * unit;
      factors = stretch + factors_at;
      const Starts<kCount> rows(part.values + b * 32, part.step);
      Int sums[kCount][kHalves] = {};
#pragma GCC unroll 8
      for (int k = 0; k < 32; k += 4) {
        Int value[kHalves], magnitude[kHalves];
        for (int h = 0; h < kHalves; h++) {
          value[h] = values.four(lines, k, h);
          magnitude[h] = _mm256_abs_epi8(value[h]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < kCount; m++) {
          const Int x = four(rows.of[m] + k);
          for (int h = 0; h < kHalves; h++) {
            const Int pairs = _mm256_maddubs_epi16(magnitude[h], _mm256_sign_epi8(x, value[h]));
            add(sums[m][h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
          }
        }
      }
      for (int h = 0; h < kHalves; h++) {
        const Int scale = kGroups ? values.integers(lines, factors, b % blocks, h) : Int();
        for (int m = 0; m < kCount; m++) add(totals[m][h], kGroups ? _mm256_mullo_epi32(sums[m][h], scale) : sums[m][h]);
      }
    }
    for (int m = 0; m < kCount; m++) {
      const Float row = _mm256_set1_ps(part.scales[m * part.shares + s]);
      for (int h = 0; h < kHalves; h++) {
        const Float scale = scales_of(w, factors, h);
        const Float sum = kGroups ? _mm256_mul_ps(_mm256_cvtepi32_ps(totals[m][h]), scale) : scaled_block(totals[m][h], scale);
        results[m][h] = _mm256_fmadd_ps(sum, row, results[m][h]);
      }
    }
  }
  store<kCount>(results, part);
}

// `multiply` of products.h over these; its kBits are 8 for all that are not 4.
struct StoredAvx2 {
  static constexpr int kRows = 4;
  template <int kBits, int kCount>
  static void run(const Part& part) {
    const Weights& w = *part.weights;
    if constexpr (kBits == 4) {
      if (w.coded()) (w.group > 0 ? multiply_codes<Codes, true, kCount> : multiply_codes<Codes, false, kCount>)(part);
      else if (w.group > 0) multiply_k_minima<4, kCount>(part);
      else multiply_single<4, kCount>(part);
    } else if (w.grids()) {
      (w.offsets == Offsets::long_grid ? multiply_codes<Grid<true>, true, kCount> : multiply_codes<Grid<false>, true, kCount>)(part);
    } else if (w.bits == 8) {
      multiply_bytes<kCount>(part);
    } else if (w.bits == 6) {
      multiply_k_sixteen<6, kCount>(part);
    } else if (w.bits == 3) {
      multiply_k_sixteen<3, kCount>(part);
    } else if (w.bits == 2) {
      multiply_k_sixteen<2, kCount>(part);
    } else if (w.group > 0) {
      multiply_k_minima<5, kCount>(part);
    } else {
      multiply_single<5, kCount>(part);
    }
  }
};

}  // namespace
}  // namespace carryall
