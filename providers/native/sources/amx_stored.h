// Weights of GGUF files as bytes for AMX. Blocks of 32 become signed bytes. Blocks of Q6_K have 16 weights, too few for a product. A
// weight times the integer of its block does not fit a byte, but its product with each digit of the integer in base 8 does, if
// digits are -3 to 4 (and values -32 to 31), so a group of 64 inputs has a product for each of three digits, which are added exactly.
#pragma once
#include "avx512_gguf.h"

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
    step_bytes = step * kColumns * (w.bits == 6 ? 3 : 1);
    factor_bytes = kLine * (w.group == 0 ? minima ? 2 : 1 : w.bits == 6 ? 1 : minima ? 6 : 3);
  }
};

// The integers of 16 columns in both words of each column.
CARRYALL_INLINE __m512i words_of(__m512i x) {
  return _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(x, 16));
}

// A digit of Q6_K, by which words of values relative to 32 are multiplied. The lower byte's product is raised by 128, so that it
// borrows nothing from the upper one.
struct SignedDigit {
  __m512i digit;

  CARRYALL_INLINE explicit SignedDigit(__m512i of_columns) : digit(words_of(of_columns)) {}
  CARRYALL_INLINE __m512i times(__m512i values) const {
    const __m512i raised = _mm512_set1_epi16(128);
    return _mm512_xor_si512(_mm512_add_epi16(_mm512_mullo_epi16(values, digit), raised), raised);
  }
};

// Three digits of blocks of 16 inputs, `kFirst` and the following, of a unit of Q6_K.
template <int kFirst>
CARRYALL_INLINE void write_three_digits(const uint8_t* unit, __m128i scales, int8_t* bytes) {
  const __m512i seven = _mm512_set1_epi32(7), three = _mm512_set1_epi32(3);
  __m512i rest = _mm512_cvtepi8_epi32(scales), digits[3];
  for (int d = 0; d < 2; d++) {
    digits[d] = _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(rest, three), seven), three);
    rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, digits[d]), kDigitBits);
  }
  digits[2] = rest;
  const SignedDigit multipliers[3] = {SignedDigit(digits[0]), SignedDigit(digits[1]), SignedDigit(digits[2])};
  stored::each<4>([&](auto line) __attribute__((always_inline)) {
    constexpr int k = kFirst + 4 * decltype(line)::value;
    const __m512i values = _mm512_sub_epi16(stored::four_inputs<6, k>(unit), _mm512_set1_epi16(32 * 257));
    for (int d = 0; d < 3; d++) _mm512_storeu_si512(bytes + d * kGroupBytes + k * kColumns, multipliers[d].times(values));
  });
}

// Writes a unit of 4 or 5 bits as signed bytes.
template <int kBits>
CARRYALL_INLINE void write_unit(const Weights& w, const uint8_t* unit, __m512i codes, __m512i zero, int8_t* bytes) {
  stored::each<kUnit / 4>([&](auto line) __attribute__((always_inline)) {
    constexpr int k = 4 * decltype(line)::value;
    const __m512i values = stored::four_inputs<kBits, k>(unit);
    _mm512_storeu_si512(bytes + k * kColumns, w.coded() ? _mm512_shuffle_epi8(codes, values) : _mm512_sub_epi8(values, zero));
  });
}

CARRYALL_INLINE __m512i all_codes(const Weights& w) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(codes_of(w))));
}

// Groups [first, last) of a tile of K-quants or IQ4_XS, and their factors: the scale of the stretch; the integers of both blocks of 32
// as floats; the scale of minima and both integers of minima.
template <int kBits>
void unpack_groups(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, int8_t* bytes, uint8_t* factors) {
  const StoredForm form(w);
  const int64_t unit = w.unit_bytes();
  const __m512i codes = all_codes(w), zero = _mm512_setzero_si512();
  for (int64_t s = first; s < last; s++, bytes += form.step_bytes, factors += form.factor_bytes) {
    const uint8_t *stretch = tile + s / 4 * w.stretch_bytes(), *units = stretch + s % 4 * 2 * unit, *halves = stretch + w.factors();
    _mm512_store_ps(factors, stored::floats_of(halves));
    if constexpr (kBits == 6) {
      const uint8_t* scales = halves + (2 + 4 * (s % 4)) * kColumns;
      for (int j = 0; j < 2; j++) {
        int8_t* of_unit = bytes + j * kUnit * kColumns;
        write_three_digits<0>(units + j * unit, columns(scales + 2 * j * kColumns), of_unit);
        write_three_digits<16>(units + j * unit, columns(scales + (2 * j + 1) * kColumns), of_unit);
      }
      continue;
    }
    __m512i scales[2];
    if (w.coded()) {
      for (int j = 0; j < 2; j++) scales[j] = _mm512_cvtepi8_epi32(columns(halves + (2 + 2 * (s % 4) + j) * kColumns));
    } else {
      const Sixes sixes(halves + kLine, s % 4);
      for (int j = 0; j < 2; j++) scales[j] = _mm512_cvtepu8_epi32(sixes.scales[j]);
      _mm512_store_ps(factors + 3 * kLine, stored::floats_of(halves + 2 * kColumns));
      for (int j = 0; j < 2; j++) _mm512_store_ps(factors + (4 + j) * kLine, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixes.minima[j])));
    }
    for (int j = 0; j < 2; j++) {
      _mm512_store_ps(factors + (1 + j) * kLine, _mm512_cvtepi32_ps(scales[j]));
      write_unit<kBits>(w, units + j * unit, codes, zero, bytes + j * kUnit * kColumns);
    }
  }
}

// Blocks [first, last) of 32 inputs with a scale each, and their factors: scales, then minima.
template <int kBits>
void unpack_single(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, int8_t* bytes, uint8_t* factors) {
  const StoredForm form(w);
  const __m512i codes = all_codes(w), zero = _mm512_set1_epi8(static_cast<char>(zero_of(w)));
  for (int64_t b = first; b < last; b++, bytes += form.step_bytes, factors += form.factor_bytes) {
    const uint8_t *unit = tile + b * w.stretch_bytes(), *halves = unit + w.factors();
    _mm512_store_ps(factors, stored::scales_of(w, halves));
    if (w.offsets == Offsets::half_minima) _mm512_store_ps(factors + kLine, stored::floats_of(halves + 2 * kColumns));
    if constexpr (kBits == 8) memcpy(bytes, unit, static_cast<size_t>(form.step_bytes));
    else write_unit<kBits>(w, unit, codes, zero, bytes);
  }
}

inline void unpack_stored(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, int8_t* bytes, uint8_t* factors) {
  const bool groups = w.group > 0;
  const auto unpack = w.bits == 4 ? (groups ? unpack_groups<4> : unpack_single<4>)
                      : w.bits == 5 ? (groups ? unpack_groups<5> : unpack_single<5>)
                      : w.bits == 6 ? unpack_groups<6> : unpack_single<8>;
  unpack(w, tile, first, last, bytes, factors);
}

}  // namespace
}  // namespace carryall
