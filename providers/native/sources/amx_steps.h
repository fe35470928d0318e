// Products on AMX, step by step: of 16 rows by a tile at a time, whose products with a step of inputs leave the registers to be
// scaled and added while those of the next one are computed.
#pragma once
#include "amx_panel.h"

namespace carryall {
namespace {

constexpr int64_t kMostSteps = kUnpacked / (16 * kColumns);  // of a panel

constexpr int64_t kAhead = 2 << 10;  // bytes of weights that are asked for ahead, from the second-level cache

// The operands of a step.
struct Place {
  const int8_t *values, *bytes;
  int64_t inputs;
};

// `begin` computes the products of 16 rows with one step, `end` stores them. Macros, because the intrinsics take literal
// numbers only. kOne: a step is at most a line of inputs.
#define CARRYALL_STEP(name, sums, activations, weights)                                                          \
  struct name {                                                                                                  \
    template <bool kOne>                                                                                         \
    CARRYALL_INLINE static void begin(const Place& at, int64_t width) {                                          \
      _tile_zero(sums);                                                                                          \
      for (int64_t k = 0; k < (kOne ? 1 : at.inputs); k += kLine) {                                              \
        _tile_loadd(activations, at.values + k, width);                                                          \
        _tile_loadd(weights, at.bytes + k * kColumns, kLine);                                                    \
        for (int64_t i = 0; i < kColumns * kLine; i += kLine)                                                    \
          __builtin_prefetch(at.bytes + k * kColumns + kAhead + i);                                              \
        _tile_dpbssd(sums, activations, weights);                                                                \
      }                                                                                                          \
    }                                                                                                            \
    CARRYALL_INLINE static void end(int32_t* products) { _tile_stored(sums, products, kLine); }                  \
  };
CARRYALL_STEP(Even, 0, 4, 6)
CARRYALL_STEP(Odd, 1, 5, 7)

// Scales and sums of 16 rows, so that those of a step lie side by side.
struct Group {
  alignas(kLine) float scales[kMostSteps * kGroup];  // [shares, 16]
  alignas(kLine) int32_t sums[kMostSteps * kGroup];  // [steps, 16]

  // `share`: steps with one scale; `summed`: whether the sums of a step's activations are read.
  void read(const Panel& p, int64_t row, int64_t share, bool summed) {
    const Rows& from = *p.rows;
    const int64_t begin = p.first / share, end = (p.last + share - 1) / share;
    for (int64_t r = 0; r < kGroup; r++) {
      const float* own = from.scales + (row + r) * from.shares;
      for (int64_t s = begin; s < end; s++) scales[(s - begin) * kGroup + r] = own[s];
    }
    if (!summed) return;
    for (int64_t r = 0; r < kGroup; r++) {
      const int32_t* own = from.sums + (row + r) * from.blocks;
      for (int64_t b = p.first; b < p.last; b++) sums[(b - p.first) * kGroup + r] = own[b];
    }
  }
};

// What the addition of a step reads.
struct Addend {
  const float* stored;    // scales of the columns, then minima
  const uint8_t* points;  // zero points, or nullptr
  const float* scales;    // of the rows
  const int32_t* sums;

  CARRYALL_INLINE void next(int64_t stored_step) {
    stored = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(stored) + stored_step);
    points += kColumns;
    sums += kGroup;
  }
};

// Adds the products with one step to `added`: to the sum over the steps that share scales of the rows, if they do, else,
// multiplied by them, to the results.
template <bool kShared, bool kInexact, bool kMinima>
CARRYALL_INLINE void add_step(const Addend& from, bool zero_points, const int32_t* products, __m512 (&added)[kGroup]) {
  const __m512 scale = _mm512_loadu_ps(from.stored), minima = kMinima ? _mm512_loadu_ps(from.stored + kColumns) : scale;
  __m512i less = _mm512_set1_epi32(128);  // products with unpacked weights of 8 bits are relative to 128
  if (kInexact && zero_points) {
    const __m128i points = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.points));
    less = _mm512_and_si512(_mm512_sub_epi32(less, _mm512_cvtepu8_epi32(points)), _mm512_set1_epi32(0xffff));
  }
#pragma GCC unroll 16
  for (int r = 0; r < kGroup; r++) {
    __m512i product = _mm512_load_si512(products + r * kColumns);
    // The sum of a block fits into the low 16 bits, as does `less`, whose high ones are 0.
    if (kInexact) product = _mm512_dpwssd_epi32(product, less, _mm512_set1_epi32(from.sums[r]));
    const __m512 start = kShared ? added[r] : _mm512_setzero_ps();
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, start);
    if (kMinima) sum = _mm512_fmadd_ps(minima, _mm512_cvtepi32_ps(_mm512_set1_epi32(from.sums[r])), sum);
    added[r] = kShared ? sum : _mm512_fmadd_ps(sum, _mm512_set1_ps(from.scales[r]), added[r]);
  }
}

// Adds the sums over steps, multiplied by the scales of the rows, to the results [16, 16], and begins new sums.
CARRYALL_INLINE void add_sums(const float* scales, float* results, __m512 (&sums)[kGroup]) {
#pragma GCC unroll 16
  for (int r = 0; r < kGroup; r++) {
    float* result = results + r * kColumns;
    _mm512_store_ps(result, _mm512_fmadd_ps(sums[r], _mm512_set1_ps(scales[r]), _mm512_load_ps(result)));
    sums[r] = _mm512_setzero_ps();
  }
}

template <bool kOne, bool kShared, bool kInexact, bool kMinima>
void add_panel(const Panel& p) {
  alignas(kLine) int32_t products[2][kGroup * kColumns];
  alignas(kLine) float results[kGroup * kColumns];
  Group group;
  const Weights& w = *p.weights;
  const int64_t width = p.rows->width, count = p.last - p.first;
  const bool grouped = w.group > 0, zero_points = w.offsets == Offsets::zero_points;
  const int64_t share = kShared ? p.rows->share : 1, stored_step = grouped ? kLine : w.block_bytes();
  const auto place = [&](int64_t row, int64_t tile, int64_t step) -> Place {
    const int64_t first = step * p.step, left = p.inputs - first;
    return {p.rows->values + row * width + p.first * p.step + first, p.bytes + tile * p.tile_bytes + first * kColumns,
            left < p.step ? left : p.step};
  };
  // Steps are computed two ahead, then those of the next tile. The last ones, which nobody adds, are any memory.
  Even::begin<kOne>(place(p.first_row, 0, 0), width);
  Odd::begin<kOne>(place(p.first_row, 0, 1), width);
  Even::end(products[0]);
  for (int64_t row = p.first_row; row < p.last_row; row += kGroup) {
    const int64_t rows = p.last_row - row < kGroup ? p.last_row - row : kGroup;
    group.read(p, row, share, kInexact || kMinima);
    for (int64_t tile = 0; tile < p.tiles; tile++) {
      const bool last_tile = tile + 1 == p.tiles;
      const int64_t next_tile = last_tile ? 0 : tile + 1, next_row = last_tile && row + kGroup < p.last_row ? row + kGroup : row;
      const int64_t left_columns = p.columns - tile * kColumns, columns = left_columns < kColumns ? left_columns : kColumns;
      const __mmask16 valid = static_cast<__mmask16>((1 << columns) - 1);
      float* y = p.y + row * w.outputs + tile * kColumns;
      const auto valid_in = [&](int64_t r) { return r < rows ? valid : static_cast<__mmask16>(0); };
      for (int64_t r = 0; r < rows; r++) __builtin_prefetch(y + r * w.outputs, 1);
      __m512 start = _mm512_setzero_ps(), added[kGroup];
      if (p.bias != nullptr) start = _mm512_maskz_loadu_ps(valid, p.bias + tile * kColumns);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++) {
        if (p.first > 0) start = _mm512_maskz_loadu_ps(valid_in(r), y + r * w.outputs);
        added[r] = kShared ? _mm512_setzero_ps() : start;
        if (kShared) _mm512_store_ps(results + r * kColumns, start);
      }
      const uint8_t* data = p.data + tile * w.tile_bytes();
      const uint8_t* stored = data + p.first * stored_step + (grouped ? w.group_scales() : w.value_bytes());
      Addend from{reinterpret_cast<const float*>(stored), data + w.points() + p.first * kColumns, group.scales, group.sums};
      int64_t open = share;
      const auto add = [&](const int32_t* step_products) __attribute__((always_inline)) {
        add_step<kShared, kInexact, kMinima>(from, zero_points, step_products, added);
        from.next(stored_step);
        if (--open > 0) return;
        if (kShared) add_sums(from.scales, results, added);
        from.scales += kGroup;
        open = share;
      };
      for (int64_t step = 0; step < count; step += 2) {
        const bool more = step + 2 < count;
        const auto ahead = [&](int64_t i) { return more ? place(row, tile, step + 2 + i) : place(next_row, next_tile, i); };
        p.ahead->fetch();
        Even::begin<kOne>(ahead(0), width);
        Odd::end(products[1]);
        add(products[0]);
        Odd::begin<kOne>(ahead(1), width);
        Even::end(products[0]);
        if (step + 1 < count) add(products[1]);
      }
      if (kShared && open < share) add_sums(from.scales, results, added);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++)
        _mm512_mask_storeu_ps(y + r * w.outputs, valid_in(r), kShared ? _mm512_load_ps(results + r * kColumns) : added[r]);
    }
  }
}

template <bool kOne, bool kInexact>
void add_any(const Panel& p) {
  const bool minima = p.weights->offsets == Offsets::minima;
  if constexpr (kOne && !kInexact)
    if (p.rows->share * p.weights->block > p.step) return minima ? add_panel<true, true, false, true>(p) : add_panel<true, true, false, false>(p);
  return minima ? add_panel<kOne, false, kInexact, true>(p) : add_panel<kOne, false, kInexact, false>(p);
}

inline void multiply_panel(const Panel& panel) {
  const Weights& w = *panel.weights;
  const bool one = panel.step <= kLine, inexact = w.bits == 8 && w.offsets != Offsets::middle;
  if (inexact) one ? add_any<true, true>(panel) : add_any<false, true>(panel);
  else one ? add_any<true, false>(panel) : add_any<false, false>(panel);
}

}  // namespace
}  // namespace carryall
