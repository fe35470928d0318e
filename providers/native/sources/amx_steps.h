// Products on AMX, step by step: of 16 rows by a tile at a time, whose products with a step of inputs leave the registers to be
// scaled and added while those of the next steps are computed.
#pragma once
#include "amx_panel.h"

namespace carryall {
namespace {

// Steps whose products are computed before the first of them are added, of many rows: a load waits until what `tilestored` has
// written is in the cache, since it is not forwarded. For few rows one takes less time.
constexpr int kEarlyOfMany = 3, kEarlyOfFew = 1;
constexpr int64_t kMostSteps = kUnpacked / (16 * kColumns);  // of a panel

// The operands of steps one after another: of a tile, of all tiles, of all strips of 16 rows.
class Operands {
 public:
  explicit Operands(const Panel& p)
      : p_(p), width_(p.rows->width), step_(p.step), row_(p.first_row),
        steps_((p.last_row - p.first_row + kGroup - 1) / kGroup * p.tiles * (p.last - p.first)) {
    begin_tile();
  }

  // Computes products [16, 16] of the next step, if there is one. kOne: a step is at most a line of inputs.
  template <bool kOne>
  CARRYALL_INLINE void multiply(int32_t* products) {
    if (steps_-- <= 0) return;
    _tile_zero(0);
    for (int64_t k = 0; k < (kOne ? 1 : smaller(step_, left_)); k += kLine) {
      _tile_loadd(4, values_ + k, width_);
      _tile_loadd(6, bytes_ + k * kColumns, kLine);
      _tile_dpbssd(0, 4, 6);
    }
    _tile_stored(0, products, kLine);
    values_ += step_;
    bytes_ += step_ * kColumns;
    left_ -= step_;
    if (left_ <= 0) next_tile();
  }

 private:
  CARRYALL_INLINE void next_tile() {
    if (++tile_ == p_.tiles) {
      tile_ = 0;
      row_ += kGroup;
    }
    begin_tile();
  }
  CARRYALL_INLINE void begin_tile() {
    values_ = p_.rows->values + row_ * width_ + p_.first * step_;
    bytes_ = p_.bytes + tile_ * p_.tile_bytes;
    left_ = p_.inputs;
  }

  const Panel& p_;
  const int64_t width_, step_;
  const int8_t *values_, *bytes_;
  int64_t left_, row_, steps_, tile_ = 0;
};

// Scales and sums of 16 rows, so that those of a step lie side by side.
struct Group {
  alignas(kLine) float scales[kMostSteps * kGroup];  // [shares, 16]
  alignas(kLine) int32_t sums[kMostSteps * kGroup];  // [steps, 16]

  // `share`: steps with one scale; `summed`: whether the sums of a step's activations are read.
  void read(const Panel& p, int64_t row, int64_t share, bool summed) {
    const Rows& from = *p.rows;
    const int64_t begin = p.first / share, end = (p.last + share - 1) / share;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i of_rows = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(from.shares)));
    for (int64_t s = begin; s < end; s++)
      _mm512_store_ps(scales + (s - begin) * kGroup, _mm512_i32gather_ps(of_rows, from.scales + row * from.shares + s, 4));
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

template <int kEarly, bool kOne, bool kShared, bool kInexact, bool kMinima>
void add_panel(const Panel& p) {
  alignas(kLine) int32_t products[kEarly + 1][kGroup * kColumns];
  alignas(kLine) float results[kGroup * kColumns];
  Group group;
  const Weights& w = *p.weights;
  const int64_t count = p.last - p.first;
  const bool grouped = w.group > 0, zero_points = w.offsets == Offsets::zero_points;
  const int64_t share = kShared ? p.rows->share : 1, stored_step = grouped ? kLine : w.block_bytes();
  Operands operands(p);
  int turn = 0;
  for (; turn < kEarly; turn++) operands.multiply<kOne>(products[turn]);
  for (int64_t row = p.first_row; row < p.last_row; row += kGroup) {
    const int64_t rows = p.last_row - row < kGroup ? p.last_row - row : kGroup;
    group.read(p, row, share, kInexact || kMinima);
    for (int64_t tile = 0; tile < p.tiles; tile++) {
      const int64_t left_columns = p.columns - tile * kColumns, columns = left_columns < kColumns ? left_columns : kColumns;
      const __mmask16 valid = static_cast<__mmask16>((1 << columns) - 1);
      const Outputs y{p.y.at(row, tile * kColumns), p.y.step};
      const auto valid_in = [&](int64_t r) { return r < rows ? valid : static_cast<__mmask16>(0); };
      for (int64_t r = 0; r < rows; r++) __builtin_prefetch(y.at(r, kColumns), 1);  // of the next tile
      __m512 start = _mm512_setzero_ps(), added[kGroup];
      if (p.bias != nullptr) start = _mm512_maskz_loadu_ps(valid, p.bias + tile * kColumns);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++) {
        if (p.first > 0) start = _mm512_maskz_loadu_ps(valid_in(r), y.at(r, 0));
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
      for (int64_t step = 0; step < count; step++) {
        p.ahead->fetch();
        operands.multiply<kOne>(products[turn]);
        turn = turn < kEarly ? turn + 1 : 0;
        add(products[turn]);
      }
      if (kShared && open < share) add_sums(from.scales, results, added);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++)
        _mm512_mask_storeu_ps(y.at(r, 0), valid_in(r), kShared ? _mm512_load_ps(results + r * kColumns) : added[r]);
    }
  }
}

template <int kEarly, bool kOne, bool kInexact>
void add_any(const Panel& p) {
  const bool minima = p.weights->offsets == Offsets::minima;
  if constexpr (kOne && !kInexact)
    if (p.rows->share * p.weights->block > p.step)
      return minima ? add_panel<kEarly, true, true, false, true>(p) : add_panel<kEarly, true, true, false, false>(p);
  return minima ? add_panel<kEarly, kOne, false, kInexact, true>(p) : add_panel<kEarly, kOne, false, kInexact, false>(p);
}

template <int kEarly>
void multiply_early(const Panel& panel) {
  const Weights& w = *panel.weights;
  const bool one = panel.step <= kLine, inexact = w.bits == 8 && w.offsets != Offsets::middle;
  if (inexact) one ? add_any<kEarly, true, true>(panel) : add_any<kEarly, false, true>(panel);
  else one ? add_any<kEarly, true, false>(panel) : add_any<kEarly, false, false>(panel);
}

inline void multiply_panel(const Panel& panel) {
  const bool many = panel.last_row - panel.first_row > kFewStrips * kGroup;
  many ? multiply_early<kEarlyOfMany>(panel) : multiply_early<kEarlyOfFew>(panel);
}

}  // namespace
}  // namespace carryall
