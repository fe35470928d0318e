// The walk of an item through its parts of 256 positions, shared by kernels that multiply the queries of an item by a
// whole part: its scores, their weights, its values. Included by one source per kernel, so in an anonymous namespace.
//
// A query's result depends on no other query and no cut of the work: parts begin at multiples of 256 positions, a product
// adds its terms in a fixed order, and a position that a query does not see has the weight 0.
#pragma once
#include "attention_kernel.h"
#include "integers.h"

namespace carryall {
namespace {

constexpr int64_t kPartGroups = kPartPositions / kGroupPositions;
constexpr float kLog2e = 1.44269504f;  // scores are multiples of log(2), so that weights are powers of 2

// The positions of a part that queries of an item see, and the memory that is asked for meanwhile.
class Part {
 public:
  // `fetches`: the keys of the item after this one are asked for behind those of its own next part.
  Part(const Attention& a, const AttentionItem& item, bool fetches)
      : a_(a), s_(a.sizes), item_(item), past_(a.past[item.row]) {
    if (!fetches || item.after == nullptr) return;
    const AttentionItem& after = *item.after;
    later_ = after.first_part * kPartPositions;
    later_end_ = smaller(seen_of(after, 0, after.count).last, later_ + kPartPositions);
  }

 protected:
  // The positions of the part that any of the queries sees.
  Range seen_by(int64_t first, int64_t count) const {
    const Range seen = seen_of(item_, first, count);
    return {larger(0, seen.first - base_), smaller(seen.last - base_, kPartPositions)};
  }

  // Chooses the keys to ask for while the values of some groups are multiplied, a group for each: those of the next part,
  // then those of the first part of the item after this one.
  void plan_fetches(Range groups, const uint8_t** next_keys) {
    const int64_t end = seen_of(item_, 0, item_.count).last;
    int64_t next = base_ + kPartPositions;
    for (int64_t g = groups.first; g < groups.last; g++) {
      if (next < end) {
        next_keys[g] = a_.group(a_.keys, item_.row, item_.head, next);
        next += kGroupPositions;
      } else if (later_ < later_end_) {
        next_keys[g] = a_.group(a_.keys, item_.after->row, item_.after->head, later_);
        later_ += kGroupPositions;
      } else {
        next_keys[g] = a_.group(a_.keys, item_.row, item_.head, base_ + kGroupPositions * groups.first);
      }
    }
  }

  // Copies a query of the item, rotated and scaled, to `x`, and asks for one of a later token.
  template <class V>
  void read_query(int64_t query, float scale, float* x) const {
    const int64_t shared = s_.shared(), all = item_.first + query, token = a_.begins[item_.row] + all / shared;
    const float* from = a_.query + token * a_.query_step + (item_.head * shared + all % shared) * s_.size;
    if (query + kTokensAhead * shared < item_.count)
      for (int64_t i = 0; i < s_.size; i += kLineFloats) __builtin_prefetch(from + kTokensAhead * a_.query_step + i);
    rotate<V>(a_, token, from, scale, x);
  }

  const Attention& a_;
  const AttentionSizes& s_;
  const AttentionItem& item_;
  const int64_t past_;
  int64_t base_ = 0;

 private:
  // The positions that any of the queries of an item sees.
  Range seen_of(const AttentionItem& item, int64_t first, int64_t count) const {
    const int64_t query = item.first + first;
    return a_.seen(item.row, query / s_.shared(), (query + count - 1) / s_.shared());
  }

  int64_t later_ = 0, later_end_ = 0;  // positions of the item after this one that are not asked for
};

inline void copy(const State& from, int64_t count, int64_t width, const State& to) {
  memcpy(to.most, from.most, sizeof(float) * static_cast<size_t>(count));
  memcpy(to.sum, from.sum, sizeof(float) * static_cast<size_t>(count));
  for (int64_t m = 0; m < count; m++)
    memcpy(to.result + m * to.step, from.result + m * from.step, sizeof(float) * static_cast<size_t>(width));
}

// Computes parts of an item with a `Run`, kRows queries at a time. The memory has room for the states of an item in its
// first kItem places, and behind them for those of kRows queries.
template <class Run, class V, int64_t kRows, class Memory>
inline void attend_parts(const Attention& a, const AttentionItem& item, int64_t first_part, int64_t last_part,
                         Memory* memory) {
  const int64_t width = a.sizes.width();
  Run run(a, item, memory);
  const State all = {memory->most, memory->sum, memory->results, width};
  run.read_queries();
  clear(all, item.count, width);
  for (int64_t part = first_part; part < last_part; part++) {
    run.read_part(part);
    for (int64_t m = 0; m < item.count; m += kRows) {
      const int64_t count = smaller(kRows, item.count - m);
      const State next = run.attend(m, count);
      if (item.states != nullptr)
        copy(next, count, width, part_state(a, item, part).from(m));
      else
        merge<V>(all.from(m), next, count, width);
    }
  }
  if (item.states == nullptr) write_outputs<V>(a, item, all);
}

}  // namespace
}  // namespace carryall
