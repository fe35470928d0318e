// Products on AMX, step by step: of 16 rows by a tile at a time, whose products with a step of inputs leave the registers to be
// scaled and added while those of the next steps are computed.
#pragma once
#include <type_traits>

#include "amx_panel.h"
#include "amx_stored.h"

namespace carryall {
namespace {

// Steps whose products are computed ahead of the one that is added: a load waits until what `tilestored` has written is in the cache,
// since it is not forwarded, and that waits for all results stored before. Products of several registers take longer.
template <class Step>
constexpr int kEarly = Step::kTiles == 1 ? 6 : 2;
constexpr int64_t kProducts = kGroup * kColumns;  // of a tile register
constexpr int64_t kRowStep = kUnpacked / 4 / (16 * kColumns) + 16;  // at least the blocks of a panel; no power of two

// How the `kTiles` products [16, 16] of a step come about, in phases. `values` are those of 16 rows, `bytes` the step's weights. Products
// stay in their registers for a step: `store` writes those of the step before, since a store that waits for its product fills the
// queue of stores, and nothing behind it begins. Between the phases rows of an earlier step are added: registers of tiles and of
// AVX-512 then compute at the same time, because the processor does not look far enough ahead to find one behind all of the other.
constexpr int kPhases = 4;

struct Lines {  // of one scale, at most 256 inputs
  static constexpr int kTiles = 1;
  template <int kPhase>
  CARRYALL_INLINE static void store(int32_t* products) {
    if constexpr (kPhase == 0) _tile_stored(0, products, kLine);
  }
  template <int kPhase>
  CARRYALL_INLINE static void multiply(const int8_t* values, int64_t row_step, const int8_t* bytes, int64_t inputs) {
    if constexpr (kPhase == 0) _tile_zero(0);
    if (kPhase * kLine >= inputs) return;
    _tile_loadd(4, values + kPhase * kLine, row_step);
    _tile_loadd(6, bytes + kPhase * kLine * kColumns, kLine);
    _tile_dpbssd(0, 4, 6);
  }
};

struct OneLine {  // of at most 64 inputs
  static constexpr int kTiles = 1;
  template <int kPhase>
  CARRYALL_INLINE static void store(int32_t* products) { Lines::store<kPhase>(products); }
  template <int kPhase>
  CARRYALL_INLINE static void multiply(const int8_t* values, int64_t row_step, const int8_t* bytes, int64_t) {
    if constexpr (kPhase == 1) {
      _tile_zero(0);
      _tile_loadd(4, values, row_step);
    }
    if constexpr (kPhase == 2) _tile_loadd(6, bytes, kLine);
    if constexpr (kPhase == 3) _tile_dpbssd(0, 4, 6);
  }
};

// Two blocks of 32 inputs, which have scales of their own, or two digits of weights of a group (amx_stored.h).
template <bool kBlocks>
struct TwoProducts {
  static constexpr int kTiles = 2;
  template <int kPhase>
  CARRYALL_INLINE static void store(int32_t* products) {
    if constexpr (kPhase == 0) _tile_stored(0, products, kLine);
    if constexpr (kPhase == 1) _tile_stored(1, products + kProducts, kLine);
  }
  template <int kPhase>
  CARRYALL_INLINE static void multiply(const int8_t* values, int64_t row_step, const int8_t* bytes, int64_t) {
    if constexpr (kPhase == 0) {
      _tile_zero(0);
      _tile_loadd(4, values, row_step);
      _tile_loadd(6, bytes, kLine);
    }
    if constexpr (kPhase == 1) {
      _tile_dpbssd(0, 4, 6);
      _tile_zero(1);
    }
    if constexpr (kPhase == 2) {
      if constexpr (kBlocks) _tile_loadd(5, values + kUnit, row_step);
      _tile_loadd(7, bytes + (kBlocks ? kUnit * kColumns : kGroupBytes), kLine);
    }
    if constexpr (kPhase == 3) {
      if constexpr (kBlocks) _tile_dpbssd(1, 5, 7);
      else _tile_dpbssd(1, 4, 7);
    }
  }
};
using TwoBlocks = TwoProducts<true>;
using TwoDigits = TwoProducts<false>;

struct ThreeDigits {
  static constexpr int kTiles = 3;
  template <int kPhase>
  CARRYALL_INLINE static void store(int32_t* products) {
    if constexpr (kPhase == 0) _tile_stored(0, products, kLine);
    if constexpr (kPhase == 1) _tile_stored(1, products + kProducts, kLine);
    if constexpr (kPhase == 2) _tile_stored(2, products + 2 * kProducts, kLine);
  }
  template <int kPhase>
  CARRYALL_INLINE static void multiply(const int8_t* values, int64_t row_step, const int8_t* bytes, int64_t) {
    if constexpr (kPhase == 0) {
      _tile_zero(0);
      _tile_loadd(4, values, row_step);
      _tile_loadd(5, bytes, kLine);
    }
    if constexpr (kPhase == 1) {
      _tile_dpbssd(0, 4, 5);
      _tile_zero(1);
      _tile_loadd(6, bytes + kGroupBytes, kLine);
    }
    if constexpr (kPhase == 2) {
      _tile_dpbssd(1, 4, 6);
      _tile_zero(2);
      _tile_loadd(7, bytes + 2 * kGroupBytes, kLine);
    }
    if constexpr (kPhase == 3) _tile_dpbssd(2, 4, 7);
  }
};

// The operands of steps one after another: of a tile, of all tiles, of all strips of 16 rows.
class Operands {
 public:
  explicit Operands(const Panel& p)
      : p_(p), row_step_(p.rows->step), step_(p.step), row_(p.first_row),
        steps_((p.last_row - p.first_row + kGroup - 1) / kGroup * p.tiles * (p.last - p.first)) {
    begin_tile();
  }

  // Stores products of the step before, and computes those of the next step, if there is one.
  template <class Step, int kPhase>
  CARRYALL_INLINE void multiply(int32_t* products) {
    Step::template store<kPhase>(products);
    if (steps_ <= 0) return;
    Step::template multiply<kPhase>(values_, row_step_, bytes_, smaller(step_, left_));
    if constexpr (kPhase == kPhases - 1) next();
  }

 private:
  CARRYALL_INLINE void next() {
    steps_--;
    values_ += step_;
    bytes_ += p_.step_bytes;
    left_ -= step_;
    if (left_ <= 0) next_tile();
  }
  CARRYALL_INLINE void next_tile() {
    if (++tile_ == p_.tiles) {
      tile_ = 0;
      row_ += kGroup;
    }
    begin_tile();
  }
  CARRYALL_INLINE void begin_tile() {
    values_ = p_.rows->values + row_ * row_step_ + p_.first * step_;
    bytes_ = p_.bytes + tile_ * p_.tile_bytes;
    left_ = p_.inputs;
  }

  const Panel& p_;
  const int64_t row_step_, step_;
  const int8_t *values_, *bytes_;
  int64_t left_, row_, steps_, tile_ = 0;
};

// The first `count` lanes, of at most 16.
CARRYALL_INLINE __mmask16 first_of(int64_t count) { return static_cast<__mmask16>((1 << smaller(count, kColumns)) - 1); }

CARRYALL_INLINE void store_numbers(float* to, __m512i integers) { _mm512_store_ps(to, _mm512_cvtepi32_ps(integers)); }
CARRYALL_INLINE void store_numbers(int32_t* to, __m512i integers) { _mm512_store_si512(to, integers); }

// Scales and sums of 16 rows, one row after the other. `Number` is that of sums.
template <class Number>
struct Group {
  alignas(kLine) float scales[kGroup * kRowStep];  // of each share
  alignas(kLine) Number sums[kGroup * kRowStep];   // of each block; integers below 2^24

  // `share`: steps with one scale; `summed`: whether the sums of activations are read.
  void read(const Panel& p, int64_t row, int64_t share, bool summed) {
    const Rows& from = *p.rows;
    const int64_t begin = p.first / share, end = (p.last + share - 1) / share, blocks = p.step / p.weights->block;
    for (int64_t r = 0; r < kGroup; r++) {
      const float* of_row = from.scales + (row + r) * from.shares;
      for (int64_t s = begin; s < end; s += kColumns)
        _mm512_store_ps(scales + r * kRowStep + s - begin, _mm512_maskz_loadu_ps(first_of(end - s), of_row + s));
    }
    for (int64_t r = 0; summed && r < kGroup; r++) {
      const int32_t* of_row = from.sums + (row + r) * from.blocks;
      for (int64_t b = p.first * blocks, to = r * kRowStep; b < p.last * blocks; b += kColumns, to += kColumns)
        store_numbers(sums + to, _mm512_maskz_loadu_epi32(first_of(p.last * blocks - b), of_row + b));
    }
  }
};

// What the addition of a step reads.
template <class Number>
struct Addend {
  const float* stored;    // scales of the columns, then minima
  const uint8_t* points;  // zero points, or nullptr
  const float* scales;    // of the rows
  const Number* sums;

  CARRYALL_INLINE void next(int64_t stored_step) {
    stored = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(stored) + stored_step);
    points += kColumns;
    sums++;
  }
};

// Adds the products with one step to `added`: to the sum over the steps that share scales of the rows, if they do, else,
// multiplied by them, to the results.
template <bool kShared, bool kInexact, bool kMinima, int kPhase, class Number>
CARRYALL_INLINE void add_step(const Addend<Number>& from, bool zero_points, const int32_t* products, __m512 (&added)[kGroup]) {
  const __m512 scale = _mm512_loadu_ps(from.stored), minima = kMinima ? _mm512_loadu_ps(from.stored + kColumns) : scale;
  __m512i less = _mm512_set1_epi32(128);  // products with unpacked weights of 8 bits are relative to 128
  if (kInexact && zero_points) {
    const __m128i points = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.points));
    less = _mm512_and_si512(_mm512_sub_epi32(less, _mm512_cvtepu8_epi32(points)), _mm512_set1_epi32(0xffff));
  }
#pragma GCC unroll 16
  for (int r = kPhase * kGroup / kPhases; r < (kPhase + 1) * kGroup / kPhases; r++) {
    __m512i product = _mm512_load_si512(products + r * kColumns);
    // The sum of a block fits into the low 16 bits, as does `less`, whose high ones are 0.
    if (kInexact) product = _mm512_dpwssd_epi32(product, less, _mm512_set1_epi32(static_cast<int>(from.sums[r * kRowStep])));
    const __m512 start = kShared ? added[r] : _mm512_setzero_ps();
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, start);
    if (kMinima) sum = _mm512_fmadd_ps(minima, _mm512_set1_ps(static_cast<float>(from.sums[r * kRowStep])), sum);
    added[r] = kShared ? sum : _mm512_fmadd_ps(sum, _mm512_set1_ps(from.scales[r * kRowStep]), added[r]);
  }
}

// Sums over steps which scale products in floats, or share the scales of rows.
template <bool kShared, bool kInexact, bool kMinima>
class BlockSums {
  using Number = std::conditional_t<kInexact, int32_t, float>;

 public:
  // Where the sums are in a tile.
  struct Place {
    Addend<Number> from;
    int64_t open;  // steps until rows have another scale
  };

  explicit BlockSums(const Panel& p)
      : p_(p), share_(kShared ? p.rows->share : 1), zero_points_(p.weights->offsets == Offsets::zero_points) {}

  void read(int64_t row) { group_.read(p_, row, share_, kInexact || kMinima); }

  // `sums` are the results so far.
  CARRYALL_INLINE Place begin(int64_t tile, __m512 (&sums)[kGroup]) {
    const Weights& w = *p_.weights;
    const uint8_t* points = p_.data + tile * w.tile_bytes() + w.points() + p_.first * kColumns;
#pragma GCC unroll 16
    for (int r = 0; kShared && r < kGroup; r++) {
      _mm512_store_ps(results_ + r * kColumns, sums[r]);
      sums[r] = _mm512_setzero_ps();
    }
    return {{reinterpret_cast<const float*>(p_.factors + tile * p_.factor_tile), points, group_.scales, group_.sums}, share_};
  }

  template <int kPhase>
  CARRYALL_INLINE void add(Place& place, const int32_t* products, __m512 (&sums)[kGroup]) {
    add_step<kShared, kInexact, kMinima, kPhase>(place.from, zero_points_, products, sums);
    if constexpr (kPhase == kPhases - 1) next(place, sums);
  }

  CARRYALL_INLINE void end(Place& place, __m512 (&sums)[kGroup]) {
    if (!kShared) return;
    if (place.open < share_) scale(place, sums);
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++) sums[r] = _mm512_load_ps(results_ + r * kColumns);
  }

 private:
  CARRYALL_INLINE void next(Place& place, __m512 (&sums)[kGroup]) {
    place.from.next(p_.factor_step);
    if (--place.open > 0) return;
    if (kShared) scale(place, sums);
    place.from.scales++;
    place.open = share_;
  }

  // Adds the sums over steps, multiplied by the scales of the rows, to the results, and begins new sums.
  CARRYALL_INLINE void scale(const Place& place, __m512 (&sums)[kGroup]) {
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++) {
      float* result = results_ + r * kColumns;
      _mm512_store_ps(result, _mm512_fmadd_ps(sums[r], _mm512_set1_ps(place.from.scales[r * kRowStep]), _mm512_load_ps(result)));
      sums[r] = _mm512_setzero_ps();
    }
  }

  const Panel& p_;
  const int64_t share_;
  const bool zero_points_;
  Group<Number> group_;
  alignas(kLine) float results_[kGroup * kColumns];
};

// Sums over groups of 64 inputs whose blocks have integers as factors: K-quants, IQ4_XS, IQ3_XXS and IQ3_S. The factors of a step are those that
// amx_stored.h writes.
template <class Step, int kMinima>  // of a group
class GroupSums {
  static constexpr int kOfMinima = std::is_same_v<Step, TwoBlocks> ? 3 : 1;  // the factor

 public:
  // Where the sums are in a tile: factors of the columns, scales and sums of the rows.
  struct Place {
    const uint8_t* factors;
    const float *scales, *sums;

    CARRYALL_INLINE __m512 factor(int index) const { return _mm512_load_ps(factors + index * kLine); }
  };

  explicit GroupSums(const Panel& p) : p_(p) {}

  void read(int64_t row) { group_.read(p_, row, 1, kMinima > 0); }

  CARRYALL_INLINE Place begin(int64_t tile, __m512 (&)[kGroup]) {
    return {p_.factors + tile * p_.factor_tile, group_.scales, group_.sums};
  }

  template <int kPhase>
  CARRYALL_INLINE void add(Place& place, const int32_t* products, __m512 (&sums)[kGroup]) {
    const __m512 scale = place.factor(0), of_minima = place.factor(kMinima > 0 ? kOfMinima : 0);
#pragma GCC unroll 16
    for (int r = kPhase * kGroup / kPhases; r < (kPhase + 1) * kGroup / kPhases; r++) {
      __m512 sum = _mm512_mul_ps(total(place, products + r * kColumns), scale);
      if constexpr (kMinima > 0) {
        const float* of_row = place.sums + r * kRowStep;
        __m512 subtracted = _mm512_mul_ps(place.factor(kOfMinima + 1), _mm512_set1_ps(of_row[0]));
        for (int j = 1; j < kMinima; j++) subtracted = _mm512_fmadd_ps(place.factor(kOfMinima + 1 + j), _mm512_set1_ps(of_row[j]), subtracted);
        sum = _mm512_fnmadd_ps(subtracted, of_minima, sum);
      }
      sums[r] = _mm512_fmadd_ps(sum, _mm512_set1_ps(place.scales[r * kRowStep]), sums[r]);
    }
    if constexpr (kPhase < kPhases - 1) return;
    place.factors += p_.factor_step;
    place.scales++;
    place.sums += kMinima;
  }

  CARRYALL_INLINE void end(Place&, __m512 (&)[kGroup]) {}

 private:
  // The integer of a step from its products, rounded once. A product of a block and its scale is less than 2^24, so exact in a float.
  CARRYALL_INLINE static __m512 total(const Place& place, const int32_t* products) {
    const auto product = [&](int index) { return _mm512_load_si512(products + index * kProducts); };
    if constexpr (std::is_same_v<Step, TwoBlocks>) {
      const __m512 first = _mm512_mul_ps(_mm512_cvtepi32_ps(product(0)), place.factor(1));
      return _mm512_fmadd_ps(_mm512_cvtepi32_ps(product(1)), place.factor(2), first);
    } else if constexpr (std::is_same_v<Step, OneLine>) {
      return _mm512_cvtepi32_ps(product(0));
    } else if constexpr (std::is_same_v<Step, TwoDigits>) {
      return _mm512_cvtepi32_ps(with_digit(product(0), product(1)));
    } else {
      return _mm512_cvtepi32_ps(with_digit(product(0), with_digit(product(1), product(2))));
    }
  }
  CARRYALL_INLINE static __m512i with_digit(__m512i low, __m512i high) { return _mm512_add_epi32(low, _mm512_slli_epi32(high, kDigitBits)); }

  const Panel& p_;
  Group<float> group_;
};

// The results of a tile and 16 rows so far: the bias, or the sums over the panels of inputs before.
CARRYALL_INLINE void begin_results(const Panel& p, int64_t tile, int64_t columns, const float* sums, __m512 (&added)[kGroup]) {
  if (p.first == 0) {
    const __m512 bias = p.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(first_of(columns), p.bias + tile * kColumns);
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++) added[r] = bias;
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++) added[r] = _mm512_load_ps(sums + r * kColumns);
  }
}

CARRYALL_INLINE void end_results(const Panel& p, int64_t row, int64_t tile, int64_t columns, float* sums, const __m512 (&added)[kGroup]) {
  const int64_t rows = p.last_row - row;
  const bool whole = rows >= kGroup && columns >= kColumns;
  if (!p.ends || !whole) {
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++) _mm512_store_ps(sums + r * kColumns, added[r]);
  }
  if (!p.ends) return;
  float* y = p.y.at(row, tile * kColumns);
  if (whole && p.streams) {
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++, y += p.y.step) _mm512_stream_ps(y, added[r]);
  } else if (whole) {
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++, y += p.y.step) _mm512_storeu_ps(y, added[r]);
  } else {
    for (int64_t r = 0; r < smaller(rows, kGroup); r++, y += p.y.step)
      _mm512_mask_storeu_ps(y, first_of(columns), _mm512_load_ps(sums + r * kColumns));
  }
}

template <class Step, class Sums>
void add_panel(const Panel& p) {
  constexpr int kAhead = kEarly<Step>;
  alignas(kLine) int32_t products[kAhead][Step::kTiles * kProducts];
  Sums sums(p);
  const int64_t count = p.last - p.first;
  Operands operands(p);
  const auto multiply = [&](int32_t* before) __attribute__((always_inline)) {
    stored::each<kPhases>([&](auto phase) __attribute__((always_inline)) { operands.multiply<Step, decltype(phase)::value>(before); });
  };
  for (int i = 0; i < kAhead; i++) multiply(products[i == 0 ? kAhead - 1 : i - 1]);
  Ahead ahead = *p.ahead;
  int turn = 0;
  float* partial = p.partial;
  for (int64_t row = p.first_row; row < p.last_row; row += kGroup) {
    sums.read(row);
    for (int64_t tile = 0; tile < p.tiles; tile++, partial += kProducts) {
      const int64_t columns = p.columns - tile * kColumns;
      __m512 added[kGroup];
      begin_results(p, tile, columns, partial, added);
      auto place = sums.begin(tile, added);
      for (int64_t step = 0; step < count; step++) {
        ahead.fetch();
        int32_t* before = products[turn == 0 ? kAhead - 1 : turn - 1];
        stored::each<kPhases>([&](auto phase) __attribute__((always_inline)) {
          operands.multiply<Step, decltype(phase)::value>(before);
          sums.template add<decltype(phase)::value>(place, products[turn], added);
        });
        turn = turn + 1 < kAhead ? turn + 1 : 0;
      }
      sums.end(place, added);
      end_results(p, row, tile, columns, partial, added);
    }
  }
  *p.ahead = ahead;
}

template <class Step, bool kInexact>
void add_blocks(const Panel& p) {
  const bool minima = p.weights->offsets == Offsets::minima || p.weights->offsets == Offsets::half_minima;
  if constexpr (std::is_same_v<Step, OneLine> && !kInexact)
    if (p.rows->share * p.weights->block > p.step)
      return minima ? add_panel<Step, BlockSums<true, false, true>>(p) : add_panel<Step, BlockSums<true, false, false>>(p);
  return minima ? add_panel<Step, BlockSums<false, kInexact, true>>(p)
                : add_panel<Step, BlockSums<false, kInexact, false>>(p);
}

inline void multiply_panel(const Panel& panel) {
  const Weights& w = *panel.weights;
  const bool one = panel.step <= kLine, inexact = w.bits == 8 && w.offsets != Offsets::middle && !w.halves();
  if (w.halves() && w.group > 0) {
    if (w.coded()) add_panel<TwoBlocks, GroupSums<TwoBlocks, 0>>(panel);
    else if (w.bits == 2) add_panel<OneLine, GroupSums<OneLine, 4>>(panel);
    else if (w.bits == 3) add_panel<TwoDigits, GroupSums<TwoDigits, 0>>(panel);
    else if (w.bits == 6) add_panel<ThreeDigits, GroupSums<ThreeDigits, 0>>(panel);
    else add_panel<TwoBlocks, GroupSums<TwoBlocks, 2>>(panel);
  } else if (inexact) {
    one ? add_blocks<OneLine, true>(panel) : add_blocks<Lines, true>(panel);
  } else {
    one ? add_blocks<OneLine, false>(panel) : add_blocks<Lines, false>(panel);
  }
}

}  // namespace
}  // namespace carryall
