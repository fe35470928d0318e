// Products of quads with AMX: 48 rows by 16 columns at a time, high and low bytes of the rows apart, as they are stored for
// AVX-512 VNNI. Included by attention_amx.cpp, in an anonymous namespace.
#pragma once
#include "amx_configuration.h"
#include "quads_avx512.h"

namespace carryall {
namespace {

struct AmxQuads : Avx512Quads {
  static constexpr bool kSigned = true;
  static constexpr int64_t kRegister = 16;  // rows of a tile register
  static constexpr int64_t kFew = 9;        // AVX-512 VNNI multiplies fewer rows of an item faster

  template <class Operand, class Later>
  static void multiply_all(const Sixteens& a, int64_t count, int64_t columns, const Operand& b, const Later&,
                           Range steps, float* y, int64_t y_step) {
    const __m512i middle = _mm512_set1_epi8(-128);
    const Range pieces = {steps.first / 4, (steps.last + 3) / 4};
    alignas(64) uint8_t column[kLargestHead / kPiece][kPiece * 16];
    for (int64_t c = 0; c < columns; c++) {
      for (int64_t k = 4 * pieces.first; k < 4 * pieces.last; k++) {
        uint8_t* to = column[k / 4] + k % 4 * kQuadTile;
        const bool inside = k >= steps.first && k < steps.last;  // else the rows hold anything there
        for (int64_t i = 0; i < kQuadTile; i += 64)
          _mm512_store_si512(to + i, inside ? _mm512_xor_si512(_mm512_loadu_si512(b(c, k) + i), middle) : _mm512_setzero_si512());
      }
      written(column);
      for (int64_t m = 0; m < count; m += 3 * kRegister) {
        const int64_t left = count - m;
        float* to = y + m * y_step + 16 * c;
        if (left > 2 * kRegister) multiply_column<3>(a.from(m), left, pieces, column, to, y_step);
        else if (left > kRegister) multiply_column<2>(a.from(m), left, pieces, column, to, y_step);
        else multiply_column<1>(a.from(m), left, pieces, column, to, y_step);
      }
    }
  }

 private:
  using Sums = int32_t[kRegister][16];

  // Registers 0 to 2 sum high bytes, 3 to 5 low ones.
  template <int kRegisters>
  static void multiply_column(const Sixteens& a, int64_t count, Range pieces, const uint8_t (*column)[kPiece * 16],
                              float* y, int64_t y_step) {
    alignas(64) Sums high[kRegisters], low[kRegisters];
    _tile_zero(0);
    _tile_zero(3);
    if constexpr (kRegisters > 1) {
      _tile_zero(1);
      _tile_zero(4);
    }
    if constexpr (kRegisters > 2) {
      _tile_zero(2);
      _tile_zero(5);
    }
    const int64_t block = kRegister * a.step;
    for (int64_t k = pieces.first; k < pieces.last; k++) {
      const uint8_t* rows = a.bytes + 2 * kPiece * k;
      _tile_loadd(7, column[k], 64);
      _tile_loadd(6, rows, a.step);
      _tile_dpbssd(0, 6, 7);
      _tile_loadd(6, rows + kPiece, a.step);
      _tile_dpbssd(3, 6, 7);
      if constexpr (kRegisters > 1) {
        _tile_loadd(6, rows + block, a.step);
        _tile_dpbssd(1, 6, 7);
        _tile_loadd(6, rows + block + kPiece, a.step);
        _tile_dpbssd(4, 6, 7);
      }
      if constexpr (kRegisters > 2) {
        _tile_loadd(6, rows + 2 * block, a.step);
        _tile_dpbssd(2, 6, 7);
        _tile_loadd(6, rows + 2 * block + kPiece, a.step);
        _tile_dpbssd(5, 6, 7);
      }
    }
    _tile_stored(0, high[0], 64);
    _tile_stored(3, low[0], 64);
    if constexpr (kRegisters > 1) {
      _tile_stored(1, high[1], 64);
      _tile_stored(4, low[1], 64);
    }
    if constexpr (kRegisters > 2) {
      _tile_stored(2, high[2], 64);
      _tile_stored(5, low[2], 64);
    }
    for (int64_t m = 0; m < smaller(count, kRegisters * kRegister); m++, y += y_step) {
      const __m512i upper = _mm512_load_si512(high[m / kRegister][m % kRegister]);
      const __m512i lower = _mm512_load_si512(low[m / kRegister][m % kRegister]);
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
      _mm512_storeu_ps(y, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(a.scales[m])));
    }
  }
};

}  // namespace
}  // namespace carryall
