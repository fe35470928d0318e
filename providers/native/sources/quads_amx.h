// Products of quads with AMX: 48 rows by 16 columns at a time, high and low bytes of the rows apart, as they are stored for
// AVX-512 VNNI. Keys lie in the cache as the instruction reads them. Of values, four groups are copied side by side, as signed
// bytes, so that weights need no offsets. Included by attention_amx.cpp, in an anonymous namespace.
#pragma once
#include "amx_configuration.h"
#include "quads_avx512.h"

namespace carryall {
namespace {

struct AmxQuads : Avx512Quads {
  static constexpr bool kSignedValues = true;
  static constexpr int64_t kFew = 9;        // AVX-512 VNNI multiplies fewer rows of an item faster

  // In one permutation of bytes (VBMI) instead of two.
  static void store(Vector x, uint8_t* row, int64_t first) {
    const __m512i n = _mm512_xor_si512(_mm512_castps_si512(x.x), _mm512_set1_epi32(128));
    const __m256i both = _mm512_castsi512_si256(_mm512_permutexvar_epi8(_mm512_load_si512(kHighThenLow), n));
    __m128i* to = reinterpret_cast<__m128i*>(row + place(first));
    _mm_store_si128(to, _mm256_castsi256_si128(both));
    _mm_store_si128(to + kPiece / 16, _mm256_extracti128_si256(both, 1));
  }

  template <class Operand, class Later>
  static void multiply_all(const Sixteens& a, int64_t count, int64_t columns, const Operand& b, const Later&, Range steps,
                           float* y, int64_t y_step) {
    constexpr bool kSigned = !Operand::kTogether;
    const bool copied = kSigned || steps.last % kPieceSteps != 0;
    const Range pieces = {steps.first / kPieceSteps, parts(steps.last, kPieceSteps)};
    alignas(64) uint8_t copies[2][kLargestHead / kPiece * kPieceBytes];  // one is written while the other one is read
    const auto column = [&](int64_t c) {
      return copied ? copy<kSigned>(b, c, pieces, steps, copies[c % 2]) : b(c, 0);
    };
    const uint8_t* next = column(0);
    for (int64_t c = 0; c < columns; c++, y += 16) {
      const uint8_t* data = next;
      if (c + 1 < columns) next = column(c + 1);
      for (int64_t m = 0; m < count; m += 3 * kRegisterRows) {
        const int64_t left = count - m;
        float* to = y + m * y_step;
        if (left > 2 * kRegisterRows) multiply_column<kSigned, 3>(a.from(m), left, pieces, data, to, y_step);
        else if (left > kRegisterRows) multiply_column<kSigned, 2>(a.from(m), left, pieces, data, to, y_step);
        else multiply_column<kSigned, 1>(a.from(m), left, pieces, data, to, y_step);
      }
    }
  }

 private:
  alignas(64) static constexpr uint8_t kHighThenLow[64] = {1, 5, 9,  13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61,
                                                           0, 4, 8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
  static constexpr int64_t kPieceSteps = kPiece / 16, kPieceBytes = kPieceSteps * kQuadTile;
  using Sums = int32_t[kRegisterRows][16];

  // Copies a column, with zeros outside of `steps`, where the rows hold anything.
  template <bool kSigned, class Operand>
  static const uint8_t* copy(const Operand& b, int64_t c, Range pieces, Range steps, uint8_t* to) {
    const __m512i middle = _mm512_set1_epi8(kSigned ? -kMiddle : 0);
    for (int64_t k = kPieceSteps * pieces.first; k < kPieceSteps * pieces.last; k++) {
      const bool inside = k >= steps.first && k < steps.last;
      uint8_t* tile = to + kQuadTile * k;
      for (int64_t i = 0; i < kQuadTile; i += 64)
        _mm512_store_si512(tile + i, inside ? _mm512_xor_si512(_mm512_loadu_si512(b(c, k) + i), middle) : _mm512_setzero_si512());
    }
    written(to);
    return to;
  }

// Registers 0 to 2 sum high bytes of the rows, 3 to 5 low ones. Macros, because the intrinsics take literal numbers only.
#define CARRYALL_ADD(sums, data)                     \
  _tile_loadd(6, data, a.step);                      \
  if constexpr (kSigned) _tile_dpbssd(sums, 6, 7);   \
  else _tile_dpbsud(sums, 6, 7);
#define CARRYALL_ROWS(number, high, low)                           \
  if constexpr (kRegisters > number) {                             \
    CARRYALL_ADD(high, rows + number * kRegisterRows * a.step)         \
    CARRYALL_ADD(low, rows + number * kRegisterRows * a.step + kPiece) \
  }
#define CARRYALL_STORE(number, high, low)   \
  if constexpr (kRegisters > number) {      \
    _tile_stored(high, upper[number], 64);  \
    _tile_stored(low, lower[number], 64);   \
  }
  template <bool kSigned, int kRegisters>
  static void multiply_column(const Sixteens& a, int64_t count, Range pieces, const uint8_t* column, float* y, int64_t y_step) {
    alignas(64) Sums upper[kRegisters], lower[kRegisters];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t k = pieces.first; k < pieces.last; k++) {
      const uint8_t* rows = a.bytes + 2 * kPiece * k;
      _tile_loadd(7, column + kPieceBytes * k, 64);
      CARRYALL_ROWS(0, 0, 3)
      CARRYALL_ROWS(1, 1, 4)
      CARRYALL_ROWS(2, 2, 5)
    }
    CARRYALL_STORE(0, 0, 3)
    CARRYALL_STORE(1, 1, 4)
    CARRYALL_STORE(2, 2, 5)
    const auto row = [](const Sums* sums, int64_t m) { return _mm512_load_si512(sums[m / kRegisterRows][m % kRegisterRows]); };
    for (int64_t m = 0; m < smaller(count, kRegisters * kRegisterRows); m++, y += y_step) {
      __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(row(upper, m), 8), row(lower, m));
      if (!kSigned) sum = _mm512_add_epi32(sum, _mm512_set1_epi32(a.offsets[m]));
      _mm512_storeu_ps(y, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(a.scales[m])));
    }
  }
#undef CARRYALL_ADD
#undef CARRYALL_ROWS
#undef CARRYALL_STORE
};

}  // namespace
}  // namespace carryall
