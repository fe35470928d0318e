// Attention on a cache of pairs of bfloat16 (attention.h): queries, keys, weights and values are multiplied in bfloat16 and
// summed in float32 by an engine, AMX or AVX-512 BF16. Its multiply<kSplit>(a, a_row, count, columns, b, later, steps, y,
// y_step) computes `count` rows of `columns` tiles of 16 floats:
//   a               [rows / 16, a_row bytes], each [steps, 2 (high, low), 16 rows, 64 bytes]
//   b(column, step) a tile of 1 KB, followed by its low one if kSplit; later(column, step) one that is read soon
//
// Some queries at a time go through a part of 256 positions: its scores, their weights, its values. The engines compute an
// element of their result from one row of the first operand and one column of the second, in a fixed order, and the steps
// of 32 elements or positions begin at fixed places. A position that a query does not see has the weight 0. So a query's
// result depends on no other query and no cut of the work.
#pragma once
#include <cmath>
#include <type_traits>

#include "attention_kernel.h"
#include "bfloat16_pairs.h"

namespace carryall {
namespace {

constexpr int64_t kStep = kPairPositions;      // elements or positions of a tile
constexpr int64_t kPartSteps = kPartPositions / kStep;
constexpr int64_t kPartGroups = kPartPositions / kGroupPositions;

constexpr int64_t whole_tiles(int64_t rows) { return (rows + 15) / 16 * 16; }

template <class Engine>
struct Memory {
  static constexpr int64_t kItem = Engine::kItem, kRows = Engine::kRows;
  alignas(64) uint8_t queries[whole_tiles(kItem) * kWideHead * 4];
  alignas(64) uint8_t weights[whole_tiles(kRows) * kPartPositions * 4];
  alignas(64) uint8_t values[kPartPositions * kWideHead * 4];  // with zeros, or converted
  alignas(64) uint8_t keys[kPartPositions * kWideHead * 2];    // converted ones
  alignas(64) float scores[whole_tiles(kRows) * kPartPositions];
  alignas(64) float results[kItem * kWideHead];
  alignas(64) float next[whole_tiles(kRows) * kWideHead];
  alignas(64) float key_scales[kPartPositions], value_scales[kPartPositions];  // of an int8 cache
  float most[kItem + kRows], sum[kItem + kRows];
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

inline __mmask16 lanes(int64_t first, int64_t last) {
  const auto below = [](int64_t n) { return n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1; };
  return static_cast<__mmask16>(below(last) & ~below(first));
}

// What one call of `attend` computes with.
template <class Engine>
class Run {
 public:
  Run(const Attention& a, const AttentionItem& item, Memory<Engine>* memory)
      : a_(a), s_(a.sizes), item_(item), memory_(*memory), past_(a.past[item.row]) {
    if (!Engine::kFetches || item.after == nullptr) return;
    const AttentionItem& after = *item.after;
    later_ = after.first_part * kPartPositions;
    later_end_ = smaller(a.past[after.row] + (after.first + after.count - 1) / s_.shared() + 1, later_ + kPartPositions);
  }

  void read_queries();
  void read_part(int64_t part);
  // Computes the state of queries [first, first + count) of the item in this part.
  State attend(int64_t first, int64_t count) {
    if constexpr (Engine::kLow)
      if (s_.cache == CacheType::float32) return attend<true>(first, count);
    return attend<false>(first, count);
  }

 private:
  struct Range {
    int64_t first, last;
  };

  // The positions of the part that any of the queries sees.
  Range seen_by(int64_t first, int64_t count) const {
    const int64_t oldest = (item_.first + first) / s_.shared(), newest = (item_.first + first + count - 1) / s_.shared();
    const int64_t start = s_.window > 0 ? larger(0, past_ + oldest - s_.window + 1 - base_) : 0;
    return {start, smaller(past_ + newest + 1 - base_, kPartPositions)};
  }
  template <bool kSplit>
  State attend(int64_t first, int64_t count);
  void plan_fetches(Range range);
  const uint8_t* convert_keys(const uint8_t* group, int64_t index);
  const uint8_t* convert_values(int64_t step, Range range);
  const uint8_t* only_seen(const uint8_t* values, int64_t step, Range range);
  void weigh(int64_t first, int64_t row, Range steps);

  const Attention& a_;
  const AttentionSizes& s_;
  const AttentionItem& item_;
  Memory<Engine>& memory_;
  int64_t past_, base_ = 0;
  const uint8_t *keys_[kPartGroups], *values_[kPartSteps];  // of the part
  const uint8_t* next_keys_[kPartGroups];                   // asked for while its values are multiplied
  int64_t later_ = 0, later_end_ = 0;                       // positions of the item after this one that are not asked for
};

template <class Engine>
void Run<Engine>::read_queries() {
  const int64_t shared = s_.shared(), steps = s_.width() / kStep;
  alignas(64) float x[kWideHead] = {};
  for (int64_t m = 0; m < item_.count; m++) {
    const int64_t query = item_.first + m, token = a_.begins[item_.row] + query / shared;
    rotate<Vector>(a_, token, a_.query + token * a_.query_step + (item_.head * shared + query % shared) * s_.size,
                   s_.scale, x);
    uint8_t* to = memory_.queries + m / 16 * steps * 2 * kTileBytes + m % 16 * 64;
    for (int64_t k = 0; k < steps; k++)
      split_queries<Engine::kLow>(_mm512_load_ps(x + kStep * k), _mm512_load_ps(x + kStep * k + 16), to + k * 2 * kTileBytes);
  }
}

// Chooses the keys to ask for while the values of the part are multiplied, a group for each of its groups: those of the
// next part, then those of the first part of the item after this one.
template <class Engine>
void Run<Engine>::plan_fetches(Range range) {
  const int64_t newest = past_ + (item_.first + item_.count - 1) / s_.shared();
  int64_t next = base_ + kPartPositions;
  for (int64_t g = range.first / kStep * 2; g < (range.last + kStep - 1) / kStep * 2; g++) {
    if (next <= newest) {
      next_keys_[g] = a_.group(a_.keys, item_.row, item_.head, next);
      next += kGroupPositions;
    } else if (later_ < later_end_) {
      next_keys_[g] = a_.group(a_.keys, item_.after->row, item_.after->head, later_);
      later_ += kGroupPositions;
    } else {
      next_keys_[g] = keys_[range.first / kStep * 2];
    }
  }
}

// Converts a group of keys of int8, [width, 16].
template <class Engine>
const uint8_t* Run<Engine>::convert_keys(const uint8_t* group, int64_t index) {
  memcpy(memory_.key_scales + 16 * index, group, 64);
  uint8_t* to = memory_.keys + index * s_.width() * 32;
  const int8_t* from = reinterpret_cast<const int8_t*>(group) + 64;
  for (int64_t k = 0; k < s_.width(); k += kStep)
    for (int64_t line = 0; line < 16; line++) {
      const bool one = k + line < s_.size, two = k + line + 16 < s_.size;
      const Vector x = one ? Vector::from_int8(from + 16 * (k + line)) : Vector::all(0.0f);
      const Vector y = two ? Vector::from_int8(from + 16 * (k + line + 16)) : Vector::all(0.0f);
      _mm512_store_si512(to + k * 32 + line * 64, paired(bits(x.x), bits(y.x)));
    }
  return to;
}

// Converts values of int8 of 32 positions, two groups of [16, width]; unseen ones, which may be no numbers, become 0.
template <class Engine>
const uint8_t* Run<Engine>::convert_values(int64_t step, Range range) {
  const int64_t width = s_.width();
  uint8_t* to = memory_.values + step * width * 64;
  const uint8_t* groups = a_.group(a_.values, item_.row, item_.head, base_ + kStep * step);
  for (int64_t half = 0; half < 2; half++) {
    const int64_t first = kStep * step + 16 * half;
    const __mmask16 mask = lanes(range.first - first, range.last - first);
    const __m512 scales = _mm512_maskz_loadu_ps(mask, groups + half * s_.group_bytes());
    const __mmask16 wrong = _mm512_cmp_ps_mask(scales, scales, _CMP_UNORD_Q);  // one NaN: `split_weights` keeps it
    _mm512_store_ps(memory_.value_scales + first, _mm512_mask_mov_ps(scales, wrong, _mm512_set1_ps(NAN)));
  }
  const int8_t *from = reinterpret_cast<const int8_t*>(groups) + 64, *other = from + s_.group_bytes();
  for (int64_t line = 0; line < 16; line++)
    for (int64_t column = 0; column < width; column += 16)
      _mm512_store_si512(to + column * 64 + line * 64,
                         paired(bits(Vector::from_int8(from + line * width + column).x),
                                bits(Vector::from_int8(other + line * width + column).x)));
  return to;
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
    const bool convert = s_.cache == CacheType::int8;
    for (int64_t g = 2 * k; g < 2 * k + 2; g++, keys += s_.group_bytes())
      if (16 * g < range.last || g == 2 * k)  // else the scores are not read
        keys_[g] = convert ? convert_keys(keys, g) : keys;
      else
        keys_[g] = keys_[g - 1];
    values_[k] = convert ? convert_values(k, range) : all ? values : only_seen(values, k, range);
  }
  if (Engine::kFetches) plan_fetches(range);
}

// Turns the scores of query `first + row` into weights of the steps, and writes its maximum and sum.
template <class Engine>
void Run<Engine>::weigh(int64_t first, int64_t row, Range steps) {
  const Range range = seen_by(first + row, 1);
  float* scores = memory_.scores + row * kPartPositions;
  float &most = memory_.most[Engine::kItem + row], &sum = memory_.sum[Engine::kItem + row];
  uint8_t* to = memory_.weights + row / 16 * kPartSteps * 2 * kTileBytes + row % 16 * 64;
  const bool scaled = s_.cache == CacheType::int8;
  const float slope = slope_of(a_, item_, first + row);
  const int64_t own = past_ + (item_.first + first + row) / s_.shared() - base_;
  if (scaled || s_.softcap > 0 || slope != 0)
    for (int64_t i = kStep * steps.first; i < kStep * steps.last; i += 16) {
      __m512 x = _mm512_load_ps(scores + i);
      if (scaled) x = _mm512_mul_ps(x, _mm512_load_ps(memory_.key_scales + i));
      if (s_.softcap > 0) x = capped(Vector{x}, s_.softcap).x;
      if (slope != 0) x = sloped(Vector{x}, slope, own - i).x;
      _mm512_store_ps(scores + i, x);
    }
  // The first and the last step may be seen in part.
  const auto all = [&](int64_t k) { return kStep * k >= range.first && kStep * k + kStep <= range.last; };
  const auto mask = [&](int64_t i) { return lanes(range.first - i, range.last - i); };
  __m512 largest = _mm512_set1_ps(kLowest), other = largest, total = _mm512_setzero_ps();
  for (int64_t k = steps.first; k < steps.last; k++) {
    const __m512 x = _mm512_load_ps(scores + kStep * k), y = _mm512_load_ps(scores + kStep * k + 16);
    largest = _mm512_mask_max_ps(largest, all(k) ? 0xffff : mask(kStep * k), largest, x);
    other = _mm512_mask_max_ps(other, all(k) ? 0xffff : mask(kStep * k + 16), other, y);
  }
  const float found = _mm512_reduce_max_ps(_mm512_max_ps(largest, other));
  most = found > kLowest ? found : kLowest;
  const __m512 shift = _mm512_set1_ps(most);
  for (int64_t k = steps.first; k < steps.last; k++) {
    const __mmask16 one = all(k) ? 0xffff : mask(kStep * k), two = all(k) ? 0xffff : mask(kStep * k + 16);
    __m512 x = falling_exponential(_mm512_sub_ps(_mm512_load_ps(scores + kStep * k), shift), one);
    __m512 y = falling_exponential(_mm512_sub_ps(_mm512_load_ps(scores + kStep * k + 16), shift), two);
    total = _mm512_add_ps(total, _mm512_add_ps(x, y));
    if (scaled) {
      x = _mm512_mul_ps(x, _mm512_load_ps(memory_.value_scales + kStep * k));
      y = _mm512_mul_ps(y, _mm512_load_ps(memory_.value_scales + kStep * k + 16));
    }
    split_weights<Engine::kLow>(x, y, to + k * 2 * kTileBytes);
  }
  sum = _mm512_reduce_add_ps(total);
}

template <class Engine>
template <bool kSplit>
State Run<Engine>::attend(int64_t first, int64_t count) {
  constexpr int64_t kBytes = kSplit ? 2 * kTileBytes : kTileBytes;
  const int64_t steps = s_.width() / kStep, row = 2 * kTileBytes * steps, width = s_.width();
  const State state = {memory_.most + Engine::kItem, memory_.sum + Engine::kItem, memory_.next, width};
  const Range range = seen_by(first, count);
  if (range.first >= range.last) {
    clear(state, count, width);
    return state;
  }
  const Range seen = {range.first / kStep, (range.last + kStep - 1) / kStep};
  const uint8_t *queries = memory_.queries + first / 16 * row, *weights = memory_.weights + seen.first * 2 * kTileBytes;
  // What is read next is asked for meanwhile: the values of the part, then the keys of the next one.
  const auto keys = [&](int64_t group, int64_t step) { return keys_[2 * seen.first + group] + step * kBytes; };
  const auto later_values = [&](int64_t group, int64_t step) {
    return values_[seen.first + group / 2] + (group % 2 * steps + step) * kBytes;
  };
  Engine::template multiply<kSplit>(queries, row, count, 2 * (seen.last - seen.first), keys, later_values, steps,
                                    memory_.scores + kStep * seen.first, kPartPositions);
  for (int64_t m = 0; m < count; m++) weigh(first, m, seen);
  const auto values = [&](int64_t column, int64_t step) { return values_[seen.first + step] + column * kBytes; };
  const auto later_keys = [&](int64_t column, int64_t step) {
    const int64_t tile = (seen.first + step) * (width / 16) + column;
    return next_keys_[tile / steps] + tile % steps * kBytes;
  };
  Engine::template multiply<kSplit>(weights, kPartSteps * 2 * kTileBytes, count, width / 16, values, later_keys,
                                    seen.last - seen.first, memory_.next, width);
  return state;
}

void copy(const State& from, int64_t count, int64_t width, const State& to) {
  memcpy(to.most, from.most, sizeof(float) * static_cast<size_t>(count));
  memcpy(to.sum, from.sum, sizeof(float) * static_cast<size_t>(count));
  for (int64_t m = 0; m < count; m++)
    memcpy(to.result + m * to.step, from.result + m * from.step, sizeof(float) * static_cast<size_t>(width));
}

// The sizes of which the cache may hold pairs.
inline bool pairable(const AttentionSizes& s) {
  return s.width() <= kWideHead && s.width() % kStep == 0 && s.block % kStep == 0;
}

template <class Engine>
void attend_pairs(const Attention& a, const AttentionItem& item, int64_t first_part, int64_t last_part) {
  const int64_t width = a.sizes.width();
  Memory<Engine> memory;
  Run<Engine> run(a, item, &memory);
  const State all = {memory.most, memory.sum, memory.results, width};
  run.read_queries();
  clear(all, item.count, width);
  for (int64_t part = first_part; part < last_part; part++) {
    run.read_part(part);
    for (int64_t m = 0; m < item.count; m += Engine::kRows) {
      const int64_t count = smaller(Engine::kRows, item.count - m);
      const State next = run.attend(m, count);
      if (item.states != nullptr)
        copy(next, count, width, part_state(a, item, part).from(m));
      else
        merge<Vector>(all.from(m), next, count, width);
    }
  }
  if (item.states == nullptr) write_outputs<Vector>(a, item, all);
}

// Stores a key as pairs of elements, in column `lane` of a group.
template <bool kSplit>
inline void store_key(__m512 x, __m512 y, uint8_t* tile, int64_t lane) {
  alignas(64) uint32_t high[16], rest[16];
  _mm512_store_si512(high, paired(rounded(x), rounded(y)));
  if (kSplit) _mm512_store_si512(rest, paired(low(x), low(y)));
  for (int64_t line = 0; line < 16; line++) {
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
  alignas(64) float k[kWideHead] = {}, v[kWideHead] = {};
  const size_t bytes = sizeof(float) * static_cast<size_t>(s.size);
  each_new_row<Vector>(a, first, last, [&](const float* key, const float* value, int64_t row, int64_t head, int64_t position) {
    memcpy(k, key, bytes);  // zeros follow
    memcpy(v, value, bytes);
    const int64_t place = position % kStep;
    uint8_t* keys = a.group(a.keys, row, head, position);
    uint8_t* values = a.group(a.values, row, head, position - place) + place % 16 * 64;
    for (int64_t i = 0; i < s.width(); i += kStep)
      store_key<kSplit>(_mm512_load_ps(k + i), _mm512_load_ps(k + i + 16), keys + i / kStep * kBytes, place % 16);
    for (int64_t i = 0; i < s.width(); i += 16)
      store_value<kSplit>(_mm512_load_ps(v + i), values + i / 16 * kBytes, place >= 16);
  });
}

}  // namespace
}  // namespace carryall
