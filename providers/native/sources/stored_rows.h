// Products of many rows on AVX-512 VNNI with weights of GGUF files: 512 inputs of two tiles become bytes, and their factors floats, once
// for all rows, and each value of a row is read once for both tiles. With one tile, reading values takes longer than multiplying them.
// The results are those of gguf_products.h, though sums times integers are floats: the sum of a block times its integer is less than
// 2^24, so exact, and the sum of two is rounded at most once. Of four (blocks of 16), pairs are exact, and their sum is rounded once.
#pragma once
#include "avx512_unpacked.h"
#include "integers.h"

namespace carryall {
namespace {
namespace stored {

constexpr int64_t kPanelInputs = 512;                               // of two tiles: 16 KB of bytes and 2 to 10 KB of factors
constexpr int64_t kPanelBlocks = kPanelInputs / 16;                 // at most
constexpr int64_t kFactorLines = kPanelInputs / kSharedScale * 10;  // at most, of Q2_K
constexpr int64_t kUnpackedRows = 12;  // from which unpacking takes less time than it saves; on an Ice Lake, one thread
constexpr int kPanelRows = 4;          // of a pass: 8 sums, 8 sums times integers and 8 results in 32 registers

// Some inputs of one or two tiles for all rows of a task.
struct Panel {
  const Weights* weights;
  const Rows* rows;
  const float* bias;   // of the first tile, or nullptr
  Outputs y;           // from the first tile's first column on
  int64_t columns;     // valid ones
  int64_t first, last; // inputs
  Ahead* ahead;        // in steps of a block or a share of 64 inputs, for each pass
  uint8_t (*bytes)[kPanelInputs * kColumns];
  uint8_t (*factors)[kFactorLines * kLine];
};

// What the sums of blocks begin with, or, with minima, the sums of a row's values as floats.
template <bool kMinima, int kCount>
struct Beginnings {
  alignas(kLine) int32_t of[kCount][kPanelBlocks];

  CARRYALL_INLINE Beginnings(const Panel& p, int64_t row) {
    const Weights& w = *p.weights;
    const int64_t first = p.first / w.block, blocks = p.last / w.block - first;
    const Int zero = _mm512_set1_epi32(-zero_of(w));
#pragma GCC unroll 4
    for (int m = 0; m < kCount; m++) {
      const int32_t* sums = p.rows->sums + (row + m) * p.rows->blocks + first;
      for (int64_t b = 0; b < blocks; b += 16) {
        const auto valid = static_cast<__mmask16>(blocks - b < 16 ? (1 << (blocks - b)) - 1 : 0xffff);
        const Int some = _mm512_maskz_loadu_epi32(valid, sums + b);
        _mm512_store_si512(of[m] + b, kMinima ? _mm512_castps_si512(_mm512_cvtepi32_ps(some)) : _mm512_mullo_epi32(some, zero));
      }
    }
  }
  CARRYALL_INLINE Int start(int m, int64_t block) const { return kMinima ? _mm512_setzero_si512() : _mm512_set1_epi32(of[m][block]); }
  CARRYALL_INLINE Float total(int m, int64_t block) const {
    return _mm512_castsi512_ps(_mm512_set1_epi32(of[m][block]));
  }
};

// The sums of the products of kInputs inputs from `first` on, which begin with `start(m)`.
template <int kInputs, int kTiles, int kCount, class Start>
CARRYALL_INLINE void dots_of_tiles(Int (&sums)[kTiles][kCount], const uint8_t* lines, const Starts<kCount>& rows, int64_t first,
                                   const Start& start) {
#pragma GCC unroll 4
  for (int m = 0; m < kCount; m++)
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) sums[t][m] = start(m);
  each<kInputs / 4>([&](auto step) __attribute__((always_inline)) {
    constexpr int k = 4 * decltype(step)::value;
    Int line[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) line[t] = _mm512_load_si512(lines + k * kColumns + t * kPanelInputs * kColumns);
#pragma GCC unroll 4
    for (int m = 0; m < kCount; m++) {
      const Int x = broadcast(rows.of[m] + first + k);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) sums[t][m] = _mm512_dpbusd_epi32(sums[t][m], line[t], x);
    }
  });
}

template <int kTiles, int kCount>
CARRYALL_INLINE void begin_rows(Float (&results)[kTiles][kCount], const Panel& p, int64_t row) {
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 4
    for (int m = 0; m < kCount; m++) {
      float* of = p.y.at(row + m, t * kColumns);
      __builtin_prefetch(of + kTiles * kColumns, 1, 2);
      const float* from = p.first > 0 ? of : p.bias == nullptr ? nullptr : p.bias + t * kColumns;
      results[t][m] = load_columns<Avx512>(from, p.columns - t * kColumns);
    }
}

template <int kTiles, int kCount>
CARRYALL_INLINE void store_rows(const Float (&results)[kTiles][kCount], const Panel& p, int64_t row) {
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 4
    for (int m = 0; m < kCount; m++) store_columns<Avx512>(p.y.at(row + m, t * kColumns), results[t][m], p.columns - t * kColumns);
}

// Blocks with integer scales, and minima: all K-quants, IQ4_XS, IQ3_XXS, IQ3_S.
template <int kBlock, bool kMinima, int kTiles, int kCount>
void multiply_group_rows(const Panel& p, int64_t row) {
  constexpr int kBlocks = kSharedScale / kBlock, kOfMinima = 1 + kBlocks, kLines = kOfMinima * (kMinima ? 2 : 1);
  const Rows& rows = *p.rows;
  const Beginnings<kMinima, kCount> beginnings(p, row);
  const Starts<kCount> values(rows.values + row * rows.step, rows.step);
  const float* row_scales = rows.scales + row * rows.shares;
  Float results[kTiles][kCount];
  begin_rows(results, p, row);
  const uint8_t* lines = p.bytes[0];
  const uint8_t* factors = p.factors[0];
  for (int64_t k = p.first, b = 0; k < p.last; k += kSharedScale, b += kBlocks) {
    const auto factor = [&](int t, int index) { return _mm512_load_ps(factors + t * kFactorLines * kLine + index * kLine); };
    Float pairs[kBlocks / 2][kTiles][kCount];
    p.ahead->fetch();
    each<kBlocks>([&](auto block) __attribute__((always_inline)) {
      constexpr int j = decltype(block)::value;
      Int sums[kTiles][kCount];
      dots_of_tiles<kBlock>(sums, lines + j * kBlock * kColumns, values, k + j * kBlock, [&](int m) { return beginnings.start(m, b + j); });
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 4
        for (int m = 0; m < kCount; m++) {
          const Float sum = _mm512_cvtepi32_ps(sums[t][m]), scale = factor(t, 1 + j);
          Float& pair = pairs[j / 2][t][m];
          pair = j % 2 == 0 ? _mm512_mul_ps(sum, scale) : _mm512_fmadd_ps(sum, scale, pair);
        }
    });
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 4
      for (int m = 0; m < kCount; m++) {
        const Float total = kBlocks == 2 ? pairs[0][t][m] : _mm512_add_ps(pairs[0][t][m], pairs[kBlocks / 2 - 1][t][m]);
        Float sum = _mm512_mul_ps(total, factor(t, 0));
        if constexpr (kMinima) {
          Float minima = _mm512_mul_ps(factor(t, kOfMinima + 1), beginnings.total(m, b));
          for (int j = 1; j < kBlocks; j++) minima = _mm512_fmadd_ps(factor(t, kOfMinima + 1 + j), beginnings.total(m, b + j), minima);
          sum = _mm512_fnmadd_ps(minima, factor(t, kOfMinima), sum);
        }
        results[t][m] = _mm512_fmadd_ps(sum, _mm512_set1_ps(row_scales[m * rows.shares + k / kSharedScale]), results[t][m]);
      }
    lines += kSharedScale * kColumns;
    factors += kLines * kLine;
  }
  store_rows(results, p, row);
}

// Blocks of 32 with a scale, and a minimum, and a scale of the row: all other types.
template <bool kMinima, int kTiles, int kCount>
void multiply_single_rows(const Panel& p, int64_t row) {
  constexpr int kLines = kMinima ? 2 : 1;
  const Rows& rows = *p.rows;
  const Beginnings<kMinima, kCount> beginnings(p, row);
  const Starts<kCount> values(rows.values + row * rows.step, rows.step);
  const float* row_scales = rows.scales + row * rows.shares;
  Float results[kTiles][kCount];
  begin_rows(results, p, row);
  const uint8_t* lines = p.bytes[0];
  const uint8_t* factors = p.factors[0];
  const int64_t first = p.first / kUnit, last = p.last / kUnit;
  for (int64_t b = first; b < last; b++, lines += kUnit * kColumns, factors += kLines * kLine) {
    p.ahead->fetch();
    Int sums[kTiles][kCount];
    dots_of_tiles<kUnit>(sums, lines, values, b * kUnit, [&](int m) { return beginnings.start(m, b - first); });
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      const uint8_t* of_tile = factors + t * kFactorLines * kLine;
      const Float scale = _mm512_load_ps(of_tile), minimum = _mm512_load_ps(of_tile + (kLines - 1) * kLine);
#pragma GCC unroll 4
      for (int m = 0; m < kCount; m++) {
        Float scaled = scaled_block(sums[t][m], scale);
        if (kMinima) scaled = _mm512_fmadd_ps(minimum, beginnings.total(m, b - first), scaled);
        results[t][m] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(row_scales[m * rows.shares + b]), results[t][m]);
      }
    }
  }
  store_rows(results, p, row);
}

template <int kTiles, int kCount>
CARRYALL_INLINE void choose_rows(const Panel& p, int64_t row, int64_t count) {
  if (count != kCount) {
    if constexpr (kCount > 1) choose_rows<kTiles, kCount - 1>(p, row, count);
    return;
  }
  const Weights& w = *p.weights;
  const bool minima = w.offsets == Offsets::half_minima;
  if (w.group == 0) (minima ? multiply_single_rows<true, kTiles, kCount> : multiply_single_rows<false, kTiles, kCount>)(p, row);
  else if (w.block == 32) (minima ? multiply_group_rows<32, true, kTiles, kCount> : multiply_group_rows<32, false, kTiles, kCount>)(p, row);
  else (minima ? multiply_group_rows<16, true, kTiles, kCount> : multiply_group_rows<16, false, kTiles, kCount>)(p, row);
}

inline void unpack_raised(const Panel& p, int t, const uint8_t* tile) {
  const Weights& w = *p.weights;
  const bool groups = w.group > 0;
  const auto unpack = w.offsets == Offsets::short_grid ? unpack_grids<false, true>
                      : w.offsets == Offsets::long_grid ? unpack_grids<true, true>
                      : w.bits == 2 ? unpack_groups<2, true>
                      : w.bits == 3 ? unpack_groups<3, true>
                      : w.bits == 4 ? (groups ? unpack_groups<4, true> : unpack_single<4, true>)
                      : w.bits == 5 ? (groups ? unpack_groups<5, true> : unpack_single<5, true>)
                      : w.bits == 6 ? unpack_groups<6, true> : unpack_single<8, true>;
  const int64_t step = groups ? kSharedScale : kUnit;
  unpack(w, tile, p.first / step, p.last / step, p.bytes[t], p.factors[t]);
}

// Columns of kTiles tiles from `tile` on.
template <int kTiles>
void multiply_tile_rows(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row, int64_t tile,
                        Outputs y) {
  alignas(kLine) uint8_t bytes[kTiles][kPanelInputs * kColumns], factors[kTiles][kFactorLines * kLine];
  const int64_t passes = parts(last_row - first_row, kPanelRows), column = tile * kColumns, after = tile + kTiles;
  Ahead ahead(w.data + after * w.tile_bytes(), smaller(kTiles, w.tiles() - after) * w.tile_bytes(),
              passes * (rows.width / (w.group > 0 ? kSharedScale : kUnit)));
  Panel panel{&w, &rows, bias == nullptr ? nullptr : bias + column, {y.at(0, column), y.step}, w.outputs - column, 0, 0,
              &ahead, bytes, factors};
  for (; panel.last < rows.width; panel.first = panel.last) {
    panel.last = smaller(panel.first + kPanelInputs, rows.width);
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) unpack_raised(panel, t, w.data + (tile + t) * w.tile_bytes());
    for (int64_t row = first_row, left = passes; left > 0; left--) {
      const int64_t count = parts(last_row - row, left);  // of nearly equal size
      choose_rows<kTiles, kPanelRows>(panel, row, count);
      row += count;
    }
  }
}

inline void multiply_many(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                                 int64_t first_tile, int64_t last_tile, Outputs y) {
  for (int64_t tile = first_tile; tile < last_tile; tile += 2)
    (tile + 1 < last_tile ? multiply_tile_rows<2> : multiply_tile_rows<1>)(w, rows, bias, first_row, last_row, tile, y);
}

}  // namespace stored
}  // namespace
}  // namespace carryall
