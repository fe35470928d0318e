// The kernel over an instruction set `Isa`. Included by one source per instruction set, which compiles it with its
// own flags: everything here is in an anonymous namespace, so that the linker never merges two of them.
//
// Every row goes through the same operations in the same order, whatever the rows beside it: integer sums are exact,
// and floats are added block by block with fused multiply-adds. So a row's result depends on no other row.
#pragma once
#include <cstring>

#include "kernels.h"
#include "quantize_block.h"

namespace carryall {
namespace {

void quantize(const float* x, int64_t inputs, int64_t block, Rows rows, int64_t row) {
  int8_t* values = rows.values + row * rows.step;
  int32_t* sums = rows.sums + row * rows.blocks;
  for (int64_t s = 0; s < rows.shares; s++) {
    const int64_t first = s * rows.share, end = first + rows.share < rows.blocks ? first + rows.share : rows.blocks;
    const int64_t stop = end * block < inputs ? end * block : inputs;
    const Rounding how = rounding(largest_magnitude(x + first * block, stop - first * block));
    rows.scales[row * rows.shares + s] = how.scale;
    int32_t total = 0;
    for (int64_t b = first; b < end; b++) {
      const int64_t start = b * block, count = inputs - start < block ? inputs - start : block;
      total += sums[b] = round_block(x + start, count, block, how, values + start);
    }
    rows.starts[row * rows.shares + s] = -128 * total;
  }
}

constexpr int64_t kAheadBytes = 10 << 10;  // how far ahead memory is asked for: about its latency times its bandwidth
constexpr int64_t kAheadOfStream = 4 << 10;  // the same, where scales lie beside values

constexpr int64_t kHiddenRows = 4;              // rows whose products take as long as their weights

// Asks for a share of a tile that is read soon with each of `steps` steps, into the second-level cache.
class Later {
 public:
  // Hardware foresees one stream of lines, but not that zero points, multiples and scales lie behind the values; and it
  // asks too late where the products of a line take as long as the line. `always` asks for one stream too. `together` tiles
  // are computed at a time. Where rows are computed in passes, each asks for its part, so that memory is never idle.
  //
  // Blocks of GGUF files lie one behind the other with their scales, so a single pass asks a few KB ahead of what it reads. Scales that
  // lie behind all values are read with the first of them, so there a tile is asked for as a whole.
  CARRYALL_INLINE Later(const Weights& w, int64_t tile, int64_t steps, bool always, int64_t together, int64_t pass, int64_t passes) {
    const int64_t bytes = w.tile_bytes(), ahead = kAheadBytes / bytes + 1, lines = bytes / kLine;
    const bool stream = w.halves() && passes == 1;
    const uint8_t* own = w.data + tile * bytes;
    tile += ahead < together ? together : ahead;
    if ((!always && bytes == w.blocks() * w.block_bytes()) || tile >= w.tiles()) return;
    const int64_t first = lines * pass / passes, last = lines * (pass + 1) / passes;
    data_ = stream ? own + kAheadOfStream : w.data + tile * bytes + first * kLine;
    lines_ = (last - first + steps - 1) / steps;
    step_ = stream ? bytes / steps : lines_ * kLine;
  }
  CARRYALL_INLINE Later() = default;  // asks for nothing

  CARRYALL_INLINE void fetch(int64_t step) const {
    const uint8_t* line = data_ + step * step_;
    for (int64_t i = 0; i < lines_; i++, line += kLine) __builtin_prefetch(line, 0, 2);
  }

 private:
  const uint8_t* data_ = nullptr;
  int64_t lines_ = 0, step_ = 0;  // of a step, the latter in bytes
};

// Memory that is asked for while some tiles are multiplied: the tiles after them.
class Ahead {
 public:
  Ahead(const uint8_t* data, int64_t bytes, int64_t steps)
      : line_(data), end_(data + bytes), lines_((bytes / kLine + steps - 1) / steps) {}
  // Called in each of the steps.
  CARRYALL_INLINE void fetch() {
    for (int64_t i = 0; i < lines_ && line_ < end_; i++, line_ += kLine) __builtin_prefetch(line_, 0, 2);
  }

 private:
  const uint8_t *line_, *end_;
  int64_t lines_;
};

// One tile's columns for `count` rows.
struct Part {
  const Weights* weights;
  const uint8_t* tile;
  const int8_t* values;   // of the first row
  const float* scales;
  const int32_t* sums;
  int64_t step, blocks, shares, share;
  Later later;            // in steps of a block
  const float* bias;      // of the tile, or nullptr
  Outputs y;              // from the first row and the tile's first column on
  int64_t columns;        // valid ones, 1 to 16
};

// The addresses of rows; hidden, so that they are not computed again for every input.
template <int kCount>
struct Starts {
  const int8_t* of[kCount];
  CARRYALL_INLINE Starts(const int8_t* values, int64_t step) {
    for (int m = 0; m < kCount; m++) {
      of[m] = values + m * step;
      asm("" : "+r"(of[m]));
    }
  }
};

// The first `columns` floats of x, then zeros; all zeros if x is nullptr.
template <class Isa>
CARRYALL_INLINE typename Isa::Float load_columns(const float* x, int64_t columns) {
  if (x == nullptr) return Isa::floats(0);
  if (columns >= Isa::kLanes) return Isa::load(x);
  float some[Isa::kLanes] = {};
  memcpy(some, x, sizeof(float) * static_cast<size_t>(columns));
  return Isa::load(some);
}

template <class Isa>
CARRYALL_INLINE void store_columns(float* y, typename Isa::Float result, int64_t columns) {
  if (columns >= Isa::kLanes) return Isa::store(y, result);
  float some[Isa::kLanes];
  Isa::store(some, result);
  memcpy(y, some, sizeof(float) * static_cast<size_t>(columns));
}

// For instructions that sum products of two rows in the same register: changes the sums of rows to theirs, and back.
template <class Isa>
struct Pairing {
  template <class Sums>
  CARRYALL_INLINE static void turn(Sums&) {}
};

template <class Isa, int kBits, int kCount>
void multiply_part(const Part& part) {
  using Int = typename Isa::Int;
  using Float = typename Isa::Float;
  constexpr int kSums = kCount == 1 ? 4 : kCount == 2 ? 2 : 1;  // hides the latency of one sum
  constexpr int64_t kUnit = 16 * kColumns * kBits / 8;          // bytes of 16 inputs
  constexpr int kOwn = kBits == 8 ? Isa::kByteOffset : 0;       // that Isa's products subtract already
  const Weights& w = *part.weights;
  // What the unsigned values are relative to, if it is the same for all of them.
  const int zero = (w.offsets == Offsets::minima ? 0 : kBits == 8 ? 128 : 8) - kOwn;
  const int64_t block_bytes = w.block_bytes(), value_bytes = w.value_bytes(), blocks = part.blocks;
  const bool grouped = w.group > 0;
  float spare[kColumns] = {};
  if (part.bias != nullptr) memcpy(spare, part.bias, sizeof(float) * static_cast<size_t>(part.columns));
  for (int64_t lane = 0; lane < kColumns; lane += Isa::kLanes) {
    Float result[kCount];
    for (int m = 0; m < kCount; m++) result[m] = Isa::load(spare + lane);
    const uint8_t* block = part.tile;
    const uint8_t *points = part.tile + w.points() + lane, *multiples = part.tile + w.multiples() + lane;
    for (int64_t s = 0, b = 0; s < part.shares; s++) {
      Float sum[kCount];  // over the blocks of one scale of the row; with groups an integer below 2^24
      for (int m = 0; m < kCount; m++) sum[m] = Isa::floats(0);
      const int64_t end = b + part.share < blocks ? b + part.share : blocks;
      for (; b < end; b++, block += block_bytes, points += kColumns) {
        if (lane == 0) part.later.fetch(b);
        Int sums[kCount][kSums];
        if (w.offsets == Offsets::zero_points) {
          const Int zeros = Isa::subtract(Isa::widened(points), Isa::integers(kOwn));
          for (int m = 0; m < kCount; m++) sums[m][0] = Isa::negative_product(zeros, part.sums[m * blocks + b]);
        } else {
          for (int m = 0; m < kCount; m++) sums[m][0] = Isa::integers(-zero * part.sums[m * blocks + b]);
        }
        for (int m = 0; m < kCount; m++)
          for (int t = 1; t < kSums; t++) sums[m][t] = Isa::integers(0);
        Pairing<Isa>::turn(sums);
        const int8_t* values = part.values + b * w.block;
        for (int64_t unit = 0; unit < value_bytes; unit += kUnit, values += 16)
          Isa::template accumulate<kBits, kCount, kSums>(sums, block + unit + 4 * lane, values, part.step);
        Pairing<Isa>::turn(sums);
        const float* scales = reinterpret_cast<const float*>(block + value_bytes) + lane;
        const Float scale = grouped ? Isa::converted(Isa::widened(multiples + b * kColumns)) : Isa::load(scales);
        for (int m = 0; m < kCount; m++) {
          for (int t = 1; t < kSums; t++) sums[m][0] = Isa::add(sums[m][0], sums[m][t]);
          sum[m] = Isa::fused(Isa::converted(sums[m][0]), scale, sum[m]);
        }
        if (w.offsets == Offsets::minima) {
          const Float minima = Isa::load(scales + kColumns);
          for (int m = 0; m < kCount; m++)
            sum[m] = Isa::fused(minima, Isa::floats(static_cast<float>(part.sums[m * blocks + b])), sum[m]);
        }
      }
      if (grouped) {
        const Float scale = Isa::load(reinterpret_cast<const float*>(part.tile + w.group_scales() + s * kLine) + lane);
        for (int m = 0; m < kCount; m++) sum[m] = Isa::multiply(sum[m], scale);
      }
      for (int m = 0; m < kCount; m++) result[m] = Isa::fused(sum[m], Isa::floats(part.scales[m * part.shares + s]), result[m]);
    }
    for (int m = 0; m < kCount; m++) if (lane < part.columns) store_columns<Isa>(part.y.at(m, lane), result[m], part.columns - lane);
  }
}

// The columns of a tile, one register of them after the other.
template <class Isa>
struct OneRegister {
  static constexpr int kRows = Isa::kRows;
  template <int kBits, int kCount>
  static void run(const Part& part) { multiply_part<Isa, kBits, kCount>(part); }
};

template <class Product, int kBits, int kCount>
inline void choose_count(const Part& part, int64_t count) {
  if (count == kCount) return Product::template run<kBits, kCount>(part);
  if constexpr (kCount > 1) choose_count<Product, kBits, kCount - 1>(part, count);
}

template <class Product>
void multiply(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
              int64_t first_tile, int64_t last_tile, Outputs y) {
  const int64_t count = last_row - first_row, groups = (count + Product::kRows - 1) / Product::kRows;
  for (int64_t tile = first_tile; tile < last_tile; tile++) {
    const int64_t column = tile * kColumns, left = w.outputs - column;
    for (int64_t group = 0; group < groups; group++) {
      // Groups of nearly equal size: 9 rows are 5 and 4, not 8 and 1.
      const int64_t row = first_row + count * group / groups, end = first_row + count * (group + 1) / groups;
      const Part part{&w, w.data + tile * w.tile_bytes(), rows.values + row * rows.step,
                      rows.scales + row * rows.shares, rows.sums + row * rows.blocks, rows.step, rows.blocks,
                      rows.shares, rows.share, Later(w, tile, rows.blocks, count >= kHiddenRows, 1, group, groups),
                      bias == nullptr ? nullptr : bias + column, {y.at(row, column), y.step},
                      left < kColumns ? left : kColumns};
      if (w.bits == 4) choose_count<Product, 4, Product::kRows>(part, end - row);
      else choose_count<Product, 8, Product::kRows>(part, end - row);
    }
  }
}

}  // namespace
}  // namespace carryall
