// Attention on a cache of pairs of bfloat16 (attention.h): queries, keys, weights and values are multiplied in bfloat16 and
// summed in float32 by an engine, AMX or AVX-512 BF16. Its multiply<kSplit>(a, a_row, count, columns, b, later, steps, y)
// computes `count` rows of `columns` tiles of 16 floats:
//   a               [rows / 16, a_row bytes], each [steps, high and, if Engine::kLow, low, 16 rows, 64 bytes]
//   b(column, step) a tile of 1 KB, followed by its low one if kSplit; later(column, step) one that is read soon
//   y               where the results lie
//
// The engines compute an element of their result from one row of the first operand and one column of the second, in a fixed
// order, and the steps of 32 elements or positions begin at fixed places (see attention_parts.h).
#pragma once
#include <cmath>
#include <type_traits>

#include "attention_parts.h"
#include "bfloat16_pairs.h"

namespace carryall {
namespace {

constexpr int64_t kPairedHead = 256;       // the largest head
constexpr int64_t kStep = kPairPositions;  // elements or positions of a tile
constexpr int64_t kPartSteps = kPartPositions / kStep;
constexpr int64_t kChunkSteps = 2;  // whose scores are in memory at a time, so that these stay in the first-level cache
constexpr int64_t kChunkPositions = kChunkSteps * kStep;
constexpr float kMostSum = 0x1p60f;  // of weights that are relative to nothing
constexpr int64_t kHalfStep = 16;    // elements of the last tile of keys of a head that is no multiple of kStep
constexpr int64_t whole_tiles(int64_t rows) { return (rows + 15) / 16 * 16; }

// Results: vectors of 16 columns, and how many floats one of them lies behind that of the row, the column and the 16 rows before.
struct Results {
  float* first;
  int64_t row, column, rows;

  CARRYALL_INLINE float* at(int64_t m, int64_t c) const { return first + m / 16 * rows + m % 16 * row + c * column; }
};

template <class Engine>
struct Memory {
  static constexpr int64_t kItem = Engine::kItem, kRows = Engine::kRows;
  alignas(64) uint8_t queries[whole_tiles(kItem) * kPairedHead * 4];
  alignas(64) uint8_t weights[whole_tiles(kRows) * kPartPositions * 4];
  alignas(64) uint8_t values[kPartPositions * kPairedHead * 4];  // with zeros
  alignas(64) uint8_t ends[kPartGroups * kTileBytes] = {};       // last tiles of keys of kHalfStep elements, with zeros
  alignas(64) float scores[whole_tiles(kRows) * kChunkPositions];  // of a chunk, in tiles of 1 KB
  alignas(64) float totals[kRows][16];                             // of the weights of each lane
  alignas(64) float results[kItem * kPairedHead];
  alignas(64) float next[whole_tiles(kRows) * kPairedHead];
  float most[kItem + kRows], sum[kItem + kRows];
  bool extreme[kRows];

  Results all_scores() { return {scores, 16, kTileFloats, 16 * kChunkPositions}; }
};

inline __mmask16 lanes(int64_t first, int64_t last) {
  const auto below = [](int64_t n) { return n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1; };
  return static_cast<__mmask16>(below(last) & ~below(first));
}

// Elements of a row that are multiplied in a step, as two vectors that are paired.
struct PairedVectors {
  __m512 first, second;
  PairedVectors(const float* x, int64_t left) {
    const __mmask16 mask = left < kStep ? 0xff : 0xffff;
    first = _mm512_maskz_loadu_ps(mask, x);
    second = _mm512_maskz_loadu_ps(mask, x + (left < kStep ? kHalfStep / 2 : kHalfStep));
  }
};
constexpr int64_t steps_of(int64_t width) { return (width + kStep - 1) / kStep; }

// What one call of `attend` computes with.
template <class Engine>
class Run : public Part {
  static constexpr int64_t kStepBytes = (Engine::kLow ? 2 : 1) * kTileBytes;  // of 16 queries, or of their weights

 public:
  Run(const Attention& a, const AttentionItem& item, Memory<Engine>* memory)
      : Part(a, item, Engine::kFetches), memory_(*memory) {}

  void read_queries();
  void read_part(int64_t part);
  // Computes the state of queries [first, first + count) of the item in this part.
  State attend(int64_t first, int64_t count) {
    if constexpr (Engine::kLow)
      if (s_.cache == CacheType::float32) return attend<true>(first, count);
    return attend<false>(first, count);
  }

 private:
  template <bool kSplit>
  State attend(int64_t first, int64_t count);
  const uint8_t* only_seen(const uint8_t* values, int64_t step, Range range);
  template <bool kSplit, class Work>
  void each_chunk(int64_t first, int64_t count, Range seen, const Work& work);
  template <bool kSplit>
  void score(int64_t first, int64_t count, Range steps);
  void bend(int64_t query, float* scores, Range steps) const;
  template <class Lanes>
  void weigh(int64_t row, const Lanes& lanes, Range steps, float most);
  template <bool kSplit>
  void weigh_all(int64_t first, int64_t count, Range seen);
  template <bool kSplit>
  void weigh_extremes(int64_t first, int64_t count, Range seen);

  Memory<Engine>& memory_;
  const uint8_t *keys_[kPartGroups], *values_[kPartSteps];  // of the part
  const uint8_t* next_keys_[kPartGroups];                   // asked for while its values are multiplied
};

template <class Engine>
void Run<Engine>::read_queries() {
  const int64_t width = s_.width(), steps = steps_of(width);
  alignas(64) float x[kPairedHead] = {};
  for (int64_t m = 0; m < item_.count; m++) {
    read_query<Vector>(m, s_.scale * kLog2e, x);
    uint8_t* to = memory_.queries + m / 16 * steps * kStepBytes + m % 16 * 64;
    for (int64_t k = 0; k < steps; k++) {
      const PairedVectors pairs(x + kStep * k, width - kStep * k);
      split_queries<Engine::kLow>(pairs.first, pairs.second, to + k * kStepBytes);
    }
  }
}

// Copies values of 32 positions with zeros for unseen ones, which may be no numbers.
template <class Engine>
const uint8_t* Run<Engine>::only_seen(const uint8_t* values, int64_t step, Range range) {
  const int64_t bytes = 2 * s_.group_bytes(), first = kStep * step;
  uint8_t* to = memory_.values + step * bytes;
  const uint32_t one = lanes(range.first - first, range.last - first);
  const uint32_t two = lanes(range.first - first - 16, range.last - first - 16);
  for (int64_t i = 0; i < bytes; i += 64) {
    const int64_t line = i / 64 % 16;
    const uint32_t kept = (one >> line & 1) * 0xffffu | (two >> line & 1) * 0xffff0000u;
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(kept));
    _mm512_store_si512(to + i, kept == 0 ? mask : _mm512_and_si512(_mm512_loadu_si512(values + i), mask));
  }
  return to;
}

template <class Engine>
void Run<Engine>::read_part(int64_t part) {
  base_ = part * kPartPositions;
  const Range range = seen_by(0, item_.count);
  const int64_t end = (range.last + kStep - 1) / kStep;
  for (int64_t k = range.first / kStep; k < end; k++) {
    const bool all = kStep * k >= range.first && kStep * k + kStep <= range.last;
    const uint8_t* keys = a_.group(a_.keys, item_.row, item_.head, base_ + kStep * k);
    const uint8_t* values = a_.group(a_.values, item_.row, item_.head, base_ + kStep * k);
    for (int64_t g = 2 * k; g < 2 * k + 2; g++, keys += s_.group_bytes())
      if (16 * g < range.last || g == 2 * k)  // else the scores are not read
        keys_[g] = keys;
      else
        keys_[g] = keys_[g - 1];
    for (int64_t g = 2 * k; s_.width() % kStep != 0 && g < 2 * k + 2; g++)
      memcpy(memory_.ends + g * kTileBytes, keys_[g] + s_.width() / kStep * kTileBytes, kTileBytes / 2);
    values_[k] = all ? values : only_seen(values, k, range);
  }
  if (Engine::kFetches) plan_fetches({2 * (range.first / kStep), 2 * end}, next_keys_);
}

// Lanes of 32 positions that a query sees.
struct StepLanes {
  Range seen;

  __mmask16 first(int64_t step) const { return lanes(seen.first - kStep * step, seen.last - kStep * step); }
  __mmask16 second(int64_t step) const { return lanes(seen.first - kStep * step - 16, seen.last - kStep * step - 16); }
};
struct AllLanes {
  static constexpr __mmask16 first(int64_t) { return 0xffff; }
  static constexpr __mmask16 second(int64_t) { return 0xffff; }
};

// Computes scores of a chunk.
template <class Engine>
template <bool kSplit>
void Run<Engine>::score(int64_t first, int64_t count, Range steps) {
  constexpr int64_t kBytes = kSplit ? 2 * kTileBytes : kTileBytes;
  const int64_t width = s_.width(), of_head = steps_of(width), row = kStepBytes * of_head;
  const auto keys = [&](int64_t group, int64_t step) -> const uint8_t* {
    const int64_t g = 2 * steps.first + group;
    return kStep * step + kHalfStep < width ? keys_[g] + step * kBytes : memory_.ends + g * kTileBytes;
  };
  // The values of the part are asked for meanwhile.
  const auto later_values = [&](int64_t group, int64_t step) {
    return values_[steps.first + group / 2] + (group % 2 * of_head + step) * kBytes;
  };
  Engine::template multiply<kSplit>(memory_.queries + first / 16 * row, row, count, 2 * (steps.last - steps.first), keys, later_values,
                                    of_head, memory_.all_scores());
  for (int64_t m = 0; m < count && (s_.softcap > 0 || a_.slopes != nullptr); m++)
    bend(first + m, memory_.all_scores().at(m, 0), steps);
}

// Computes scores of all steps, and calls `work(steps)` for each chunk of them.
template <class Engine>
template <bool kSplit, class Work>
void Run<Engine>::each_chunk(int64_t first, int64_t count, Range seen, const Work& work) {
  for (int64_t k = seen.first; k < seen.last; k += kChunkSteps) {
    const Range steps = {k, smaller(k + kChunkSteps, seen.last)};
    score<kSplit>(first, count, steps);
    work(steps);
  }
}

// Changes the scores of a query by the softcap and the slope.
template <class Engine>
void Run<Engine>::bend(int64_t query, float* scores, Range steps) const {
  const float slope = slope_of(a_, item_, query);
  const int64_t own = past_ + (item_.first + query) / s_.shared() - base_;
  for (int64_t g = 2 * steps.first; g < 2 * steps.last; g++, scores += kTileFloats) {
    Vector x = {_mm512_load_ps(scores)};
    if (s_.softcap > 0) x = capped(x, s_.softcap * kLog2e);
    if (slope != 0) x = sloped(x, slope * kLog2e, own - 16 * g);
    _mm512_store_ps(scores, x.x);
  }
}

// Turns scores of a row into weights, 2^(score - most), and adds these to its totals.
template <class Engine>
template <class Lanes>
CARRYALL_INLINE void Run<Engine>::weigh(int64_t row, const Lanes& lanes, Range steps, float most) {
  const float* from = memory_.all_scores().at(row, 0);
  uint8_t* to = memory_.weights + row / 16 * kPartSteps * kStepBytes + row % 16 * 64 + steps.first * kStepBytes;
  const __m512 shift = _mm512_set1_ps(most);
  __m512 total = _mm512_load_ps(memory_.totals[row]);
#pragma GCC unroll 2
  for (int64_t k = steps.first; k < steps.last; k++, from += 2 * kTileFloats, to += kStepBytes) {
    const __m512 x = _mm512_sub_ps(_mm512_load_ps(from), shift), y = _mm512_sub_ps(_mm512_load_ps(from + kTileFloats), shift);
    const __m512 one = power_of_2<Engine::kLow>(x, lanes.first(k)), other = power_of_2<Engine::kLow>(y, lanes.second(k));
    total = store_weights<Engine::kLow>(one, other, total, to);
  }
  _mm512_store_ps(memory_.totals[row], total);
}

// Turns the scores of some queries into weights, and writes their sums. Nothing is subtracted from scores: floats hold the weights of
// nearly all queries as they are, so each chunk becomes weights while it is in the first-level cache, and no pass finds the largest.
template <class Engine>
template <bool kSplit>
void Run<Engine>::weigh_all(int64_t first, int64_t count, Range seen) {
  const bool whole = seen_by(first, 1).last == kPartPositions && seen_by(first + count - 1, 1).first == 0;
  memset(memory_.totals, 0, sizeof memory_.totals);
  each_chunk<kSplit>(first, count, seen, [&](Range steps) {
    if (whole)
      for (int64_t m = 0; m < count; m++) weigh(m, AllLanes(), {steps.first, steps.first + kChunkSteps}, 0.0f);
    else
      for (int64_t m = 0; m < count; m++) weigh(m, StepLanes{seen_by(first + m, 1)}, steps, 0.0f);
  });
  bool extremes = false;
  for (int64_t m = 0; m < count; m++) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(memory_.totals[m]));
    memory_.sum[Engine::kItem + m] = sum;
    memory_.most[Engine::kItem + m] = 0.0f;
    memory_.extreme[m] = !(sum <= kMostSum && sum >= 1 / kMostSum);
    extremes = extremes || memory_.extreme[m];
  }
  if (extremes) weigh_extremes<kSplit>(first, count, seen);
}

// The same of queries whose sum of weights was extreme: these are relative to the power of 2 above the largest one. It depends on a
// query's own sum whether its weights are computed so.
template <class Engine>
template <bool kSplit>
void Run<Engine>::weigh_extremes(int64_t first, int64_t count, Range seen) {
  float* most = memory_.most + Engine::kItem;
  const auto each_extreme = [&](const auto& work) {
    for (int64_t m = 0; m < count; m++)
      if (memory_.extreme[m]) work(m, StepLanes{seen_by(first + m, 1)}, memory_.totals[m]);
  };
  each_extreme([&](int64_t, StepLanes, float* largest) { _mm512_store_ps(largest, _mm512_set1_ps(kLowest)); });
  each_chunk<kSplit>(first, count, seen, [&](Range steps) {
    each_extreme([&](int64_t m, StepLanes lanes, float* largest) {
      const float* from = memory_.all_scores().at(m, 0);
      __m512 found = _mm512_load_ps(largest);
      for (int64_t k = steps.first; k < steps.last; k++, from += 2 * kTileFloats) {
        found = _mm512_mask_max_ps(found, lanes.first(k), found, _mm512_load_ps(from));
        found = _mm512_mask_max_ps(found, lanes.second(k), found, _mm512_load_ps(from + kTileFloats));
      }
      _mm512_store_ps(largest, found);
    });
  });
  each_extreme([&](int64_t m, StepLanes, float* total) {
    const float found = _mm512_reduce_max_ps(_mm512_load_ps(total));
    most[m] = found > kLowest ? std::ceil(found) : kLowest;
    _mm512_store_ps(total, _mm512_setzero_ps());
  });
  each_chunk<kSplit>(first, count, seen, [&](Range steps) {
    each_extreme([&](int64_t m, StepLanes lanes, float*) { weigh(m, lanes, steps, most[m]); });
  });
  each_extreme([&](int64_t m, StepLanes, float* total) {
    memory_.sum[Engine::kItem + m] = _mm512_reduce_add_ps(_mm512_load_ps(total));
    if (most[m] > kLowest) most[m] /= kLog2e;
  });
}

template <class Engine>
template <bool kSplit>
State Run<Engine>::attend(int64_t first, int64_t count) {
  constexpr int64_t kBytes = kSplit ? 2 * kTileBytes : kTileBytes;
  const int64_t width = s_.width(), steps = steps_of(width), step = kStep * steps;
  const State state = {memory_.most + Engine::kItem, memory_.sum + Engine::kItem, memory_.next, step};
  const Range range = seen_by(first, count);
  if (range.first >= range.last) {
    clear(state, count, width);
    return state;
  }
  const Range seen = {range.first / kStep, (range.last + kStep - 1) / kStep};
  weigh_all<kSplit>(first, count, seen);
  const auto values = [&](int64_t column, int64_t step) { return values_[seen.first + step] + column * kBytes; };
  const auto later_keys = [&](int64_t column, int64_t step) {
    const int64_t tile = (seen.first + step) * (width / 16) + column;
    return next_keys_[tile / steps] + tile % steps * kBytes;
  };
  Engine::template multiply<kSplit>(memory_.weights + seen.first * kStepBytes, kPartSteps * kStepBytes, count, width / 16, values, later_keys,
                                    seen.last - seen.first, Results{memory_.next, step, 16, 16 * step});
  return state;
}

// The sizes of which the cache may hold pairs; `step`: what a head is a multiple of.
inline bool pairable(const AttentionSizes& s, int64_t step) {
  return s.reach == 0 && !s.one && s.cache != CacheType::int8 && s.width() <= kPairedHead && s.width() % step == 0 && s.block % kStep == 0;
}

template <class Engine>
void attend_pairs(const Attention& a, const AttentionItem& item, int64_t first_part, int64_t last_part) {
  Memory<Engine> memory;
  attend_parts<Run<Engine>, Vector, Engine::kRows>(a, item, first_part, last_part, &memory);
}

// Stores elements of a key as pairs, in column `lane` of a tile of so many lines.
template <bool kSplit>
inline void store_key(const PairedVectors& pairs, int64_t lines, uint8_t* tile, int64_t lane) {
  const __m512 x = pairs.first, y = pairs.second;
  alignas(64) uint32_t high[16], rest[16];
  _mm512_store_si512(high, paired(rounded(x), rounded(y)));
  if (kSplit) _mm512_store_si512(rest, paired(low(x), low(y)));
  for (int64_t line = 0; line < lines; line++) {
    memcpy(tile + line * 64 + lane * 4, high + line, 4);
    if (kSplit) memcpy(tile + kTileBytes + line * 64 + lane * 4, rest + line, 4);
  }
}

// Stores 16 elements of a value in a line, as the first or second of each pair.
template <bool kSplit>
inline void store_value(__m512 x, uint8_t* line, bool second) {
  const __mmask32 mask = second ? 0xaaaaaaaau : 0x55555555u;
  const auto store = [&](__m512i y, uint8_t* to) {
    _mm512_mask_storeu_epi16(to, mask, second ? y : _mm512_srli_epi32(y, 16));
  };
  store(rounded(x), line);
  if (kSplit) store(low(x), line + kTileBytes);
}

template <bool kSplit>
void write_pairs(const Attention& a, int64_t first, int64_t last) {
  constexpr int64_t kBytes = kSplit ? 2 * kTileBytes : kTileBytes;
  const AttentionSizes& s = a.sizes;
  alignas(64) float k[kPairedHead] = {}, v[kPairedHead] = {};
  const size_t bytes = sizeof(float) * static_cast<size_t>(s.size);
  each_new_row<Vector>(a, first, last, [&](const float* key, const float* value, int64_t row, int64_t head, int64_t position) {
    memcpy(k, key, bytes);  // zeros follow
    memcpy(v, value, bytes);
    const int64_t place = position % kStep;
    uint8_t* keys = a.group(a.keys, row, head, position);
    uint8_t* values = a.group(a.values, row, head, position - place) + place % 16 * 64;
    for (int64_t i = 0; i < s.width(); i += kStep)
      store_key<kSplit>({k + i, s.width() - i}, s.width() - i < kStep ? kHalfStep / 2 : kHalfStep, keys + i / kStep * kBytes, place % 16);
    for (int64_t i = 0; i < s.width(); i += 16)
      store_value<kSplit>(_mm512_load_ps(v + i), values + i / 16 * kBytes, place >= 16);
  });
}

}  // namespace
}  // namespace carryall
