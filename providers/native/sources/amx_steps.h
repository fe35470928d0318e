// Products on AMX, step by step: of 16 rows by a tile at a time, whose products with a step of inputs leave the registers to be
// scaled and added while those of the next steps are computed.
#pragma once
#include <type_traits>

#include "amx_panel.h"
#include "amx_stored.h"

namespace carryall {
namespace {

// Steps whose products are computed before the first of them are added, of many rows: a load waits until what `tilestored` has
// written is in the cache, since it is not forwarded. For few rows one takes less time.
constexpr int kEarlyOfMany = 3, kEarlyOfFew = 1;
constexpr int64_t kProducts = kGroup * kColumns;  // of a tile register
constexpr int64_t kRowStep = kUnpacked / (16 * kColumns) + 16;  // at least the blocks of a panel; no power of two

// How the `kTiles` products [16, 16] of a step come about. `values` are those of 16 rows, `bytes` the step's weights.
// Between its phases rows of an earlier step are added: registers of tiles and of AVX-512 then compute at the same time, because
// the processor does not look far enough ahead to find one behind all of the other. A step that is short gains nothing by it.
struct OneLine {  // of at most 64 inputs
  static constexpr int kTiles = 1, kPhases = 1;
  template <int kPhase>
  CARRYALL_INLINE static void run(const int8_t* values, int64_t width, const int8_t* bytes, int64_t, int32_t* products) {
    _tile_zero(0);
    _tile_loadd(4, values, width);
    _tile_loadd(6, bytes, kLine);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, products, kLine);
  }
};

struct Lines {  // of 64 inputs
  static constexpr int kTiles = 1, kPhases = 1;
  template <int kPhase>
  CARRYALL_INLINE static void run(const int8_t* values, int64_t width, const int8_t* bytes, int64_t inputs, int32_t* products) {
    _tile_zero(0);
    for (int64_t k = 0; k < inputs; k += kLine) {
      _tile_loadd(4, values + k, width);
      _tile_loadd(6, bytes + k * kColumns, kLine);
      _tile_dpbssd(0, 4, 6);
    }
    _tile_stored(0, products, kLine);
  }
};

// Two blocks of 32 inputs, which have scales of their own, or two digits of weights of a group (amx_stored.h).
template <bool kBlocks>
struct TwoProducts {
  static constexpr int kTiles = 2, kPhases = 4;
  template <int kPhase>
  CARRYALL_INLINE static void run(const int8_t* values, int64_t width, const int8_t* bytes, int64_t, int32_t* products) {
    if constexpr (kPhase == 0) {
      _tile_zero(0);
      _tile_loadd(4, values, width);
      _tile_loadd(6, bytes, kLine);
    }
    if constexpr (kPhase == 1) {
      _tile_dpbssd(0, 4, 6);
      _tile_zero(1);
      if constexpr (kBlocks) _tile_loadd(5, values + kUnit, width);
      _tile_loadd(7, bytes + (kBlocks ? kUnit * kColumns : kGroupBytes), kLine);
    }
    if constexpr (kPhase == 2) {
      if constexpr (kBlocks) _tile_dpbssd(1, 5, 7);
      else _tile_dpbssd(1, 4, 7);
      _tile_stored(0, products, kLine);
    }
    if constexpr (kPhase == 3) _tile_stored(1, products + kProducts, kLine);
  }
};
using TwoBlocks = TwoProducts<true>;
using TwoDigits = TwoProducts<false>;

struct ThreeDigits {
  static constexpr int kTiles = 3, kPhases = 4;
  template <int kPhase>
  CARRYALL_INLINE static void run(const int8_t* values, int64_t width, const int8_t* bytes, int64_t, int32_t* products) {
    if constexpr (kPhase == 0) {
      _tile_zero(0);
      _tile_loadd(4, values, width);
      _tile_loadd(5, bytes, kLine);
      _tile_dpbssd(0, 4, 5);
    }
    if constexpr (kPhase == 1) {
      _tile_zero(1);
      _tile_loadd(6, bytes + kGroupBytes, kLine);
      _tile_dpbssd(1, 4, 6);
      _tile_stored(0, products, kLine);
    }
    if constexpr (kPhase == 2) {
      _tile_zero(2);
      _tile_loadd(7, bytes + 2 * kGroupBytes, kLine);
      _tile_dpbssd(2, 4, 7);
      _tile_stored(1, products + kProducts, kLine);
    }
    if constexpr (kPhase == 3) _tile_stored(2, products + 2 * kProducts, kLine);
  }
};

// The operands of steps one after another: of a tile, of all tiles, of all strips of 16 rows.
class Operands {
 public:
  explicit Operands(const Panel& p)
      : p_(p), width_(p.rows->width), step_(p.step), row_(p.first_row),
        steps_((p.last_row - p.first_row + kGroup - 1) / kGroup * p.tiles * (p.last - p.first)) {
    begin_tile();
  }

  // Computes a phase of the products of the next step, if there is one.
  template <class Step, int kPhase>
  CARRYALL_INLINE void multiply(int32_t* products) {
    if (steps_ <= 0) return;
    Step::template run<kPhase>(values_, width_, bytes_, smaller(step_, left_), products);
    if constexpr (kPhase == Step::kPhases - 1) next();
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
    values_ = p_.rows->values + row_ * width_ + p_.first * step_;
    bytes_ = p_.bytes + tile_ * p_.tile_bytes;
    left_ = p_.inputs;
  }

  const Panel& p_;
  const int64_t width_, step_;
  const int8_t *values_, *bytes_;
  int64_t left_, row_, steps_, tile_ = 0;
};

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
      memcpy(scales + r * kRowStep, from.scales + (row + r) * from.shares + begin, static_cast<size_t>(end - begin) * sizeof(float));
      if (!summed) continue;
      const int32_t* of_row = from.sums + (row + r) * from.blocks;
      for (int64_t b = p.first * blocks; b < p.last * blocks; b++) sums[r * kRowStep + b - p.first * blocks] = static_cast<Number>(of_row[b]);
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
template <bool kShared, bool kInexact, bool kMinima, class Number>
CARRYALL_INLINE void add_step(const Addend<Number>& from, bool zero_points, const int32_t* products, __m512 (&added)[kGroup]) {
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
    add_step<kShared, kInexact, kMinima>(place.from, zero_points_, products, sums);
    next(place, sums);
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
    for (int r = kPhase * kGroup / Step::kPhases; r < (kPhase + 1) * kGroup / Step::kPhases; r++) {
      __m512 sum = _mm512_mul_ps(total(place, products + r * kColumns), scale);
      if constexpr (kMinima > 0) {
        const float* of_row = place.sums + r * kRowStep;
        __m512 subtracted = _mm512_mul_ps(place.factor(kOfMinima + 1), _mm512_set1_ps(of_row[0]));
        for (int j = 1; j < kMinima; j++) subtracted = _mm512_fmadd_ps(place.factor(kOfMinima + 1 + j), _mm512_set1_ps(of_row[j]), subtracted);
        sum = _mm512_fnmadd_ps(subtracted, of_minima, sum);
      }
      sums[r] = _mm512_fmadd_ps(sum, _mm512_set1_ps(place.scales[r * kRowStep]), sums[r]);
    }
    if constexpr (kPhase < Step::kPhases - 1) return;
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

template <int kEarly, class Step, class Sums>
void add_panel(const Panel& p) {
  alignas(kLine) int32_t products[kEarly + 1][Step::kTiles * kGroup * kColumns];
  Sums sums(p);
  const int64_t count = p.last - p.first;
  Operands operands(p);
  int turn = 0;
  for (; turn < kEarly; turn++)
    stored::each<Step::kPhases>([&](auto phase) __attribute__((always_inline)) { operands.multiply<Step, decltype(phase)::value>(products[turn]); });
  for (int64_t row = p.first_row; row < p.last_row; row += kGroup) {
    const int64_t rows = p.last_row - row < kGroup ? p.last_row - row : kGroup;
    sums.read(row);
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
        added[r] = start;
      }
      auto place = sums.begin(tile, added);
      for (int64_t step = 0; step < count; step++) {
        p.ahead->fetch();
        int32_t* later = products[turn];
        turn = turn < kEarly ? turn + 1 : 0;
        stored::each<Step::kPhases>([&](auto phase) __attribute__((always_inline)) {
          operands.multiply<Step, decltype(phase)::value>(later);
          sums.template add<decltype(phase)::value>(place, products[turn], added);
        });
      }
      sums.end(place, added);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++) _mm512_mask_storeu_ps(y.at(r, 0), valid_in(r), added[r]);
    }
  }
}

template <int kEarly, class Step, bool kInexact>
void add_blocks(const Panel& p) {
  const bool minima = p.weights->offsets == Offsets::minima || p.weights->offsets == Offsets::half_minima;
  if constexpr (std::is_same_v<Step, OneLine> && !kInexact)
    if (p.rows->share * p.weights->block > p.step)
      return minima ? add_panel<kEarly, Step, BlockSums<true, false, true>>(p) : add_panel<kEarly, Step, BlockSums<true, false, false>>(p);
  return minima ? add_panel<kEarly, Step, BlockSums<false, kInexact, true>>(p)
                : add_panel<kEarly, Step, BlockSums<false, kInexact, false>>(p);
}

template <int kEarly>
void multiply_early(const Panel& panel) {
  const Weights& w = *panel.weights;
  const bool one = panel.step <= kLine, inexact = w.bits == 8 && w.offsets != Offsets::middle && !w.halves();
  if (w.halves() && w.group > 0) {
    if (w.coded()) add_panel<kEarly, TwoBlocks, GroupSums<TwoBlocks, 0>>(panel);
    else if (w.bits == 2) add_panel<kEarly, OneLine, GroupSums<OneLine, 4>>(panel);
    else if (w.bits == 3) add_panel<kEarly, TwoDigits, GroupSums<TwoDigits, 0>>(panel);
    else if (w.bits == 6) add_panel<kEarly, ThreeDigits, GroupSums<ThreeDigits, 0>>(panel);
    else add_panel<kEarly, TwoBlocks, GroupSums<TwoBlocks, 2>>(panel);
  } else if (inexact) {
    one ? add_blocks<kEarly, OneLine, true>(panel) : add_blocks<kEarly, Lines, true>(panel);
  } else {
    one ? add_blocks<kEarly, OneLine, false>(panel) : add_blocks<kEarly, Lines, false>(panel);
  }
}

inline void multiply_panel(const Panel& panel) {
  const bool many = panel.last_row - panel.first_row > kFewStrips * kGroup;
  many ? multiply_early<kEarlyOfMany>(panel) : multiply_early<kEarlyOfFew>(panel);
}

}  // namespace
}  // namespace carryall
