// Attention with an online softmax (arXiv:2205.14135) over vectors `V` of 16 floats. Included by one source per
// instruction set, which compiles it with its own flags: everything is in an anonymous namespace.
//
// A query goes through the same operations in the same order, whatever the queries beside it: scores are summed over
// the elements of a head in order, weighted values over positions in order, tiles of 64 positions in order within
// parts of 256, and parts in order. A tile without a position that the query sees changes nothing. So its result
// depends on no other query, no cut into tasks, no block size and no instruction set.
#pragma once
#include "attention_state.h"

namespace carryall {
namespace {

constexpr int64_t kGroups = kTilePositions / kGroupPositions;

// Asks for a line of memory that is read soon. Hardware does not foresee where the next block lies.
inline void fetch(const uint8_t* line) {
  __builtin_prefetch(line, 0, 2);
  __asm__ volatile("");  // else GCC leaves out functions that do nothing but ask
}

// What a group of keys or values holds: floats, or bfloat16 as it is cached. Few queries read the cache itself; many
// share a conversion.
template <class V>
struct Floats {
  static constexpr int64_t kBytes = 4;
  static V load(const uint8_t* group, int64_t i) { return V::load(reinterpret_cast<const float*>(group) + i); }
};
template <class V>
struct Halves {
  static constexpr int64_t kBytes = 2;
  static V load(const uint8_t* group, int64_t i) { return V::from_bfloat16(reinterpret_cast<const uint16_t*>(group) + i); }
};

// Scores of some queries and groups of keys. If `kFetch`, asks for the groups `later`, a part for each element.
template <bool kFetch, class Source, int kRows, int kVectors, class V>
inline void multiply_keys(const float* queries, int64_t width, int64_t size, const uint8_t* const* groups,
                          const uint8_t* const* later, float* scores, int64_t scores_step = kTilePositions) {
  V sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) sums[m][v] = V::all(0.0f);
  for (int64_t d = 0; d < size; d++) {
    V keys[kVectors];
    if constexpr (kFetch) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) fetch(later[v] + d * kGroupPositions * Source::kBytes);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) keys[v] = Source::load(groups[v], d * kGroupPositions);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++) {
      const V query = V::all(queries[m * width + d]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) sums[m][v] = fused(query, keys[v], sums[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) V::store(scores + m * scores_step + v * kGroupPositions, sums[m][v]);
}

// Adds values of positions [first, last) of a tile to columns of the results, which are scaled by `factors` before.
// If `kFetch`, asks for a part of `later` for each position and 16 columns.
template <bool kFetch, class Source, int kRows, int kVectors, class V>
inline void add_values(const float* weights, const float* factors, const uint8_t* const* groups, int64_t first,
                       int64_t last, int64_t width, const uint8_t* later, float* results) {
  V sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++)
      sums[m][v] = multiply(V::load(results + m * width + 16 * v), V::all(factors[m]));
  for (int64_t n = first; n < last; n++) {
    const uint8_t* group = groups[n / kGroupPositions];
    V values[kVectors];
    if constexpr (kFetch) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) fetch(later + (v * kTilePositions + n) * 16 * Source::kBytes);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) values[v] = Source::load(group, n % kGroupPositions * width + 16 * v);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++) {
      const V weight = V::all(weights[m * kTilePositions + n]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) sums[m][v] = fused(weight, values[v], sums[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) V::store(results + m * width + 16 * v, sums[m][v]);
}

// A tile of 64 positions for some queries.
struct Tile {
  const uint8_t* keys[kGroups];    // as `Source` reads them
  const uint8_t* values[kGroups];
  const uint8_t* own_values[kGroups];  // as they are cached
  const uint8_t* next_keys[kGroups];   // of the next tile
  int64_t first, last;                 // positions that any query of the item sees
};

template <bool kFetch, class Source, int kRows, class V>
inline void score_rows(const Tile& tile, const float* queries, int64_t width, int64_t size, float* scores) {
  const int64_t begin = tile.first / kGroupPositions, end = (tile.last + 15) / kGroupPositions;
  int64_t group = begin;
  for (; group + V::kTogether <= end; group += V::kTogether)
    multiply_keys<kFetch, Source, kRows, V::kTogether, V>(queries, width, size, tile.keys + group, tile.own_values + group,
                                                  scores + group * kGroupPositions);
  for (; group < end; group++)
    multiply_keys<kFetch, Source, kRows, 1, V>(queries, width, size, tile.keys + group, tile.own_values + group,
                                       scores + group * kGroupPositions);
}

template <bool kFetch, class Source, int kRows, class V>
inline void value_rows(const Tile& tile, const float* weights, const float* factors, int64_t width, float* results) {
  const uint8_t* groups[kGroups];
  const uint8_t* later;
  int64_t column = 0;
  const auto shifted = [&] {
    for (int64_t g = tile.first / kGroupPositions; g < (tile.last + 15) / kGroupPositions; g++)
      groups[g] = tile.values[g] + column * Source::kBytes;
    const int64_t part = column / 16 * kTilePositions;  // of [kGroups, width] elements of keys
    later = tile.next_keys[part / width] + part % width * kGroupPositions * Source::kBytes;
  };
  for (; column + 16 * V::kTogether <= width; column += 16 * V::kTogether) {
    shifted();
    add_values<kFetch, Source, kRows, V::kTogether, V>(weights, factors, groups, tile.first, tile.last, width, later,
                                               results + column);
  }
  for (; column < width; column += 16) {
    shifted();
    add_values<kFetch, Source, kRows, 1, V>(weights, factors, groups, tile.first, tile.last, width, later, results + column);
  }
}

// The scores of some queries and keys that are stored as values: sums over 16 lanes in order, then over these.
template <class Source, int kRows, class V>
inline void score_stored_values(const Tile& tile, const float* queries, int64_t width, int64_t size, float* scores) {
  constexpr int kKeys = V::kTogether > 1 ? 2 : 1;
  for (int64_t n = tile.first / kKeys * kKeys; n < tile.last; n += kKeys) {
    const uint8_t* group = tile.keys[n / kGroupPositions];
    const int64_t at = n % kGroupPositions * width;
    V sums[kRows][kKeys];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 2
      for (int k = 0; k < kKeys; k++) sums[m][k] = V::all(0.0f);
    for (int64_t d = 0; d < width; d += 16) {
      V keys[kKeys];
#pragma GCC unroll 2
      for (int k = 0; k < kKeys; k++) keys[k] = Source::load(group, at + k * width + d);
      if (d + 16 > size)
#pragma GCC unroll 2
        for (int k = 0; k < kKeys; k++) keys[k] = only_lanes(keys[k], 0, size - d, 0.0f);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; m++) {
        const V query = V::load(queries + m * width + d);
#pragma GCC unroll 2
        for (int k = 0; k < kKeys; k++) sums[m][k] = fused(query, keys[k], sums[m][k]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 2
      for (int k = 0; k < kKeys; k++) scores[m * kTilePositions + n + k] = sum_of(sums[m][k]);
  }
}

// Biases of 16 positions, the first of them `distance` behind the query (before it if that is negative).
template <class V>
inline V near_of(const float* near, int64_t reach, int64_t distance) {
  if (distance >= -reach && distance + 15 <= reach) return V::load(near + reach + distance);
  float each[16];
  for (int64_t i = 0; i < 16; i++) {
    const int64_t d = distance + i;
    each[i] = near[reach + (d < -reach ? -reach : d > reach ? reach : d)];
  }
  return V::load(each);
}

// Calls `work` with 1 to kRows queries at a time, groups of nearly equal size, and whether these are all: then they wait
// for memory, else they share what they read.
template <int kRows, class V, class Work>
inline void choose_rows(int64_t row, int64_t count, bool all, bool halves, const Work& work) {
  if (count == kRows) {
    constexpr std::integral_constant<int, kRows> rows;
    if (halves) return work(row, rows, std::true_type(), Halves<V>());
    if (all) return work(row, rows, std::true_type(), Floats<V>());
    return work(row, rows, std::false_type(), Floats<V>());
  }
  if constexpr (kRows > 1) choose_rows<kRows - 1, V>(row, count, all, halves, work);
}

// `halves`: keys and values are bfloat16; then one group has all queries.
template <class V, class Work>
inline void for_rows(int64_t count, bool halves, const Work& work) {
  const int64_t groups = (count + V::kQueries - 1) / V::kQueries;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t row = count * g / groups;
    choose_rows<V::kQueries, V>(row, count * (g + 1) / groups - row, groups == 1, halves, work);
  }
}

// Products by distance of the queries of an item, and of the keys of a tile. Each row holds those of consecutive distances, the
// first of which is that of column 0; there are never more than 48 + 64 - 1, from any column on.
struct NearProducts {
  static constexpr int64_t kColumns = 128, kMargin = 16;  // unseen positions are read too
  alignas(64) float memory[2 * kMargin + (kItemQueries + kTilePositions) * kColumns];
  int64_t first;

  float* query(int64_t m) { return memory + kMargin + m * kColumns; }
  float* key(int64_t n) { return query(kItemQueries + n); }
};

// Multiplies `count` rows by groups [first, last) of a table.
template <class V, class Row>
inline void near_rows(const float* table, int64_t size, int64_t first, int64_t last, const float* rows, int64_t step, int64_t count,
                      const Row& out) {
  for_rows<V>(count, false, [&](int64_t m, auto kCount, auto, auto) {
    const uint8_t* groups[V::kTogether];
    int64_t g = first;
    const auto place = [&](int64_t some) {
      for (int64_t v = 0; v < some; v++) groups[v] = reinterpret_cast<const uint8_t*>(table + (g + v) * size * kGroupPositions);
    };
    for (; g + V::kTogether <= last; g += V::kTogether) {
      place(V::kTogether);
      multiply_keys<false, Floats<V>, decltype(kCount)::value, V::kTogether, V>(
          rows + m * step, step, size, groups, groups, out(m) + (g - first) * kGroupPositions, NearProducts::kColumns);
    }
    for (; g < last; g++) {
      place(1);
      multiply_keys<false, Floats<V>, decltype(kCount)::value, 1, V>(rows + m * step, step, size, groups, groups,
                                                                     out(m) + (g - first) * kGroupPositions, NearProducts::kColumns);
    }
  });
}

// Computes the products of an item and a tile whose first position is `base`.
template <class V>
inline void multiply_near(const Attention& a, const AttentionItem& item, const Tile& tile, int64_t base, const float* queries,
                          NearProducts* products) {
  const AttentionSizes& s = a.sizes;
  const auto column = [&](int64_t distance) { return s.reach + (distance < -s.reach ? -s.reach : distance > s.reach ? s.reach : distance); };
  const int64_t first = column(base + tile.first - (item.first + item.count - 1)) / kGroupPositions;
  const int64_t last = column(base + tile.last - 1 - item.first) / kGroupPositions + 1;
  const int64_t table = item.head * a.near_groups * s.size * kGroupPositions;
  products->first = first * kGroupPositions;
  near_rows<V>(a.near_keys + table, s.size, first, last, queries, s.width(), item.count, [&](int64_t m) { return products->query(m); });
  const float* keys = a.key + (a.begins[item.row] + base + tile.first) * a.key_step + item.head * s.size;
  near_rows<V>(a.near_queries + table, s.size, first, last, keys, a.key_step, tile.last - tile.first,
               [&](int64_t n) { return products->key(tile.first + n); });
}

// The products of query `m` and of 16 keys from `n` of the tile on, the first of them `distance` behind the query.
template <class V>
inline V near_scores(NearProducts* products, int64_t reach, int64_t m, int64_t n, int64_t distance) {
  const float* query = products->query(m);
  const int64_t begin = reach - products->first;
  float own[16], others[16];
  const bool whole = distance >= -reach && distance + 15 <= reach;
  for (int64_t i = 0; i < 16; i++) {
    const int64_t d = distance + i, column = begin + (whole ? d : d < -reach ? -reach : d > reach ? reach : d);
    if (!whole) own[i] = query[column];
    others[i] = products->key(n + i)[column];
  }
  return add(whole ? V::load(query + begin + distance) : V::load(own), V::load(others));
}

// Turns the scores of a query into weights relative to the new maximum; returns the factor of what was summed before.
// It sees positions [first, last) of the tile, and is at the last of these if it has a slope. `near` returns what is added
// by distance to the scores of 16 positions from one on.
template <class V, class Near>
inline float weigh(const AttentionSizes& s, const Tile& tile, float slope, const Near& near, int64_t first, int64_t last,
                   float* scores, float* most, float* sums) {
  const int64_t begin = tile.first / kGroupPositions, end = (tile.last + 15) / kGroupPositions;
  V largest = V::all(kLowest), total = V::all(0.0f);
  for (int64_t g = begin; g < end; g++) {
    V x = V::load(scores + 16 * g);
    if (s.softcap > 0) x = capped(x, s.softcap);
    if (slope != 0) x = sloped(x, slope, last - 1 - 16 * g);
    if (s.reach > 0) x = add(x, near(16 * g));
    if (16 * g < first || 16 * g + 16 > last) x = only_lanes(x, first - 16 * g, last - 16 * g, kLowest);
    V::store(scores + 16 * g, x);
    largest = maximum(largest, x);
  }
  const float old = *most, found = largest.largest();
  *most = found > old ? found : old;
  const V shift = V::all(*most);
  for (int64_t g = begin; g < end; g++) {
    V x = exponential(subtract(V::load(scores + 16 * g), shift));
    if (16 * g < first || 16 * g + 16 > last) x = only_lanes(x, first - 16 * g, last - 16 * g, 0.0f);
    V::store(scores + 16 * g, x);
    total = add(total, x);
  }
  const float factor = exponential_of<V>(old - *most);
  V::store(sums, fused(V::load(sums), V::all(factor), total));
  return factor;
}

template <class V>
struct Scratch {
  alignas(64) float queries[kItemQueries * kWideHead];
  alignas(64) float results[2 * kItemQueries * kWideHead];
  alignas(64) float scores[kItemQueries * kTilePositions];
  alignas(64) float sums[kItemQueries * 16];
  alignas(64) float keys[kTilePositions * kLargestHead];  // converted ones
  alignas(64) float values[kTilePositions * kLargestHead];
  NearProducts near;
  float factors[kItemQueries], most[2 * kItemQueries], sum[2 * kItemQueries];
};

// Computes the state of one part.
template <class V>
inline void attend_part(const Attention& a, const AttentionItem& item, int64_t part, Scratch<V>* memory,
                        const State& state) {
  const AttentionSizes& s = a.sizes;
  const int64_t width = s.width(), count = item.count, shared = s.shared();
  clear(state, count, width);
  memset(memory->sums, 0, sizeof(float) * static_cast<size_t>(16 * count));
  const Range all = a.seen(item.row, item.first / shared, (item.first + count - 1) / shared);
  const int64_t end = all.last <= (part + 1) * kPartPositions ? all.last : (part + 1) * kPartPositions;
  const bool halves = s.cache == CacheType::bfloat16 && count <= V::kQueries;  // read as they are
  const bool converted = s.cache != CacheType::float32 && !halves;
  for (int64_t base = part * kPartPositions; base < end; base += kTilePositions) {
    if (base + kTilePositions <= all.first) continue;
    Tile tile;
    tile.first = all.first > base ? all.first - base : 0;
    tile.last = end - base < kTilePositions ? end - base : kTilePositions;
    for (int64_t g = tile.first / kGroupPositions; g < (tile.last + 15) / kGroupPositions; g++) {
      const int64_t position = base + g * kGroupPositions, place = g * kGroupPositions * width;
      const uint8_t* keys = a.group(a.keys, item.row, item.head, position);
      tile.keys[g] = converted ? read_group<V>(s, keys, memory->keys + place) : keys;
      tile.own_values[g] = a.group(a.values, item.row, item.head, position);
    }
    for (int64_t g = 0; g < kGroups; g++) {  // all of them: any may be asked for
      const int64_t next = base + kTilePositions + g * kGroupPositions;
      tile.next_keys[g] = a.group(a.keys, item.row, item.head, next >= all.last ? base + tile.first : next);
    }
    for_rows<V>(count, halves, [&](int64_t m, auto rows, auto fetched, auto source) {
      if (s.one)
        return score_stored_values<decltype(source), decltype(rows)::value, V>(tile, memory->queries + m * width, width,
                                                                              s.size, memory->scores + m * kTilePositions);
      score_rows<decltype(fetched)::value, decltype(source), decltype(rows)::value, V>(
          tile, memory->queries + m * width, width, s.size, memory->scores + m * kTilePositions);
    });
    if (a.near_keys != nullptr) multiply_near<V>(a, item, tile, base, memory->queries, &memory->near);
    for (int64_t m = 0; m < count; m++) {
      const int64_t own = (item.first + m) / shared;
      const Range seen = a.seen(item.row, own, own);
      const int64_t first = seen.first > base ? seen.first - base : 0, last = seen.last - base;
      float* scores = memory->scores + m * kTilePositions;
      memory->factors[m] = 1.0f;
      const auto near = [&](int64_t position) {
        const int64_t distance = base + position - a.past[item.row] - own;
        return a.near != nullptr ? near_of<V>(near_by(a, item, m), s.reach, distance)
                                 : near_scores<V>(&memory->near, s.reach, m, position, distance);
      };
      if (last > 0 && first < kTilePositions)
        memory->factors[m] = weigh<V>(s, tile, slope_of(a, item, m), near, first, last, scores, state.most + m, memory->sums + 16 * m);
      else
        memset(scores, 0, sizeof(float) * static_cast<size_t>(kTilePositions));
    }
    for (int64_t g = tile.first / kGroupPositions; g < (tile.last + 15) / kGroupPositions; g++)
      tile.values[g] = s.one       ? tile.keys[g]
                       : converted ? read_group<V>(s, tile.own_values[g], memory->values + g * kGroupPositions * width)
                                 : tile.own_values[g];
    for_rows<V>(count, halves, [&](int64_t m, auto rows, auto fetched, auto source) {
      value_rows<decltype(fetched)::value, decltype(source), decltype(rows)::value, V>(
          tile, memory->scores + m * kTilePositions, memory->factors + m, width, state.result + m * width);
    });
  }
  for (int64_t m = 0; m < count; m++)
    for (int i = 0; i < 16; i++) state.sum[m] += memory->sums[16 * m + i];
}

template <class V>
void attend(const Attention& a, const AttentionItem& item, int64_t first_part, int64_t last_part) {
  const AttentionSizes& s = a.sizes;
  const int64_t width = s.width(), shared = s.shared(), count = item.count;
  Scratch<V> memory;
  for (int64_t m = 0; m < count; m++) {
    const int64_t query = item.first + m, token = a.begins[item.row] + query / shared;
    const float* x = a.query + token * a.query_step + (item.head * shared + query % shared) * s.size;
    rotate<V>(a, token, x, s.scale, memory.queries + m * width);
    for (int64_t i = s.size; i < width; i++) memory.queries[m * width + i] = 0.0f;
  }
  if (item.states != nullptr) {
    for (int64_t part = first_part; part < last_part; part++)
      attend_part<V>(a, item, part, &memory, part_state(a, item, part));
    return;
  }
  const State all = {memory.most, memory.sum, memory.results, width};
  const State next = {memory.most + count, memory.sum + count, memory.results + count * width, width};
  clear(all, count, width);
  for (int64_t part = first_part; part < last_part; part++) {
    attend_part<V>(a, item, part, &memory, next);
    merge<V>(all, next, count, width);
  }
  write_outputs<V>(a, item, all);
}

inline int64_t item_queries(const AttentionSizes& s) {
  static_assert(kLargestHead <= 2 * kWideHead, "queries and results of an item must fit into Scratch");
  return s.width() > kWideHead ? kItemQueries / 2 : kItemQueries;
}

}  // namespace
}  // namespace carryall
