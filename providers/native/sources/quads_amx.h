// Products of quads with AMX: 16 rows by 16 columns at a time, high and low bytes of the rows apart. Rows of queries are stored as
// for AVX-512 VNNI, and keys lie in the cache as the instruction reads them. Values of a part are copied once for all queries of
// an item, four groups side by side, as signed bytes, so that weights need no offsets; both bytes of a weight are unsigned.
// 32 queries at a time: behind a softmax the first products are slow (0.3 us on a Sapphire Rapids, as long as AMX multiplies 16
// queries by 256 keys), and the scores of 48 queries fill a first-level cache. Included by attention_amx.cpp, in an anonymous
// namespace.
#pragma once
#include "amx_configuration.h"
#include "quads_avx512.h"

namespace carryall {
namespace {

class AmxQuads : public Avx512Quads {
 public:
  static constexpr bool kSignedValues = true;
  static constexpr int64_t kRows = 2 * kRegisterRows;
  static constexpr int64_t kFew = 9;  // AVX-512 VNNI multiplies fewer rows of an item faster
  static constexpr float kWeightRound = kShift;

  // In one permutation of bytes (VBMI) instead of two.
  static void store(Vector x, uint8_t* row, int64_t first) {
    store_bytes(_mm512_xor_si512(_mm512_castps_si512(x.x), _mm512_set1_epi32(128)), row, first);
  }
  static void store_weight(Vector x, uint8_t* row, int64_t first) { store_bytes(_mm512_castps_si512(x.x), row, first); }

  // Sums are stored as integers, by the tile registers where they have one byte.
  static Vector scores_of(const float* y) { return {_mm512_cvtepi32_ps(_mm512_load_si512(y))}; }

  void read_values(const uint8_t* const* values, Range groups, int64_t columns) {
    const __m512i middle = _mm512_set1_epi8(static_cast<char>(kMiddle));
    for (int64_t g = groups.first; g < groups.last; g++)
      for (int64_t i = 0; i < columns * kQuadTile; i += 64)
        _mm512_store_si512(values_ + i / kQuadTile * kColumnBytes + g * kQuadTile + i % kQuadTile,
                           _mm512_xor_si512(_mm512_loadu_si512(values[g] + i), middle));
    written(values_);
  }

  static void clear_around(uint8_t* row, Range groups) {
    const auto clear = [&](int64_t group) {
      memset(row + place(16 * group), 0, 16);
      memset(row + place(16 * group) + kPiece, 0, 16);
    };
    for (int64_t g = groups.first / kPieceSteps * kPieceSteps; g < groups.first; g++) clear(g);
    for (int64_t g = groups.last; g % kPieceSteps != 0; g++) clear(g);
  }

  template <class Later>
  static void multiply_keys(const Sixteens& a, int64_t count, int64_t columns, const Keys& b, const Later&, Range steps, float* y,
                            int64_t y_step) {
    written(a.bytes);
    const bool one = steps.last <= kPieceSteps;
    const auto multiply = a.high ? (one ? multiply_columns<true, true> : multiply_columns<true, false>)
                                 : (one ? multiply_columns<false, true> : multiply_columns<false, false>);
    for (int64_t m = 0; m < count; m += kRegisterRows)
      multiply(a.from(m), smaller(kRegisterRows, count - m), columns, b, steps.last, y + m * y_step, y_step);
  }

  // Two columns of 16 rows at a time; their sums are read while the next ones are computed.
  template <class Later>
  void multiply_values(const Sixteens& a, int64_t count, int64_t columns, const Values&, const Later&, Range steps, float* y,
                       int64_t y_step) const {
    const Range pieces = {steps.first / kPieceSteps, parts(steps.last, kPieceSteps)};
    alignas(64) Sums sums[2][4];
    written(a.bytes);
    int64_t turn = 0, last_row = -1, last_column = 0;
    const auto write = [&]() {
      if (last_row < 0) return;
      const Sums* last = sums[1 - turn];
      for (int64_t c = last_column; c < smaller(last_column + 2, columns); c++, last += 2)
        for (int64_t m = last_row; m < smaller(last_row + kRegisterRows, count); m++) {
          const __m512 sum = _mm512_cvtepi32_ps(sum_of(last, m - last_row));
          _mm512_storeu_ps(y + m * y_step + 16 * c, _mm512_mul_ps(sum, _mm512_set1_ps(a.scales[m])));
        }
    };
    for (int64_t m = 0; m < count; m += kRegisterRows)
      for (int64_t c = 0; c < columns; c += 2) {
        if (c + 1 < columns) add_values<true>(a.from(m), pieces, c, sums[turn]);
        else add_values<false>(a.from(m), pieces, c, sums[turn]);
        write();
        turn = 1 - turn, last_row = m, last_column = c;
      }
    write();
  }

 private:
  alignas(64) static constexpr uint8_t kHighThenLow[64] = {1, 5, 9,  13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61,
                                                           0, 4, 8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
  static constexpr int64_t kPieceSteps = kPiece / 16, kPieceBytes = kPieceSteps * kQuadTile;
  static constexpr int64_t kColumnBytes = kPartGroups * kQuadTile;
  using Sums = int32_t[kRegisterRows][16];

  static void store_bytes(__m512i n, uint8_t* row, int64_t first) {
    const __m256i both = _mm512_castsi512_si256(_mm512_permutexvar_epi8(_mm512_load_si512(kHighThenLow), n));
    __m128i* to = reinterpret_cast<__m128i*>(row + place(first));
    _mm_store_si128(to, _mm256_castsi256_si128(both));
    _mm_store_si128(to + kPiece / 16, _mm256_extracti128_si256(both, 1));
  }

  // Of sums of high bytes, then of low ones.
  static __m512i sum_of(const Sums* sums, int64_t row) {
    return _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[0][row]), 8), _mm512_load_si512(sums[1][row]));
  }

  // Columns of keys: without low bytes if `kBytes`; of at most 64 elements if `kOne`, so that the rows stay in registers.
  template <bool kBytes, bool kOne>
  static void multiply_columns(const Sixteens& a, int64_t count, int64_t columns, const Keys& b, int64_t steps, float* y, int64_t y_step) {
    alignas(64) Sums offsets, sums[2][2];
    alignas(64) uint8_t rest[kPieceBytes] = {};  // of a column whose last piece is not whole
    for (int64_t m = 0; m < kRegisterRows; m++)
      _mm512_store_si512(offsets[m], _mm512_set1_epi32(m < count ? a.offsets[m] / (kBytes ? 256 : 1) : 0));
    written(offsets);
    const int64_t pieces = parts(steps, kPieceSteps), whole = steps / kPieceSteps;
    if (kOne) load_rows<kBytes>(a, 0);
    for (int64_t c = 0; c <= columns; c++) {
      if (c < columns) {
        _tile_loadd(0, offsets, 64);
        if (!kBytes) _tile_zero(1);
        for (int64_t k = 0; k < pieces; k++) {
          const uint8_t* data = b(c, k * kPieceSteps);
          if (k == whole) {
            memcpy(rest, data, static_cast<size_t>(steps % kPieceSteps * kQuadTile));
            written(rest);
            data = rest;
          }
          if (!kOne) load_rows<kBytes>(a, k);
          _tile_loadd(6, data, 64);
          if (kBytes) {
            _tile_dpbsud(0, 4, 6);
          } else {
            _tile_dpbsud(1, 4, 6);
            _tile_dpbsud(0, 5, 6);
          }
        }
        if (kBytes) {
          _tile_stored(0, y + 16 * c, static_cast<size_t>(y_step) * sizeof *y);
        } else {
          _tile_stored(1, sums[c % 2][0], 64);
          _tile_stored(0, sums[c % 2][1], 64);
        }
      }
      if (kBytes || c == 0) continue;
      for (int64_t m = 0; m < count; m++) _mm512_store_si512(y + m * y_step + 16 * (c - 1), sum_of(sums[(c - 1) % 2], m));
    }
  }

  // Into register 4, and low bytes into 5.
  template <bool kBytes>
  CARRYALL_INLINE static void load_rows(const Sixteens& a, int64_t piece) {
    _tile_loadd(4, a.bytes + 2 * kPiece * piece, a.step);
    if (!kBytes) _tile_loadd(5, a.bytes + 2 * kPiece * piece + kPiece, a.step);
  }

  // Products of weights and one or two columns of values: sums of high bytes, then of low ones, of each column.
  template <bool kTwo>
  void add_values(const Sixteens& a, Range pieces, int64_t column, Sums* sums) const {
    const uint8_t* data = values_ + column * kColumnBytes;
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = pieces.first; k < pieces.last; k++) {
      load_rows<false>(a, k);
      _tile_loadd(6, data + k * kPieceBytes, 64);
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 5, 6);
      if (!kTwo) continue;
      _tile_loadd(7, data + kColumnBytes + k * kPieceBytes, 64);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (!kTwo) return;
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }

  alignas(64) uint8_t values_[kLargestHead * kPartPositions];  // of a part: columns of 16 elements, groups
};

}  // namespace
}  // namespace carryall
