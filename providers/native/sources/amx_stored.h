// Weights of GGUF files as bytes for AMX. Blocks of 32 become signed bytes. Blocks of 16 are too few for a product, so those of a group
// of 64 inputs are multiplied by the integers of their blocks before. That fits a byte with Q2_K. With Q3_K and Q6_K the product with
// each digit of the integer in base 8 does, if digits are -3 to 4 (and values -32 to 31), so a group has a product for each of two or
// three digits, which are added exactly.
#pragma once
#include "avx512_unpacked.h"

namespace carryall {
namespace {

constexpr int kDigitBits = 3;
constexpr int64_t kGroupBytes = kSharedScale * kColumns;  // of a digit of a group

// The form of weights of GGUF files on AMX.
struct StoredForm {
  int64_t step, step_bytes, factor_bytes;  // inputs of a step, bytes of its weights and of what its products are scaled by

  CARRYALL_INLINE explicit StoredForm(const Weights& w) {
    const bool minima = w.offsets == Offsets::half_minima;
    step = w.group > 0 ? kSharedScale : w.block;
    step_bytes = step * kColumns * (w.coded() ? 1 : w.bits == 6 ? 3 : w.bits == 3 ? 2 : 1);
    factor_bytes = kLine * (w.group == 0 ? minima ? 2 : 1 : minima ? 6 : w.coded() ? 3 : 1);
  }
};

// The integers of 16 columns in both words of each column.
CARRYALL_INLINE __m512i words_of(__m512i x) {
  return _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(x, 16));
}

// A digit, by which words of signed values are multiplied. The lower byte's product is raised by 128, so that it
// borrows nothing from the upper one.
struct SignedDigit {
  __m512i digit;

  CARRYALL_INLINE __m512i times(__m512i values) const {
    const __m512i raised = _mm512_set1_epi16(128);
    return _mm512_xor_si512(_mm512_add_epi16(_mm512_mullo_epi16(values, digit), raised), raised);
  }
};

// A block of 16 inputs from `kFirst` on, of a unit of Q2_K, Q3_K or Q6_K, times its integer or its digits.
template <int kBits, int kFirst>
CARRYALL_INLINE void write_sixteen(const uint8_t* unit, __m128i scales, int8_t* bytes) {
  constexpr int kDigits = kBits == 6 ? 3 : 2;
  const __m512i seven = _mm512_set1_epi32(7), three = _mm512_set1_epi32(3), scale = _mm512_cvtepi8_epi32(scales);
  __m512i rest = scale, digits[kDigits];
  for (int d = 0; d < kDigits - 1; d++) {
    const __m512i digit = _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(rest, three), seven), three);
    rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, digit), kDigitBits);
    digits[d] = words_of(digit);
  }
  digits[kDigits - 1] = words_of(rest);
  stored::each<4>([&](auto line) __attribute__((always_inline)) {
    constexpr int k = kFirst + 4 * decltype(line)::value;
    const __m512i values = stored::four_inputs<kBits, k>(unit);
    if constexpr (kBits == 2) {
      _mm512_storeu_si512(bytes + k * kColumns, _mm512_mullo_epi16(values, words_of(scale)));
    } else {
      const __m512i middle = _mm512_set1_epi16((1 << (kBits - 1)) * 257), relative = _mm512_sub_epi16(values, middle);
      for (int d = 0; d < kDigits; d++) _mm512_storeu_si512(bytes + d * kGroupBytes + k * kColumns, SignedDigit{digits[d]}.times(relative));
    }
  });
}

// Groups [first, last) of a tile of Q2_K, Q3_K or Q6_K, and their factors: the scale of the stretch; the scale of minima and the integers
// of minima.
template <int kBits>
void unpack_digits(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, uint8_t* bytes, uint8_t* factors) {
  const StoredForm form(w);
  const int64_t unit = w.unit_bytes();
  for (int64_t s = first; s < last; s++, bytes += form.step_bytes, factors += form.factor_bytes) {
    const uint8_t *stretch = tile + s / 4 * w.stretch_bytes(), *units = stretch + s % 4 * 2 * unit, *halves = stretch + w.factors();
    _mm512_store_ps(factors, stored::floats_of(halves));
    const Fours<kBits> fours(halves, s % 4);
    for (int j = 0; j < 2; j++) {
      int8_t* of_unit = reinterpret_cast<int8_t*>(bytes) + j * kUnit * kColumns;
      write_sixteen<kBits, 0>(units + j * unit, fours.scales[2 * j], of_unit);
      write_sixteen<kBits, 16>(units + j * unit, fours.scales[2 * j + 1], of_unit);
    }
    if (kBits != 2) continue;
    _mm512_store_ps(factors + kLine, stored::floats_of(halves + 2 * kColumns));
    for (int j = 0; j < 4; j++) stored::store_integers(factors + (2 + j) * kLine, _mm512_cvtepi8_epi32(fours.minima[j]));
  }
}

inline void unpack_stored(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, int8_t* bytes, uint8_t* factors) {
  const bool groups = w.group > 0;
  const auto unpack = w.offsets == Offsets::short_grid ? stored::unpack_grids<false, false>
                      : w.offsets == Offsets::long_grid ? stored::unpack_grids<true, false>
                      : w.bits == 2 ? unpack_digits<2>
                      : w.bits == 3 ? unpack_digits<3>
                      : w.bits == 4 ? (groups ? stored::unpack_groups<4, false> : stored::unpack_single<4, false>)
                      : w.bits == 5 ? (groups ? stored::unpack_groups<5, false> : stored::unpack_single<5, false>)
                      : w.bits == 6 ? unpack_digits<6> : stored::unpack_single<8, false>;
  unpack(w, tile, first, last, reinterpret_cast<uint8_t*>(bytes), factors);
}

}  // namespace
}  // namespace carryall
