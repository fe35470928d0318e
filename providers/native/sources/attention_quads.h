// Attention on an int8 cache, in integers (attention.h). Queries, and weights of the softmax times the scales of values,
// are rounded to 16 bits, with a scale for each query; products of 16 by 8 bits are summed exactly in 32 bits. So the
// results are those of any instruction set, bit by bit, and few bytes of the cache are read. Queries of 8 bits are multiples
// of 256, whose low bytes are zeros; an engine may leave these out.
//
// Queries and keys go through a Walsh-Hadamard transform (hadamard.h) after the rotary embedding. It leaves their products as
// they are and spreads elements that are large in every key, which else take the resolution of the others.
//
// An `Engine` has
//   kTogether, kColumns   rows and tiles of 16 columns that it multiplies at a time
//   kSignedValues         whether it subtracts kMiddle from values by itself: then it reads no offsets of weights
//   kRound                a constant that rounds a float to an integer when it is added
//   store(x, row, i)      stores 16 integers, given as floats plus kRound, as the elements of a row from i on
//   multiply<fetch, rows, columns>(a, first, b, later, steps, y, y_step)
//                         rows by columns from `first` on: y[m][c] = a.offsets[m] + sum of a * b, with b.kScaled times
//                         a.scales[m], where b(column, step) is a tile of 16 columns of 4 quads, and later(column, step)
//                         one read soon
//   kByteColumns          tiles at a time of rows of 8 bits, which `multiply_bytes` multiplies; 0 if it has no such function.
//                         With it, sums of such rows are a 256th
// `OfRows` makes of it what `QuadRun` computes with:
//   kRows                 queries whose scores are in memory at a time
//   kWeightRound, store_weight(x, row, i)   as kRound and `store`, of weights, which are not negative
//   scores_of(y)          16 scores that `multiply_keys` has written
//   read_values(values, groups, columns)    is called for each part before `multiply_values`
//   clear_around(row, groups)               writes zeros to weights of other groups that `multiply_values` reads
//   multiply_keys, multiply_values(a, count, columns, b, later, steps, y, y_step)   all rows by all columns
#pragma once
#include <cmath>
#include <type_traits>

#include "attention_parts.h"
#include "float_products.h"
#include "hadamard.h"
#include "recurrent_rows.h"

namespace carryall {
namespace {

constexpr int64_t kQuad = 4;                     // elements or positions whose bytes lie side by side
constexpr int64_t kQuadTile = 256;               // bytes of 16 columns by 4 quads
constexpr int64_t kQuadScales = 64;              // bytes of the scales before the tiles of a group
constexpr int64_t kPiece = 64;                   // elements of a row that an engine stores together
constexpr int32_t kMiddle = 128;                 // a byte of the cache is a value plus this
constexpr float kMostByte = 127.0f;
constexpr float kMostSixteen = 127.0f * 256.0f;  // so that the high byte of a rounded integer is at most 127
constexpr float kLeast = 1e-32f;                 // kMostSixteen / kLeast is finite
constexpr float kUlp = 1.1920929e-7f;            // of 1

// Rows of 16-bit integers, as the engine stores them in pieces of 64 elements; offsets are -kMiddle times the sum of a row.
struct Sixteens {
  const uint8_t* bytes;
  int64_t step;  // bytes from one row to the next
  const int32_t* offsets;
  const float* scales;
  bool high;  // whether all low bytes are zeros

  CARRYALL_INLINE Sixteens from(int64_t row) const { return {bytes + row * step, step, offsets + row, scales + row, high}; }
};

// 2^x for x <= 1 with an error of 2.7e-6, a tenth of a step of the rounding to 16 bits; below -120 about 2^-120. Keeps a NaN.
// Several x side by side, so that an operation does not wait for the one before it.
template <int count, class V>
CARRYALL_INLINE void raise_2(V (&x)[count]) {
  V f[count], p[count], whole[count];
  const auto each = [&](const auto& work) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) work(i);
  };
  each([&](int i) __attribute__((always_inline)) { x[i] = maximum(V::all(-120.0f), x[i]); });
  each([&](int i) __attribute__((always_inline)) { f[i] = V::fraction(x[i], whole + i); });
  each([&](int i) __attribute__((always_inline)) { p[i] = fused(V::all(9.570102207362652e-3f), f[i], V::all(5.591785907745361e-2f)); });
  each([&](int i) __attribute__((always_inline)) { p[i] = fused(p[i], f[i], V::all(2.40247443318367e-1f)); });
  each([&](int i) __attribute__((always_inline)) { p[i] = fused(p[i], f[i], V::all(6.931217908859253e-1f)); });
  each([&](int i) __attribute__((always_inline)) { p[i] = fused(p[i], f[i], V::all(9.999992847442627e-1f)); });
  each([&](int i) __attribute__((always_inline)) { x[i] = V::times_power_of_2(p[i], whole[i]); });
}

// Bytes of a row of 16-bit integers.
constexpr int64_t row_bytes(int64_t elements) { return (elements + kPiece - 1) / kPiece * kPiece * 2; }

// 0 for NaN: then the result is NaN whatever the integers are.
inline int32_t offset_of(float sum) { return sum == sum ? -kMiddle * static_cast<int32_t>(sum) : 0; }

struct QuadMemory {
  static constexpr int64_t kItem = 96, kRows = 48;
  alignas(64) uint8_t queries[kItem * kLargestHead * 2];
  // Of scores, and of weights, which take the place of the scores of the row before them: fewer bytes in the first-level cache.
  alignas(64) float rows[(kRows + 1) * kPartPositions];
  alignas(64) float results[kItem * kLargestHead];
  alignas(64) float next[kRows * kLargestHead];
  alignas(64) float key_scales[kPartPositions], value_scales[kPartPositions];
  alignas(64) float largest_scales[kPartPositions], wrong_scales[kPartPositions];  // of values of the groups before
  alignas(64) float factors[kPartPositions];  // scales of the values, divided by that of the rounded weights
  float* scores(int64_t row) { return rows + (row + 1) * kPartPositions; }
  uint8_t* weights(int64_t row) { return reinterpret_cast<uint8_t*>(rows) + row * kWeightStep; }

  static constexpr int64_t kWeightStep = kPartPositions * 4;
  int32_t query_offsets[kItem], weight_offsets[kRows];
  float query_scales[kItem], weight_scales[kRows];
  float score_scales[kRows], subtracted[kRows];
  float most[kItem + kRows], sum[kItem + kRows];
};

// Calls `work(group, only_seen, count)` for groups, of which a query sees the positions `seen`; only_seen(x, other) puts `other` in
// place of others' lanes. Most groups are seen whole; `count` of these are computed side by side.
template <class V, class Work>
inline void each_group(Range seen, Range groups, const Work& work) {
  const Range whole = {larger(groups.first, (seen.first + 15) / 16), smaller(groups.last, seen.last / 16)};
  int64_t g = groups.first;
  const auto only = [&](V x, float other) { return only_lanes(x, seen.first - 16 * g, seen.last - 16 * g, other); };
  const auto all = [](V x, float) { return x; };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, V::kGroups> several;
  for (; g < smaller(whole.first, groups.last); g++) work(g, only, one);
  for (; V::kGroups > 1 && g + V::kGroups <= whole.last; g += V::kGroups) work(g, all, several);
  for (; g < whole.last; g++) work(g, all, one);
  for (; g < groups.last; g++) work(g, only, one);
}

// Tiles of the keys and of the values of some groups.
struct Keys {
  static constexpr bool kScaled = false;
  const uint8_t* const* groups;
  CARRYALL_INLINE const uint8_t* operator()(int64_t group, int64_t step) const { return groups[group] + step * kQuadTile; }
};
struct Values {
  static constexpr bool kScaled = true;
  const uint8_t* const* groups;
  CARRYALL_INLINE const uint8_t* operator()(int64_t column, int64_t group) const { return groups[group] + column * kQuadTile; }
};

// Calls `work(row, rows)` with the number of rows as a constant.
template <int kRows, class Work>
inline void with_rows(int64_t row, int64_t count, const Work& work) {
  if (count == kRows) return work(row, std::integral_constant<int, kRows>());
  if constexpr (kRows > 1) with_rows<kRows - 1>(row, count, work);
}

// The first rows wait for memory: they ask for what is read later.
template <class V, class Engine>
struct OfRows : Engine {
  static constexpr bool kSignedValues = false;
  static constexpr int64_t kRows = 48;
  static constexpr float kWeightRound = Engine::kRound;

  static void store_weight(const V& x, uint8_t* row, int64_t first) { Engine::store(x, row, first); }
  static V scores_of(const float* scores) { return V::load(scores); }
  static void read_values(const uint8_t* const*, Range, int64_t) {}
  static void clear_around(uint8_t*, Range) {}
  template <class... Rest>
  static void multiply_keys(Rest&&... rest) { multiply_all(rest...); }
  template <class... Rest>
  static void multiply_values(Rest&&... rest) { multiply_all(rest...); }

 private:
  template <class Operand, class Later>
  static void multiply_all(const Sixteens& a, int64_t count, int64_t columns, const Operand& b, const Later& later,
                           Range steps, float* y, int64_t y_step) {
    if (Engine::kByteColumns > 0 && a.high)
      multiply_rows<true>(a, count, columns, b, later, steps, y, y_step);
    else
      multiply_rows<false>(a, count, columns, b, later, steps, y, y_step);
  }

  template <bool kBytes, class Operand, class Later>
  static void multiply_rows(const Sixteens& a, int64_t count, int64_t columns, const Operand& b, const Later& later,
                            Range steps, float* y, int64_t y_step) {
    constexpr int kMost = kBytes && Engine::kByteColumns > 0 ? Engine::kByteColumns : Engine::kColumns;
    const int64_t groups = (count + Engine::kTogether - 1) / Engine::kTogether;
    for (int64_t c = 0; c < columns;) {
      const auto with_columns = [&](auto together) {
        constexpr int kColumns = decltype(together)::value;
        for (int64_t g = 0; g < groups; g++) {
          const int64_t row = count * g / groups;
          with_rows<Engine::kTogether>(row, count * (g + 1) / groups - row, [&](int64_t m, auto rows) {
            constexpr int kRows = decltype(rows)::value;
            float* to = y + m * y_step;
            if (g == 0)
              multiply_some<kBytes, true, kRows, kColumns>(a.from(m), c, b, later, steps, to, y_step);
            else
              multiply_some<kBytes, false, kRows, kColumns>(a.from(m), c, b, later, steps, to, y_step);
          });
        }
        c += kColumns;
      };
      if (c + kMost <= columns)
        with_columns(std::integral_constant<int, kMost>());
      else
        with_columns(std::integral_constant<int, 1>());
    }
  }

  template <bool kBytes, bool kFetch, int kRows, int kColumns, class... Rest>
  CARRYALL_INLINE static void multiply_some(const Rest&... rest) {
    if constexpr (kBytes && Engine::kByteColumns > 0)
      Engine::template multiply_bytes<kFetch, kRows, kColumns>(rest...);
    else
      Engine::template multiply<kFetch, kRows, kColumns>(rest...);
  }
};

// What one call of `attend` computes with.
template <class V, class Engine>
class QuadRun : public Part {
 public:
  QuadRun(const Attention& a, const AttentionItem& item, QuadMemory* memory) : Part(a, item, true), memory_(*memory) {}
  void read_queries();
  void read_part(int64_t part);
  // Computes the state of queries [first, first + count) of the item in this part.
  State attend(int64_t first, int64_t count);

 private:
  void read_scales(Range groups);
  void weigh_scales(Range seen, Range groups);
  void scale_scores(int64_t first, int64_t row, Range groups);
  void weigh(int64_t first, int64_t row, Range groups);

  // Of the weights of a query; those of the next one are the same if it sees the same positions.
  struct Scales {
    Range seen;
    float rounded;  // NaN if a scale of the values is
  };

  QuadMemory& memory_;
  Engine engine_;
  Scales scales_ = {};
  const uint8_t *keys_[kPartGroups], *values_[kPartGroups];  // tiles of the part
  const uint8_t* next_keys_[kPartGroups];                    // asked for while its values are multiplied
};

template <class V, class Engine>
void QuadRun<V, Engine>::read_queries() {
  const int64_t width = s_.width(), step = row_bytes(width);
  alignas(64) float x[kLargestHead];
  for (int64_t m = 0; m < item_.count; m++) {
    read_query<V>(m, s_.scale, x);
    memset(x + s_.size, 0, sizeof(float) * static_cast<size_t>(width - s_.size));
    spread<V>(x, width);
    const int32_t largest = largest_magnitude(x, width);
    const float most = float_of(static_cast<uint32_t>(largest));
    const bool finite = largest < 0x7f800000, zero = !finite || most < kLeast;
    memory_.query_scales[m] = !finite ? float_of(0x7fc00000u) : zero ? 0.0f : most * (kLog2e / kMostSixteen);
    const bool bytes = s_.rounds_queries;
    if (bytes && Engine::kByteColumns > 0) memory_.query_scales[m] *= 256.0f;
    const V inverse = V::all(zero ? 0.0f : (bytes ? kMostByte : kMostSixteen) / most), round = V::all(Engine::kRound);
    const V shift = V::all(kShift), high = V::all(256.0f);
    V sum = V::all(0.0f);
    for (int64_t i = 0; i < width; i += 16) {
      const V value = finite ? V::load(x + i) : V::all(0.0f);
      const V rounded = bytes ? fused(subtract(fused(value, inverse, shift), shift), high, round) : fused(value, inverse, round);
      sum = add(sum, subtract(rounded, round));
      Engine::store(rounded, memory_.queries + m * step, i);
    }
    memory_.query_offsets[m] = offset_of(sum_of(sum));
  }
}

template <class V, class Engine>
void QuadRun<V, Engine>::read_part(int64_t part) {
  base_ = part * kPartPositions;
  const Range range = seen_by(0, item_.count), groups = {range.first / 16, (range.last + 15) / 16};
  for (int64_t g = groups.first; g < groups.last; g++) {
    const int64_t position = base_ + kGroupPositions * g;
    const uint8_t* keys = a_.group(a_.keys, item_.row, item_.head, position);
    const uint8_t* values = a_.group(a_.values, item_.row, item_.head, position);
    memcpy(memory_.key_scales + 16 * g, keys, kQuadScales);
    fetch(values);
    keys_[g] = keys + kQuadScales;
    values_[g] = values + kQuadScales;
  }
  plan_fetches(groups, next_keys_);
  for (int64_t g = groups.first; g < groups.last; g++) fetch(next_keys_[g]);
  engine_.read_values(values_, groups, s_.width() / 16);
}

// Finds the largest scales of values of the groups up to each.
template <class V, class Engine>
void QuadRun<V, Engine>::read_scales(Range groups) {
  V largest = V::all(0.0f), wrong = largest;
  scales_.seen = {-1, -1};  // of the part before: no query sees that
  for (int64_t g = groups.first; g < groups.last; g++) {
    V::store(memory_.largest_scales + 16 * g, largest);
    V::store(memory_.wrong_scales + 16 * g, wrong);
    const V scales = V::load(reinterpret_cast<const float*>(values_[g] - kQuadScales));
    V::store(memory_.value_scales + 16 * g, scales);
    largest = maximum(largest, scales);
    wrong = fused(scales, V::all(0.0f), wrong);
  }
}

// Finds the scale of weights times scales of values of the positions that a query sees, and the factors of weights.
template <class V, class Engine>
void QuadRun<V, Engine>::weigh_scales(Range seen, Range groups) {
  V heaviest = V::all(0.0f), wrong = heaviest;
  int64_t g = groups.first;
  if (seen.first <= 16 * g && seen.last / 16 > g) {
    g = smaller(groups.last, seen.last / 16) - 1;
    heaviest = V::load(memory_.largest_scales + 16 * g);
    wrong = V::load(memory_.wrong_scales + 16 * g);
  }
  for (; g < groups.last; g++) {
    const V scales = V::load(memory_.value_scales + 16 * g);
    const V kept = only_lanes(scales, seen.first - 16 * g, seen.last - 16 * g, 0.0f);
    heaviest = maximum(heaviest, kept);
    wrong = fused(kept, V::all(0.0f), wrong);
  }
  const float bound = heaviest.largest();
  const bool zero = !(bound >= kLeast);
  scales_ = {seen, (zero ? 0.0f : bound / kMostSixteen) + sum_of(wrong)};
  const V inverse = V::all(zero ? 0.0f : kMostSixteen / bound);
  for (g = groups.first; g < groups.last; g++) {
    const V scales = V::load(memory_.value_scales + 16 * g);
    V::store(memory_.factors + 16 * g, multiply(only_lanes(scales, seen.first - 16 * g, seen.last - 16 * g, 0.0f), inverse));
  }
}

// Multiplies the scores of query `first + row` by the scales of keys, unless it sees them otherwise, and finds what is subtracted
// from their products with the scale of the query: an integer that none of these exceeds, rounded or not.
template <class V, class Engine>
void QuadRun<V, Engine>::scale_scores(int64_t first, int64_t row, Range groups) {
  const Range range = seen_by(first + row, 1);
  float* scores = memory_.scores(row);
  const float slope = slope_of(a_, item_, first + row);
  const int64_t own = past_ + (item_.first + first + row) / s_.shared() - base_;
  V largest = V::all(kLowest);
  const auto find_largest = [&](const auto& changed) {
    each_group<V>(range, groups, [&](int64_t begin, const auto& only_seen, auto count) {
      for (int64_t g = begin; g < begin + count; g++) {
        const V score = multiply(Engine::scores_of(scores + 16 * g), V::load(memory_.key_scales + 16 * g));
        const V x = only_seen(changed(score, g), kLowest);
        V::store(scores + 16 * g, x);
        largest = maximum(largest, x);
      }
    });
  };
  float factor = memory_.query_scales[first + row];
  if (s_.softcap > 0 || slope != 0) {
    const V scale = V::all(factor);
    factor = 1.0f;
    find_largest([&](V x, int64_t g) {
      x = multiply(x, scale);
      if (s_.softcap > 0) x = capped(x, s_.softcap * kLog2e);
      return slope != 0 ? sloped(x, slope * kLog2e, own - 16 * g) : x;
    });
  } else {
    find_largest([](V x, int64_t) { return x; });
  }
  const float most = largest.largest(), found = most > kLowest ? most * factor : kLowest;
  memory_.score_scales[row] = factor;
  memory_.subtracted[row] = found > kLowest ? std::ceil(found + std::fabs(found) * kUlp) : kLowest;
}

// Turns the scores of query `first + row` into weights of the groups, and writes what was subtracted from them and their sum.
template <class V, class Engine>
void QuadRun<V, Engine>::weigh(int64_t first, int64_t row, Range groups) {
  const Range range = seen_by(first + row, 1);
  const float *scores = memory_.scores(row), most = memory_.subtracted[row];
  uint8_t* to = memory_.weights(row);
  if (range.first != scales_.seen.first || range.last != scales_.seen.last) weigh_scales(range, groups);
  V total = V::all(0.0f), sum = total;
  const V scale = V::all(memory_.score_scales[row]), shift = V::all(-most), round = V::all(Engine::kWeightRound);
  each_group<V>(range, groups, [&](int64_t g, const auto& only_seen, auto count) {
    V x[count];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) x[i] = fused(V::load(scores + 16 * (g + i)), scale, shift);
    raise_2(x);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      x[i] = only_seen(x[i], 0.0f);
      total = add(total, x[i]);
      x[i] = fused(x[i], V::load(memory_.factors + 16 * (g + i)), round);
      if (!Engine::kSignedValues) sum = add(sum, subtract(x[i], round));
      Engine::store_weight(x[i], to, 16 * (g + i));
    }
  });
  Engine::clear_around(to, groups);
  memory_.weight_scales[row] = scales_.rounded;
  if (!Engine::kSignedValues) memory_.weight_offsets[row] = offset_of(sum_of(sum));
  memory_.most[QuadMemory::kItem + row] = most > kLowest ? most / kLog2e : kLowest;
  memory_.sum[QuadMemory::kItem + row] = sum_of(total);
}

template <class V, class Engine>
State QuadRun<V, Engine>::attend(int64_t first, int64_t count) {
  const int64_t width = s_.width();
  const State state = {memory_.most + QuadMemory::kItem, memory_.sum + QuadMemory::kItem, memory_.next, width};
  const Range range = seen_by(first, count), groups = {range.first / 16, (range.last + 15) / 16};
  if (range.first >= range.last) {
    clear(state, count, width);
    return state;
  }
  // What is read next is asked for meanwhile: the values of the part, then the keys of the next one.
  const Keys keys = {keys_ + groups.first};
  const auto later_values = [&](int64_t group, int64_t step) { return values_[groups.first + group] + step * kQuadTile; };
  const Sixteens queries = {memory_.queries, row_bytes(width), memory_.query_offsets, memory_.query_scales, s_.rounds_queries};
  engine_.multiply_keys(queries.from(first), count, groups.last - groups.first, keys, later_values, Range{0, width / 16},
                        memory_.scores(0) + 16 * groups.first, kPartPositions);
  read_scales(groups);
  for (int64_t m = 0; m < count; m++) scale_scores(first, m, groups);  // of all: no row waits for the largest of its scores
  for (int64_t m = 0; m < count; m++) weigh(first, m, groups);
  const Values values = {values_};
  const auto later_keys = [&](int64_t column, int64_t group) {
    return next_keys_[group] + kQuadScales + column * kQuadTile;
  };
  const Sixteens weights = {memory_.weights(0), QuadMemory::kWeightStep, memory_.weight_offsets, memory_.weight_scales, false};
  engine_.multiply_values(weights, count, width / 16, values, later_keys, groups, memory_.next, width);
  return state;
}

template <class V, class Engine>
void attend_quads(const Attention& a, const AttentionItem& item, int64_t first_part, int64_t last_part) {
  QuadMemory memory;
  attend_parts<QuadRun<V, Engine>, V, Engine::kRows>(a, item, first_part, last_part, &memory);
}

// Rounds a row of `size` floats to bytes of the cache and stores the scale.
inline void round_row(const float* x, int64_t size, int64_t width, uint8_t* bytes, uint8_t* scale_at) {
  float scale;
  int32_t sum;
  quantize_block(x, size, width, reinterpret_cast<int8_t*>(bytes), &scale, &sum);
  memcpy(scale_at, &scale, sizeof scale);
  for (int64_t i = 0; i < width; i++) bytes[i] ^= kMiddle;
}

// Writes the values of a head of `count` tokens, all of one quad of positions. Whole quads are stored as words.
inline void write_values(const Attention& a, int64_t token, int64_t count, int64_t row, int64_t head, int64_t position) {
  const int64_t width = a.sizes.width(), lane = position % kGroupPositions;
  alignas(64) uint8_t bytes[kQuad][kLargestHead];
  uint8_t* group = a.group(a.values, row, head, position);
  for (int64_t j = 0; j < count; j++)
    round_row(a.value + (token + j) * a.value_step + head * a.sizes.size, a.sizes.size, width, bytes[j], group + 4 * (lane + j));
  uint8_t* to = group + kQuadScales + lane / kQuad * 16 * kQuad;
  for (int64_t first = 0; first < width; first += 16, to += kQuadTile) {
    if (count == kQuad) {
      uint32_t words[16];
      for (int i = 0; i < 16; i++)
        words[i] = bytes[0][first + i] | bytes[1][first + i] << 8 | bytes[2][first + i] << 16 |
                   static_cast<uint32_t>(bytes[3][first + i]) << 24;
      memcpy(to, words, sizeof words);
    } else {
      for (int64_t j = 0; j < count; j++)
        for (int i = 0; i < 16; i++) to[kQuad * i + lane % kQuad + j] = bytes[j][first + i];
    }
  }
}

template <class V>
void write_quads(const Attention& a, int64_t first, int64_t last) {
  const AttentionSizes& s = a.sizes;
  const int64_t width = s.width();
  alignas(64) uint8_t bytes[kLargestHead];
  alignas(64) float spread_key[kLargestHead];
  each_new_row<V>(a, first, last, [&](const float* key, const float*, int64_t row, int64_t head, int64_t position) {
    const int64_t lane = position % kGroupPositions;
    memcpy(spread_key, key, sizeof(float) * static_cast<size_t>(s.size));
    memset(spread_key + s.size, 0, sizeof(float) * static_cast<size_t>(width - s.size));
    spread<V>(spread_key, width);
    uint8_t* keys = a.group(a.keys, row, head, position);
    round_row(spread_key, width, width, bytes, keys + 4 * lane);
    keys += kQuadScales + lane * kQuad;
    for (int64_t i = 0; i < width; i += kQuad) memcpy(keys + 16 * i, bytes + i, kQuad);
  });
  int64_t row = 0;
  for (int64_t token = first, count; token < last; token += count) {
    while (a.begins[row + 1] <= token) row++;
    const int64_t position = a.past[row] + token - a.begins[row];
    count = smaller(kQuad - position % kQuad, smaller(last, a.begins[row + 1]) - token);
    for (int64_t head = 0; head < s.kv_heads; head++) write_values(a, token, count, row, head, position);
  }
}

// Kernels that compute an int8 cache in integers, and others with vectors of floats.
template <class V, class Engine>
constexpr AttentionKernels attention_kernels() {
  return {
      [](const Attention& a, int64_t first, int64_t last) {
        a.sizes.cache == CacheType::int8 ? write_quads<V>(a, first, last) : write_rows<V>(a, first, last);
      },
      [](const Attention& a, const AttentionItem& item, int64_t first_part, int64_t last_part) {
        a.sizes.cache == CacheType::int8 ? attend_quads<V, Engine>(a, item, first_part, last_part)
                                         : attend<V>(a, item, first_part, last_part);
      },
      finish<V>,
      exponentials<V>,
      gate<V>,
      add_rows<V>,
      normalize<V>,
      multiply_rows<V>,
      center<V>,
      activate<V>,
      [](const AttentionSizes& s) { return s.cache == CacheType::int8 ? QuadMemory::kItem : item_queries(s); },
      [](const AttentionSizes&) { return false; },
      recurrent_kernels<V>(),
      float_products<V>,
  };
}

}  // namespace
}  // namespace carryall
