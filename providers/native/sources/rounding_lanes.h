// Rounding of kLanes outputs at once. Included by one source per instruction set, after a definition of CARRYALL_LANES. Every lane computes as NumPy does: sums go
// from the first input to the last, no product is fused with a sum.
#pragma once
#include <cmath>
#include <cstring>

#include "layout.h"
#include "rounding.h"
#include "sweep.h"

namespace carryall {
namespace {

constexpr int64_t kMostInputs = 256;   // of a block or group
constexpr int64_t kMostBlocks = 16;    // of a group
constexpr float kFar = 1 << 20;
constexpr float kMostMultiple = 15, kLargestByte = 127, kFlat = 1e-3f, kSmall = 1e-30f;
constexpr float kSmallest = 1.17549435e-38f;  // the reciprocal of a smaller number exceeds float

constexpr int kLanes = CARRYALL_LANES;

struct Lanes {
  typedef float Float __attribute__((vector_size(4 * CARRYALL_LANES)));
  typedef int32_t Int __attribute__((vector_size(4 * CARRYALL_LANES)));
  using Mask = Int;

  CARRYALL_INLINE static Float all(float x) { return x - Float{}; }
  CARRYALL_INLINE static Float select(Mask mask, Float a, Float b) { return mask ? a : b; }
  CARRYALL_INLINE static Float least(Float a, Float b) { return a < b ? a : b; }
  CARRYALL_INLINE static Float most(Float a, Float b) { return a > b ? a : b; }
  CARRYALL_INLINE static Float clip(Float x, Float low, Float high) { return least(most(x, low), high); }
  // To nearest, halves to even; |x| is below 2^22.
  CARRYALL_INLINE static Float nearest(Float x) { return (x + 12582912.f) - 12582912.f; }
  CARRYALL_INLINE static Float floor(Float x) {
    const Float y = nearest(x);
    return y > x ? y - 1.f : y;
  }
  CARRYALL_INLINE static Float magnitude(Float x) { return x < 0 ? -x : x; }
  CARRYALL_INLINE static bool finite(Float x) {
    const Mask same = x - x == 0;
    bool all = true;
    for (int i = 0; i < kLanes; i++) all = all && same[i] != 0;
    return all;
  }
  CARRYALL_INLINE static Float reciprocal(Float x) { return select(magnitude(x) < kSmallest, Float{}, 1.f / x); }
  CARRYALL_INLINE static Float quotient(Float product, Float square) { return product / most(square, all(kSmall)); }
  CARRYALL_INLINE static Float root(Float x) {
    for (int i = 0; i < kLanes; i++) x[i] = std::sqrt(x[i]);
    return x;
  }

  // Of a block: <w, q> and <q, q>, and for lines the weighted sum of q.
  struct Sums {
    Float product, square, level;
  };

  struct Block {
    const Float* weights;
    const Float* importance;  // null for 1
    int64_t size;
  };

  // The bounds of levels minus zero points.
  struct Bounds {
    Float low, high;
    CARRYALL_INLINE Bounds(const Rounding& r, Float zero) : low(all(lowest(r)) - zero), high(all(highest(r)) - zero) {}
  };

  CARRYALL_INLINE static float lowest(const Rounding& r) { return r.is_signed ? -static_cast<float>(1 << (r.bits - 1)) : 0; }
  CARRYALL_INLINE static float highest(const Rounding& r) { return lowest(r) + static_cast<float>((1 << r.bits) - 1); }

  CARRYALL_INLINE static Float level(Float weight, Float inverse, const Bounds& bounds) {
    return nearest(clip(weight * inverse, bounds.low, bounds.high));
  }

  CARRYALL_INLINE static Sums products(const Rounding& r, const Block& block, Float scale, Float zero) {
    const Bounds bounds(r, zero);
    const Float inverse = reciprocal(scale);
    Sums sums{};
    if (block.importance == nullptr) {
      for (int64_t k = 0; k < block.size; k++) {
        const Float q = level(block.weights[k], inverse, bounds);
        sums.product += block.weights[k] * q;
        sums.square += q * q;
      }
      return sums;
    }
    for (int64_t k = 0; k < block.size; k++) {
      const Float q = level(block.weights[k], inverse, bounds), weighted = q * block.importance[k];
      sums.product += block.weights[k] * weighted;
      sums.square += q * weighted;
      sums.level += weighted;
    }
    return sums;
  }

  struct Range {
    Float scale, zero;
  };

  // The scale and zero point of a part of the full range; whether all weights are finite.
  struct Full {
    Float middle, half;
    bool is_finite;

    CARRYALL_INLINE Full(const Rounding& r, const Block& block) {
      Float top = block.weights[0], bottom = top, sum{};
      for (int64_t k = 0; k < block.size; k++) {
        top = most(block.weights[k], top);
        bottom = least(block.weights[k], bottom);
        sum += block.weights[k] - block.weights[k];  // 0, or NaN
      }
      is_finite = finite(sum);
      if (r.is_signed) {
        middle = Float{};
        half = select(top > -bottom, top, bottom) / all(lowest(r));
        return;
      }
      top = most(top, Float{});
      bottom = least(bottom, Float{});
      middle = (top + bottom) / 2.f;
      half = (top - bottom) / 2.f;
    }

    CARRYALL_INLINE Range part(const Rounding& r, double share) const {
      const float shrink = static_cast<float>(share);
      if (r.is_signed) return {half * shrink, Float{}};
      const Float scale = half * static_cast<float>(2 * share / highest(r));
      const Float zero = (half * shrink - middle) * reciprocal(scale);
      return {scale, clip(nearest(clip(zero, all(-1024), all(1024))), Float{}, all(highest(r)))};
    }
  };

  CARRYALL_INLINE static Range best_range(const Rounding& r, const Block& block, const Full& full) {
    Range best = full.part(r, r.ranges[0]);
    Float gain = all(-1);
    for (int64_t i = 0; i < r.range_count; i++) {
      const Range tried = full.part(r, r.ranges[i]);
      const Sums sums = products(r, block, tried.scale, tried.zero);
      const Float fitted = quotient(sums.product, sums.square);
      const Mask better = (fitted != 0) & (fitted * sums.product > gain);
      gain = select(better, fitted * sums.product, gain);
      best = {select(better, fitted, best.scale), select(better, tried.zero, best.zero)};
    }
    return best;
  }

  // The rounded level where the weighted line through levels and weights is 0.
  CARRYALL_INLINE static Float crossing(const Sums& sums, Float value) {
    const Float spread = sums.square - sums.level * sums.level;
    const Float slope = (sums.product - sums.level * value) * reciprocal(spread);
    const Float zero = sums.level - value * reciprocal(slope);
    return select(spread > kFlat * sums.square, nearest(clip(zero, all(-1024), all(1024))), Float{});
  }

  CARRYALL_INLINE static Range best_line(const Rounding& r, Block block, const Full& full, Float* importance) {
    const Range start = full.part(r, 1);
    Float squares{}, total{}, value{};
    for (int64_t k = 0; k < block.size; k++) squares += block.weights[k] * block.weights[k];
    const Float mean = root(squares / all(static_cast<float>(block.size)));
    for (int64_t k = 0; k < block.size; k++) total += importance[k] = magnitude(block.weights[k]) + mean;
    const Float inverse = reciprocal(total);
    for (int64_t k = 0; k < block.size; k++) value += block.weights[k] * (importance[k] *= inverse);
    block.importance = importance;
    Sums sums = products(r, block, start.scale, start.zero);
    Range best{quotient(sums.product, sums.square), start.zero};
    Float gain = best.scale * sums.product;
    const double span = r.is_signed ? -lowest(r) : highest(r);
    for (int64_t i = 0; i < r.range_count; i++) {
      sums = products(r, block, start.scale * static_cast<float>(span / (span + r.ranges[i])), start.zero);
      Float moved = start.zero;
      if (!r.is_signed) {
        moved = clip(start.zero + crossing(sums, value), Float{}, all(highest(r)));
        const Float move = moved - start.zero;
        sums.product = sums.product - move * value;
        sums.square = sums.square + move * (move - 2.f * sums.level);
      }
      const Float fitted = sums.product * reciprocal(sums.square);
      const Mask better = (fitted != 0) & (fitted * sums.product > gain);
      gain = select(better, fitted * sums.product, gain);
      best = {select(better, fitted, best.scale), select(better, moved, best.zero)};
    }
    sums = products(r, block, best.scale, best.zero);
    return {quotient(sums.product, sums.square), best.zero};
  }

  // To 7 significant bits, halves to even, and to multiples of 2^-24.
  CARRYALL_INLINE static Float short_unit(Float x) {
    Int bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0xffff + ((bits >> 17) & 1)) & ~0x1ffff;
    memcpy(&x, &bits, sizeof x);
    const Float steps = x * 16777216.f;
    return select(magnitude(steps) < 4194304.f, nearest(steps), steps) * 5.9604644775390625e-8f;
  }

  // The largest multiple with which all weights fit a byte.
  CARRYALL_INLINE static Float most_multiple(const Rounding& r, Float zero) {
    return least(all(kMostMultiple), floor(all(kLargestByte) / most(zero, all(highest(r)) - zero)));
  }

  // As numpy.add.reduceat: the first, and the sum of the others.
  CARRYALL_INLINE static Float sum(const Float* values, int64_t count) {
    if (count == 1) return values[0];
    Float rest = values[1];
    for (int64_t b = 2; b < count; b++) rest += values[b];
    return values[0] + rest;
  }

  CARRYALL_INLINE static void share_unit(const Rounding& r, const Block* blocks, int64_t count, Range* ranges, Float* multiples) {
    Float free[kMostBlocks], limits[kMostBlocks];
    Float smallest = all(-1);
    for (int64_t b = 0; b < count; b++) {
      free[b] = most(ranges[b].scale, Float{});
      limits[b] = most_multiple(r, ranges[b].zero);
      multiples[b] = all(1);
      smallest = most(smallest, free[b] / limits[b]);
    }
    Float gain = all(-1), unit{};
    for (int64_t i = 0; i < r.unit_count; i++) {
      const Float tried = smallest * static_cast<float>(r.units[i]), inverse = reciprocal(tried);
      Float multiple[kMostBlocks], product[kMostBlocks] = {}, square[kMostBlocks] = {};
      for (int64_t b = 0; b < count; b++) {
        const Float below = clip(floor(clip(free[b] * inverse, Float{}, all(1024))), all(1), limits[b]);
        const Float above = least(below + 1.f, limits[b]);
        const Sums lower = products(r, blocks[b], below * tried, ranges[b].zero);
        const Sums upper = products(r, blocks[b], above * tried, ranges[b].zero);
        const Mask better = upper.product * quotient(upper.product, upper.square) >
                            lower.product * quotient(lower.product, lower.square);
        multiple[b] = select(better, above, below);
        product[b] = select(better, upper.product, lower.product) * multiple[b];
        square[b] = select(better, upper.square, lower.square) * multiple[b] * multiple[b];
      }
      const Float products_sum = sum(product, count), squares_sum = sum(square, count);
      const Float fitted = short_unit(quotient(products_sum, squares_sum));
      const Float gained = fitted * (2.f * products_sum - fitted * squares_sum);
      const Mask better = (fitted > 0) & (gained > gain);
      gain = select(better, gained, gain);
      unit = select(better, fitted, unit);
      for (int64_t b = 0; b < count; b++) multiples[b] = select(better, multiple[b], multiples[b]);
    }
    for (int64_t b = 0; b < count; b++) {
      const Float scale = multiples[b] * unit, zero = ranges[b].zero;
      Float best = zero, lowest_error = all(INFINITY);
      for (int way = 0; way < 3; way++) {
        const float move = way == 0 ? 0.f : way == 1 ? -1.f : 1.f;
        const Float tried = clip(zero + move, Float{}, all(highest(r)));
        const Sums sums = products(r, blocks[b], scale, tried);
        const Float error = scale * (scale * sums.square - 2.f * sums.product);
        const Mask better = (error < lowest_error) & (multiples[b] <= most_multiple(r, tried));
        best = select(better, tried, best);
        lowest_error = select(better, error, lowest_error);
      }
      ranges[b] = {scale, best};
    }
  }

  // Writes `count` lanes of a block.
  CARRYALL_INLINE static void write(const Rounding& r, const Block& block, Range range, int64_t input, int64_t output, int64_t count) {
    const Bounds bounds(r, range.zero);
    const Float inverse = reciprocal(range.scale);
    uint8_t* values = r.values + input * r.value_input_step + output * r.value_output_step;
    for (int64_t k = 0; k < block.size; k++) {
      const Float stored = level(block.weights[k], inverse, bounds) + range.zero;
      for (int64_t i = 0; i < count; i++)
        values[k * r.value_input_step + i * r.value_output_step] = static_cast<uint8_t>(static_cast<int32_t>(stored[i]));
    }
    const int64_t at = input / r.block * r.outputs + output;
    for (int64_t i = 0; i < count; i++) {
      r.scales[at + i] = range.scale[i];
      if (r.zero_points != nullptr) r.zero_points[at + i] = static_cast<uint8_t>(range.zero[i]);
    }
  }

  CARRYALL_INLINE static void read(const Rounding& r, int64_t input, int64_t inputs, int64_t output, int64_t count, Float* panel) {
    const float* from = r.weights + input * r.input_step + output * r.output_step;
    if (r.input_step != 1 || count < kLanes) {
      for (int64_t k = 0; k < inputs; k++)
        for (int64_t i = 0; i < kLanes; i++) panel[k][i] = i < count ? from[k * r.input_step + i * r.output_step] : 0;
      return;
    }
    float* to = reinterpret_cast<float*>(panel);
    for (int64_t i = 0; i < kLanes; i++)
      for (int64_t k = 0; k < inputs; k++) to[k * kLanes + i] = from[k + i * r.output_step];
  }

  static Outcome round(const Rounding& r, int64_t first, int64_t last) {
    Float panel[kMostInputs], importance[kMostInputs];
    const int64_t step = r.group > r.block ? r.group : r.block;
    for (int64_t output = first; output < last; output += kLanes)
      for (int64_t input = 0; input < r.inputs; input += step) {
        const int64_t inputs = r.inputs - input < step ? r.inputs - input : step;
        const int64_t count = last - output < kLanes ? last - output : kLanes;
        read(r, input, inputs, output, count, panel);
        if (r.importance != nullptr)
          for (int64_t k = 0; k < inputs; k++) importance[k] = all(r.importance[input + k]);
        Block blocks[kMostBlocks];
        Range ranges[kMostBlocks];
        const int64_t size = inputs / r.block;
        for (int64_t b = 0; b < size; b++) {
          blocks[b] = {panel + b * r.block, r.importance == nullptr ? nullptr : importance + b * r.block, r.block};
          const Full full(r, blocks[b]);
          if (!full.is_finite) return Outcome::not_finite;
          ranges[b] = r.search == Search::ranges ? best_range(r, blocks[b], full) : best_line(r, blocks[b], full, importance);
          if (!finite(ranges[b].scale)) return Outcome::too_large;
        }
        Float multiples[kMostBlocks];
        if (r.group != 0) share_unit(r, blocks, size, ranges, multiples);
        if (r.group != 0 && r.multiples != nullptr)
          for (int64_t b = 0; b < size; b++)
            for (int64_t i = 0; i < count; i++) r.multiples[(input / r.block + b) * r.outputs + output + i] = multiples[b][i];
        for (int64_t b = 0; b < size; b++) write(r, blocks[b], ranges[b], input + b * r.block, output, count);
      }
    return Outcome::done;
  }

  static constexpr int64_t kMostRows = 128;  // Sweep::is_supported

  CARRYALL_INLINE static Float load(const float* from, int64_t count) {
    Float x{};
    memcpy(&x, from, 4 * count);
    return x;
  }

  static void sweep(const Sweep& s, int64_t first, int64_t last) {
    Float left[kMostRows];
    for (int64_t output = first; output < last; output += kLanes) {
      const int64_t count = last - output < kLanes ? last - output : kLanes;
      for (int64_t i = 0; i < s.rows; i++) left[i] = load(s.left + i * s.left_step + output, count);
      for (int64_t i = 0; i < s.rows; i++) {
        const float* row = s.matrix + i * s.matrix_step;
        float* levels = s.levels + i * s.levels_step + output;
        const int64_t block = s.blocks[i] * s.outputs + output;
        const Float scale = load(s.scales + block, count), zero = load(s.zero_points + block, count);
        const Float inverse = select(scale != 0, 1.f / scale, Float{});
        const Float whole = nearest(clip(left[i] * inverse, all(-kFar), all(kFar)));
        const Float level = clip(whole + zero, all(s.low), all(s.high)), error = (left[i] - (level - zero) * scale) / row[i];
        memcpy(levels, &level, 4 * count);
        for (int64_t j = i + 1; j < s.rows; j++) left[j] -= row[j] * error;
      }
      for (int64_t i = 0; i < s.rows; i++) memcpy(s.left + i * s.left_step + output, left + i, 4 * count);
    }
  }
};

}  // namespace
}  // namespace carryall
