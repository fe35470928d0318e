// Products on AVX-512 VNNI with weights of GGUF files, from their bits as they are stored. The results are those of gguf_products.h.
// dpbusd multiplies unsigned by signed bytes and adds four products in 32 bits, so no sum here overflows: signed weights are
// raised by 128, which is subtracted as 128 times the sum of the row's inputs.
#pragma once
#include <utility>

#include "avx512.h"
#include "gguf_blocks.h"
#include "gguf_factors.h"
#include "products.h"

namespace carryall {
namespace {
namespace stored {

using Int = __m512i;
using Float = __m512;
constexpr int kSigned = 128;

// The constants 0 to kCount - 1, since the counts of shifts must be constants.
template <class Work, int... kSteps>
CARRYALL_INLINE void each_of(std::integer_sequence<int, kSteps...>, const Work& work) {
  (work(std::integral_constant<int, kSteps>()), ...);
}
template <int kCount, class Work>
CARRYALL_INLINE void each(const Work& work) {
  each_of(std::make_integer_sequence<int, kCount>(), work);
}

CARRYALL_INLINE Float floats_of(const uint8_t* halves) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}
CARRYALL_INLINE Int broadcast(const int8_t* x) {
  int32_t all;
  memcpy(&all, x, sizeof all);
  return _mm512_set1_epi32(all);
}

// Integers of two blocks, and a row's sums of two blocks, at most 32 * 127 each, as pairs of 16 bits in each lane.
CARRYALL_INLINE Int pairs_of(Int first, Int second) {
  return _mm512_or_si512(_mm512_and_si512(first, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(second, 16));
}
CARRYALL_INLINE Int pair_of(const int32_t* sums) {
  return _mm512_set1_epi32(static_cast<int>((static_cast<uint32_t>(sums[0]) & 0xffffu) | static_cast<uint32_t>(sums[1]) << 16));
}

template <int kLeft>
CARRYALL_INLINE Int moved_left(Int x) {
  if constexpr (kLeft >= 0) return _mm512_slli_epi16(x, kLeft);
  else return _mm512_srli_epi16(x, -kLeft);
}

// Inputs k to k + 3 of a unit of 2 to 6 bits as unsigned bytes.
template <int kBits, int k>
CARRYALL_INLINE Int four_inputs(const uint8_t* unit) {
  if constexpr (kBits < 4) {
    const Int low = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(unit + k / 16 * kLine), k / 4 % 4 * 2), _mm512_set1_epi8(3));
    if constexpr (kBits == 2) return low;
    const Int high = moved_left<2 - k / 4>(_mm512_loadu_si512(unit + 2 * kLine));
    return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(4), 0xf8);  // low | (high & 4)
  }
  const Int line = _mm512_loadu_si512(unit + k / 8 * kLine);
  const Int low = _mm512_and_si512(k % 8 == 0 ? line : _mm512_srli_epi16(line, 4), _mm512_set1_epi8(15));
  if constexpr (kBits == 4) return low;
  // Bit k / 4, or bits 2 (k / 4) and one more, to bit 4.
  constexpr int left = kBits == 5 ? 4 - k / 4 : 4 - k / 4 % 4 * 2, kept = kBits == 5 ? 16 : 48;
  const Int bits = _mm512_loadu_si512(unit + 4 * kLine + (kBits == 6 ? k / 16 * kLine : 0));
  return _mm512_ternarylogic_epi32(low, moved_left<left>(bits), _mm512_set1_epi8(kept), 0xf8);  // low | (moved & kept)
}

// The sums of `kInputs` products of each row, which begin with `initial(m)`; `weights(k)` are those of inputs k to k + 3. A single
// row has two sums, which hide the latency of one.
template <int kInputs, int kCount, class Initial, class WeightsOf>
CARRYALL_INLINE void dots(Int (&sums)[kCount], const Starts<kCount>& rows, const Initial& initial, const WeightsOf& weights) {
  Int others[kCount];
  for (int m = 0; m < kCount; m++) {
    sums[m] = initial(m);
    others[m] = _mm512_setzero_si512();
  }
  each<kInputs / 4>([&](auto step) __attribute__((always_inline)) {
    constexpr int k = 4 * decltype(step)::value;
    const Int bytes = weights(std::integral_constant<int, k>());
#pragma GCC unroll 8
    for (int m = 0; m < kCount; m++) {
      Int& sum = kCount == 1 && k % 8 != 0 ? others[m] : sums[m];
      sum = _mm512_dpbusd_epi32(sum, bytes, broadcast(rows.of[m] + k));
    }
  });
  if constexpr (kCount == 1) sums[0] = _mm512_add_epi32(sums[0], others[0]);
}

template <int kCount>
CARRYALL_INLINE void begin(Float (&results)[kCount], const Part& part) {
  const Float bias = load_columns<Avx512>(part.bias, part.columns);
  for (int m = 0; m < kCount; m++) {
    __builtin_prefetch(part.y.at(m, kColumns), 1, 2);  // the next tile's
    results[m] = bias;
  }
}

template <int kCount>
CARRYALL_INLINE void store(const Float (&results)[kCount], const Part& part) {
  for (int m = 0; m < kCount; m++) store_columns<Avx512>(part.y.at(m, 0), results[m], part.columns);
}

// Blocks of 32 with integer scales and minima: Q4_K, Q5_K.
template <int kBits, int kCount>
void multiply_k_minima(const Part& part) {
  const Weights& w = *part.weights;
  const int64_t unit = w.unit_bytes(), stretch = w.stretch_bytes(), factors_at = w.factors();
  const uint8_t* tile = part.tile;
  Float results[kCount];
  begin(results, part);
  for (int64_t s = 0; s < part.shares; s++) {
    const int64_t p = s % 4;
    const uint8_t *units = tile + 2 * p * unit, *halves = tile + factors_at, *factors = halves + kLine;
    const Sixes sixes(factors, p);
    const Int scales[2] = {_mm512_cvtepu8_epi32(sixes.scales[0]), _mm512_cvtepu8_epi32(sixes.scales[1])};
    const Int minima = pairs_of(_mm512_cvtepu8_epi32(sixes.minima[0]), _mm512_cvtepu8_epi32(sixes.minima[1]));
    Int totals[kCount];
    for (int j = 0; j < 2; j++) {
      part.later.fetch(2 * s + j);
      const uint8_t* values = units + j * unit;
      Int sums[kCount];
      dots<32>(sums, Starts<kCount>(part.values + s * 64 + j * 32, part.step), [](int) { return _mm512_setzero_si512(); },
               [&](auto k) __attribute__((always_inline)) { return four_inputs<kBits, decltype(k)::value>(values); });
      for (int m = 0; m < kCount; m++) {
        const Int scaled = _mm512_mullo_epi32(sums[m], scales[j]);
        totals[m] = j == 0 ? scaled : _mm512_add_epi32(totals[m], scaled);
      }
    }
    const Float scale = floats_of(halves), of_minima = floats_of(halves + 2 * kColumns);
    for (int m = 0; m < kCount; m++) {
      const Int subtracted = _mm512_madd_epi16(minima, pair_of(part.sums + m * part.blocks + 2 * s));
      const Float scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(totals[m]), scale);
      const Float sum = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(subtracted), of_minima, scaled);
      results[m] = _mm512_fmadd_ps(sum, _mm512_set1_ps(part.scales[m * part.shares + s]), results[m]);
    }
    if (p == 3) tile += stretch;
  }
  store(results, part);
}

// Blocks of 16 with integer scales, and minima with 2 bits: Q2_K, Q3_K, Q6_K.
template <int kBits, int kCount>
void multiply_k_sixteen(const Part& part) {
  const Weights& w = *part.weights;
  const int64_t unit = w.unit_bytes(), stretch = w.stretch_bytes(), factors_at = w.factors();
  const uint8_t* tile = part.tile;
  Float results[kCount];
  begin(results, part);
  for (int64_t s = 0; s < part.shares; s++) {
    const int64_t p = s % 4;
    const uint8_t *units = tile + 2 * p * unit, *halves = tile + factors_at;
    const Fours<kBits> fours(halves, p);
    Int scales[4], middles[4], totals[kCount];  // middles: what the sums of a row's blocks are multiplied by and subtracted
    for (int j = 0; j < 4; j++) {
      scales[j] = _mm512_cvtepi8_epi32(fours.scales[j]);
      middles[j] = kBits == 2 ? _mm512_cvtepi8_epi32(fours.minima[j]) : scales[j];
    }
    for (int m = 0; m < kCount; m++) totals[m] = _mm512_setzero_si512();
    each<4>([&](auto block) __attribute__((always_inline)) {
      constexpr int j = decltype(block)::value, first = j % 2 * 16;
      part.later.fetch(4 * s + j);
      const uint8_t* values = units + j / 2 * unit;
      Int sums[kCount];
      dots<16>(sums, Starts<kCount>(part.values + s * 64 + j * 16, part.step), [](int) { return _mm512_setzero_si512(); },
               [&](auto k) __attribute__((always_inline)) { return four_inputs<kBits, first + decltype(k)::value>(values); });
      for (int m = 0; m < kCount; m++) totals[m] = _mm512_add_epi32(totals[m], _mm512_mullo_epi32(sums[m], scales[j]));
    });
    const Int left = pairs_of(middles[0], middles[1]), right = pairs_of(middles[2], middles[3]);
    const Float scale = floats_of(halves);
    for (int m = 0; m < kCount; m++) {
      const int32_t* of_row = part.sums + m * part.blocks + 4 * s;
      const Int middle = _mm512_add_epi32(_mm512_madd_epi16(left, pair_of(of_row)), _mm512_madd_epi16(right, pair_of(of_row + 2)));
      const Int sum = kBits == 2 ? totals[m] : _mm512_sub_epi32(totals[m], _mm512_slli_epi32(middle, kBits - 1));
      Float scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
      if (kBits == 2) scaled = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(middle), floats_of(halves + 2 * kColumns), scaled);
      results[m] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(part.scales[m * part.shares + s]), results[m]);
    }
    if (p == 3) tile += stretch;
  }
  store(results, part);
}

// The sum of a block times its scale. From zero, as sums of several blocks begin.
CARRYALL_INLINE Float scaled_block(Int sum, Float scale) { return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_setzero_ps()); }

// Blocks of 32 with a float16 scale, and a scale of the row: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
template <int kBits, int kCount>
void multiply_single(const Part& part) {
  const Weights& w = *part.weights;
  const bool minima = w.offsets == Offsets::half_minima;
  const int64_t stretch = w.stretch_bytes(), factors_at = w.factors();
  const int zero = kBits == 8 ? kSigned : minima ? 0 : 1 << (kBits - 1);
  const uint8_t* tile = part.tile;
  Float results[kCount];
  begin(results, part);
  for (int64_t b = 0; b < part.blocks; b++, tile += stretch) {
    part.later.fetch(b);
    Int sums[kCount];
    dots<32>(sums, Starts<kCount>(part.values + b * 32, part.step),
             [&](int m) { return _mm512_set1_epi32(-zero * part.sums[m * part.blocks + b]); },
             [&](auto k) __attribute__((always_inline)) {
               constexpr int first = decltype(k)::value;
               if constexpr (kBits < 8) return four_inputs<kBits, first>(tile);
               else return _mm512_xor_si512(_mm512_loadu_si512(tile + first / 4 * kLine), _mm512_set1_epi8(-kSigned));
             });
    const uint8_t* halves = tile + factors_at;
    const Float scale = floats_of(halves);
    for (int m = 0; m < kCount; m++) {
      Float scaled = scaled_block(sums[m], scale);
      if (minima) {
        const Float total = _mm512_set1_ps(static_cast<float>(part.sums[m * part.blocks + b]));
        scaled = _mm512_fmadd_ps(floats_of(halves + 2 * kColumns), total, scaled);
      }
      results[m] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(part.scales[m * part.blocks + b]), results[m]);
    }
  }
  store(results, part);
}

// The scales of a stretch.
CARRYALL_INLINE Float scales_of(const Weights& w, const uint8_t* factors) {
  if (w.offsets == Offsets::short_grid) return _mm512_mul_ps(floats_of(factors), _mm512_set1_ps(0.25f));
  if (w.offsets != Offsets::exponent_codes) return floats_of(factors);
  // As float_of_exponent.
  const Int exponents = _mm512_cvtepu8_epi32(columns(factors)), one = _mm512_set1_epi32(1);
  const Int normal = _mm512_slli_epi32(_mm512_sub_epi32(exponents, one), 23);
  const Int small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), exponents);
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmple_epu32_mask(exponents, one), normal, small));
}

// Codes of 4 bits: IQ4_NL, MXFP4, IQ4_XS.
class Codes {
 public:
  CARRYALL_INLINE explicit Codes(const Weights& w)
      : raised_(_mm512_xor_si512(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(codes_of(w)))), _mm512_set1_epi8(-kSigned))) {}

  // Inputs k to k + 3 of a unit, raised.
  template <int k>
  CARRYALL_INLINE Int four(const uint8_t* unit) const { return _mm512_shuffle_epi8(raised_, four_inputs<4, k>(unit)); }

  // The integers of a block of a stretch, whose unit is given too.
  CARRYALL_INLINE Int integers(const uint8_t*, const uint8_t* factors, int64_t block) const {
    return _mm512_cvtepi8_epi32(columns(factors + (2 + block) * kColumns));
  }

 private:
  Int raised_;
};

// Numbers of four magnitudes, and signs: IQ3_XXS and, `kLong`, IQ3_S. As Codes.
template <bool kLong>
class Grid {
 public:
  CARRYALL_INLINE explicit Grid(const Weights&) {}

  template <int k>
  CARRYALL_INLINE Int four(const uint8_t* unit) const {
    constexpr int j = k / 4, eighth = k / 8;
    Int numbers = _mm512_cvtepu8_epi32(columns(unit + j * kColumns));
    if (kLong) {
      const Int high = _mm512_srli_epi32(_mm512_cvtepu8_epi32(columns(unit + kGridHigh)), j);
      numbers = _mm512_or_si512(numbers, _mm512_slli_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), 8));
    }
    const Int magnitudes = _mm512_i32gather_epi32(numbers, kLong ? kLongGridBytes.data() : kShortGridBytes.data(), 4);
    const Int words = _mm512_loadu_si512(unit + kGridSigns);
    Int signs = kLong ? _mm512_srli_epi32(words, 8 * eighth) : _mm512_and_si512(_mm512_srli_epi32(words, 7 * eighth), _mm512_set1_epi32(127));
    if (!kLong && j % 2 == 1) {  // the eighth sign
      const Int folded = _mm512_xor_si512(signs, _mm512_srli_epi32(signs, 4)), twice = _mm512_xor_si512(folded, _mm512_srli_epi32(folded, 2));
      const Int parity = _mm512_and_si512(_mm512_xor_si512(twice, _mm512_srli_epi32(twice, 1)), _mm512_set1_epi32(1));
      signs = _mm512_or_si512(signs, _mm512_slli_epi32(parity, 7));
    }
    const Int spread = _mm512_shuffle_epi8(signs, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
    const __mmask64 minus = _mm512_test_epi8_mask(spread, _mm512_set1_epi32(j % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010)));
    const Int zero = _mm512_set1_epi8(-kSigned);
    return _mm512_mask_sub_epi8(_mm512_add_epi8(zero, magnitudes), minus, zero, magnitudes);
  }

  CARRYALL_INLINE Int integers(const uint8_t* unit, const uint8_t* factors, int64_t block) const {
    Int scales;
    if (kLong) {
      const Int both = _mm512_cvtepu8_epi32(columns(factors + (2 + block / 2) * kColumns));
      scales = _mm512_and_si512(_mm512_srl_epi32(both, _mm_cvtsi32_si128(static_cast<int>(block % 2 * 4))), _mm512_set1_epi32(15));
    } else {
      scales = _mm512_srli_epi32(_mm512_loadu_si512(unit + kGridSigns), 28);
    }
    return _mm512_or_si512(_mm512_slli_epi32(scales, 1), _mm512_set1_epi32(1));
  }
};

// Blocks of 32 of values from a table: each with a scale and a scale of the row, or, kGroups, two with integer scales.
template <class Values, bool kGroups, int kCount>
void multiply_codes(const Part& part) {
  constexpr int64_t kBlocks = kGroups ? kSharedScale / kUnit : 1;
  const Weights& w = *part.weights;
  const int64_t unit = w.unit_bytes(), blocks = kGroups ? w.stretch() / w.block : 1, factors_at = w.factors();
  const Values values(w);
  Float results[kCount];
  begin(results, part);
  for (int64_t s = 0; s < part.shares; s++) {
    Int totals[kCount];
    const uint8_t* factors = nullptr;
    for (int64_t b = s * kBlocks; b < (s + 1) * kBlocks; b++) {
      part.later.fetch(b);
      const uint8_t* stretch = part.tile + b / blocks * w.stretch_bytes();
      const uint8_t* lines = stretch + b % blocks * unit;
      factors = stretch + factors_at;
      Int sums[kCount];
      dots<32>(sums, Starts<kCount>(part.values + b * 32, part.step),
               [&](int m) { return _mm512_set1_epi32(-kSigned * part.sums[m * part.blocks + b]); },
               [&](auto k) __attribute__((always_inline)) {
                 return values.template four<decltype(k)::value>(lines);
               });
      const Int scale = kGroups ? values.integers(lines, factors, b % blocks) : Int();
      for (int m = 0; m < kCount; m++) {
        const Int scaled = kGroups ? _mm512_mullo_epi32(sums[m], scale) : sums[m];
        totals[m] = b == s * kBlocks ? scaled : _mm512_add_epi32(totals[m], scaled);
      }
    }
    const Float scale = scales_of(w, factors);
    for (int m = 0; m < kCount; m++) {
      const Float sum = kGroups ? _mm512_mul_ps(_mm512_cvtepi32_ps(totals[m]), scale) : scaled_block(totals[m], scale);
      results[m] = _mm512_fmadd_ps(sum, _mm512_set1_ps(part.scales[m * part.shares + s]), results[m]);
    }
  }
  store(results, part);
}

}  // namespace stored

// `multiply` of products.h over these; its kBits are 8 for all that are not 4.
struct StoredAvx512 {
  static constexpr int kRows = Avx512::kRows;
  template <int kBits, int kCount>
  static void run(const Part& part) {
    const Weights& w = *part.weights;
    if constexpr (kBits == 4) {
      if (w.coded()) (w.group > 0 ? stored::multiply_codes<stored::Codes, true, kCount> : stored::multiply_codes<stored::Codes, false, kCount>)(part);
      else if (w.group > 0) stored::multiply_k_minima<4, kCount>(part);
      else stored::multiply_single<4, kCount>(part);
    } else if (w.grids()) {
      (w.offsets == Offsets::long_grid ? stored::multiply_codes<stored::Grid<true>, true, kCount> : stored::multiply_codes<stored::Grid<false>, true, kCount>)(part);
    } else if (w.bits == 8) {
      stored::multiply_single<8, kCount>(part);
    } else if (w.bits == 6) {
      stored::multiply_k_sixteen<6, kCount>(part);
    } else if (w.bits == 3) {
      stored::multiply_k_sixteen<3, kCount>(part);
    } else if (w.bits == 2) {
      stored::multiply_k_sixteen<2, kCount>(part);
    } else if (w.group > 0) {
      stored::multiply_k_minima<5, kCount>(part);
    } else {
      stored::multiply_single<5, kCount>(part);
    }
  }
};

}  // namespace
}  // namespace carryall
