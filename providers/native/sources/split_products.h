// Products with split weights on AMX. A float is the sum of two bfloat16, high and low, and a product is high * high + low * high +
// high * low, summed in float32; what is left out is 2^-16 of it. Weights of 16 bits have no low parts, which leaves two products, and
// with Offsets::rounded rows have none either. Included by one source.
//
// Every row goes through the same operations in the same order, whatever the rows beside it: AMX computes an element from its
// own row and column, 32 inputs at a time, and adds them to the bias in order. A row alone waits for the weights, which AVX-512 reads
// faster than AMX, so it is computed in the operations of a tile register (multiply_one_row).
//
// Split rows, in Rows::values: [rows / 16][steps of 32 inputs][high, low][16 rows] lines of 32 bfloat16, input i beside input
// i + 16; missing inputs are zeros, and without low parts there are none. Weights: see layout.h.
#pragma once
#include "kernels.h"

#include "attention_tiles.h"

namespace carryall {
namespace {

// Bytes of 32 inputs of 16 columns, see attention_tiles.h.
template <int kProducts>
constexpr int64_t kTileStepBytes = (kProducts > 2 ? 2 : 1) * kTileBytes;
constexpr int64_t kChunkBytes = 8 * kTileBytes;  // of a tile: those of two, and as much of rows, stay in the first-level cache
constexpr int64_t kSplitRows = 2 * kRegisterRows, kSplitColumns = 2 * kColumns;
constexpr int64_t kSumsRows = 256;  // whose sums lie on the stack at a time
constexpr int64_t kAhead = 2 * kTileBytes;  // of a tile, which few rows ask for

// Rounds one part to the nearest, ties to even. The high one of two is rounded away from zero in ties; the low part of an infinity or
// NaN is NaN.
template <int kProducts>
CARRYALL_INLINE void split(__m512 x, __m512 y, uint8_t* line) {
  if constexpr (kProducts == 1) return split_queries<false>(x, y, line);
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32(bits(x), half), b = _mm512_add_epi32(bits(y), half);
  const __m512i c = _mm512_add_epi32(bits(_mm512_sub_ps(x, upper(a))), half);
  const __m512i d = _mm512_add_epi32(bits(_mm512_sub_ps(y, upper(b))), half);
  _mm512_store_si512(line, paired(a, b));
  _mm512_store_si512(line + kTileBytes, paired(c, d));
}

// The first line of a split row.
template <int kProducts>
CARRYALL_INLINE uint8_t* split_lines(const Rows& rows, int64_t row) {
  const int64_t steps = rows.width / kSplitStep;
  return reinterpret_cast<uint8_t*>(rows.values) + row / kRegisterRows * steps * kRowStepBytes<kProducts> + row % kRegisterRows * kLine;
}

template <int kProducts>
void split_row(const float* x, int64_t inputs, Rows rows, int64_t row) {
  uint8_t* to = split_lines<kProducts>(rows, row);
  int64_t k = 0;
  for (; k + kSplitStep <= inputs; k += kSplitStep, to += kRowStepBytes<kProducts>)
    split<kProducts>(_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k + 16), to);
  if (k < inputs) split<kProducts>(_mm512_maskz_loadu_ps(lanes(0, inputs - k), x + k), _mm512_maskz_loadu_ps(lanes(0, inputs - k - 16), x + k + 16), to);
}

CARRYALL_INLINE void fetch_lines(const uint8_t* lines, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(lines + i, 0, 3);
}

// Some inputs of up to 32 rows and of a pair of tiles, or of the last one twice.
struct SplitBlock {
  const uint8_t *rows, *left, *right;
  int64_t row_bytes, steps;  // from 16 rows to the next, and of 32 inputs
  bool two;                  // whether there are more than 16 rows
};

// Adds the products of a block to sums of 32 columns, whose rows lie `from_step` floats apart: 0 if all begin alike.
// `fetch(at)` is called before the products of each step.
template <int kProducts, class Fetch>
CARRYALL_INLINE void add_block(const SplitBlock& b, const float* from, int64_t from_step, float* to, int64_t to_step, const Fetch& fetch) {
  constexpr int64_t kOfRows = kRowStepBytes<kProducts>, kOfTile = kTileStepBytes<kProducts>;
  written(from);
  written(b.rows);
  const int64_t step = from_step * static_cast<int64_t>(sizeof(float));
  _tile_loadd(0, from, step);
  if (b.two) {
    _tile_loadd(1, from + kRegisterRows * from_step, step);
    _tile_loadd(2, from + kColumns, step);
    _tile_loadd(3, from + kRegisterRows * from_step + kColumns, step);
    for (int64_t k = 0; k < b.steps; k++) {
      fetch(k * kOfTile);
      add_two<kProducts>(b.rows + k * kOfRows, b.row_bytes, b.left + k * kOfTile, b.right + k * kOfTile);
    }
    store_two(to, to_step);
  } else {
    _tile_loadd(1, from + kColumns, step);
    for (int64_t k = 0; k < b.steps; k++) {
      fetch(k * kOfTile);
      add_one<kProducts>(b.rows + k * kOfRows, b.left + k * kOfTile, b.right + k * kOfTile);
    }
    store_one(to, to_step);
  }
  written(to);
}

// Reads a line in two halves. After the second one hardware asks for the line behind; a whole line is read at 0.8 to 0.9 of the rate.
CARRYALL_INLINE __m512i halves_of_line(const uint8_t* line) {
  __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
  __asm__ volatile("" : "+v"(first));  // else the compiler reads the line at once, and moves what is asked for ahead of all reads
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + kLine / 2));
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

// The operations of a tile register (Intel's manual, volume 2, TDPBF16PS) for one row and 16 columns: products of 32 inputs, even and
// odd elements of the pairs apart, one fused multiply-add after the other from 0 on. Denormal numbers are zeros.
struct PairSums {
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  CARRYALL_INLINE void add(__m512i line, const float* x, int i) {
    even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(line, 16)), _mm512_set1_ps(x[i]), even);
    odd = _mm512_fmadd_ps(upper(line), _mm512_set1_ps(x[kColumns + i]), odd);
  }
  CARRYALL_INLINE __m512 sum() const { return _mm512_add_ps(even, odd); }
};

// Adds the products of a row to the sums of 32 columns, which begin as the bias. `row` is its first line, and `next` the pair of tiles
// that follows. Not inlined, so that its arithmetic stays where denormal numbers are zeros.
template <int kProducts>
[[gnu::noinline]] void multiply_one_row(const uint8_t* row, const uint8_t* left, const uint8_t* right, int64_t bytes, const uint8_t* next, float* sums) {
  constexpr int kRowParts = kProducts > 1 ? 2 : 1;
  constexpr int64_t kOfTile = kTileStepBytes<kProducts>;
  __m512 totals[2] = {_mm512_load_ps(sums), _mm512_load_ps(sums + kColumns)};
  for (int64_t at = 0; at < bytes; at += kOfTile, row += kRowStepBytes<kProducts>) {
    alignas(64) float x[kRowParts][kSplitStep];  // even elements, then odd ones
    for (int p = 0; p < kRowParts; p++) {
      const __m512i pairs = _mm512_load_si512(row + p * kTileBytes);
      _mm512_store_ps(x[p], _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
      _mm512_store_ps(x[p] + kColumns, upper(pairs));
    }
    written(x);  // else the compiler takes elements from registers, which costs an operation of the vector units each
    const int64_t ahead = at + kAhead;
    const uint8_t* later[] = {ahead < bytes ? left + ahead : next + ahead - bytes, ahead < bytes ? right + ahead : next + ahead};
    PairSums products[2][kProducts];
#pragma GCC unroll 16
    for (int i = 0; i < kRegisterRows; i++) {
#pragma GCC unroll 2
      for (int t = 0; t < 2; t++) {
        const uint8_t* line = (t == 0 ? left : right) + at + i * kLine;
        for (int64_t part = 0; part < kOfTile; part += kTileBytes) __builtin_prefetch(later[t] + part + i * kLine, 0, 3);
        const __m512i high = halves_of_line(line);
        products[t][0].add(high, x[0], i);
        if constexpr (kProducts > 1) products[t][1].add(high, x[1], i);
        if constexpr (kProducts > 2) products[t][2].add(halves_of_line(line + kTileBytes), x[0], i);
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < 2; t++)
#pragma GCC unroll 3
      for (int p = 0; p < kProducts; p++) totals[t] = _mm512_add_ps(totals[t], products[t][p].sum());
  }
  _mm512_store_ps(sums, totals[0]);
  _mm512_store_ps(sums + kColumns, totals[1]);
}

// Denormal numbers are zeros, as for AMX, while this lives.
class NoDenormals {
 public:
  NoDenormals() { _mm_setcsr(before_ | 0x8040); }
  ~NoDenormals() { _mm_setcsr(before_); }
  NoDenormals(const NoDenormals&) = delete;
  NoDenormals& operator=(const NoDenormals&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

// Rows of a product with split weights, and the columns of a pair of tiles.
template <int kProducts>
class SplitPair {
 public:
  SplitPair(const Weights& w, const float* bias, int64_t tile, int64_t last_tile, Outputs y)
      : w_(w), tile_(tile), tiles_(tile + 1 < last_tile ? 2 : 1), y_({y.at(0, tile * kColumns), y.step}) {
    const int64_t left = w.outputs - tile * kColumns;
    columns_ = left < tiles_ * kColumns ? left : tiles_ * kColumns;
    if (bias != nullptr) memcpy(bias_, bias + tile * kColumns, sizeof(float) * static_cast<size_t>(columns_));
  }

  // One row, whose first line is `line`.
  void multiply_row(const uint8_t* line, int64_t row) {
    memcpy(sums_, bias_, sizeof bias_);
    multiply_one_row<kProducts>(line, tile(0), tile(tiles_ - 1), w_.tile_bytes(), tile(tiles_), sums_);
    copy(sums_, row, row, row + 1);
  }

  // Up to 32 rows, of which the first ones may be others'. This takes less time than to read the weights, so each step asks for a
  // later one.
  void multiply_few(const uint8_t* rows, int64_t first, int64_t begin, int64_t last) {
    const int64_t bytes = w_.tile_bytes();
    const auto fetch = [&](int64_t at) {
      const int64_t later = at + kAhead < bytes ? at + kAhead : at + kAhead + (tiles_ - 1) * bytes;
      fetch_lines(tile(0) + later, kOfTile);
      fetch_lines(tile(0) + later + bytes, kOfTile);
    };
    const SplitBlock block = {rows, tile(0), tile(tiles_ - 1), steps() * kOfRows, steps(), last - begin > kRegisterRows};
    add_block<kProducts>(block, bias_, 0, sums_, kSplitColumns, fetch);
    copy(sums_, first, begin, last);
  }

  // Up to kSumsRows rows, a chunk of inputs of all of them at a time; every 32 ask for their part of what is read next.
  void multiply_many(const uint8_t* rows, int64_t first, int64_t begin, int64_t last) {
    const int64_t bytes = w_.tile_bytes(), groups = (last - begin + kSplitRows - 1) / kSplitRows;
    for (int64_t at = 0; at < bytes; at += kChunkBytes) {
      const bool begins = at == 0, ends = at + kChunkBytes >= bytes;
      const uint8_t* later = ends ? tile(tiles_) : tile(0) + at + kChunkBytes;
      for (int64_t g = 0; g < groups; g++) {
        const int64_t row = begin + g * kSplitRows, end = row + kSplitRows < last ? row + kSplitRows : last;
        const int64_t from = kChunkBytes / kLine * g / groups * kLine, to = kChunkBytes / kLine * (g + 1) / groups * kLine;
        fetch_lines(later + from, to - from);
        fetch_lines(later + bytes + from, to - from);
        for (int64_t m = row; ends && m < end; m++)
          for (int64_t c = 0; c < columns_; c += kColumns) __builtin_prefetch(y_.at(m, c), 1);
        const int64_t step = at / kOfTile;
        const SplitBlock block = {rows + g * 2 * steps() * kOfRows + step * kOfRows, tile(0) + at, tile(tiles_ - 1) + at, steps() * kOfRows,
                                  ends ? steps() - step : kChunkBytes / kOfTile, end - row > kRegisterRows};
        float* sums = sums_ + g * kSplitRows * kSplitColumns;
        const bool whole = ends && row >= first && end - row == kSplitRows && columns_ == kSplitColumns;
        add_block<kProducts>(block, begins ? bias_ : sums, begins ? 0 : kSplitColumns, whole ? y_.at(row, 0) : sums,
                          whole ? y_.step : kSplitColumns, [](int64_t) {});
        if (ends && !whole) copy(sums, first, row, end);
      }
    }
  }

 private:
  static constexpr int64_t kOfRows = kRowStepBytes<kProducts>, kOfTile = kTileStepBytes<kProducts>;

  int64_t steps() const { return w_.tile_bytes() / kOfTile; }
  CARRYALL_INLINE const uint8_t* tile(int64_t index) const { return w_.data + (tile_ + index) * w_.tile_bytes(); }

  // Writes the results of rows from `begin` on that are not before `first`.
  void copy(const float* sums, int64_t first, int64_t begin, int64_t last) const {
    for (int64_t m = first > begin ? first : begin; m < last; m++)
      memcpy(y_.at(m, 0), sums + (m - begin) * kSplitColumns, sizeof(float) * static_cast<size_t>(columns_));
  }

  const Weights& w_;
  const int64_t tile_, tiles_;
  const Outputs y_;
  int64_t columns_;
  alignas(64) float bias_[kSplitColumns] = {};
  alignas(64) float sums_[kSumsRows * kSplitColumns];
};

template <int kProducts>
void multiply_row(const Weights& w, const Rows& rows, const float* bias, int64_t row, int64_t first_tile, int64_t last_tile, Outputs y) {
  const NoDenormals none;
  const uint8_t* line = split_lines<kProducts>(rows, row);
  for (int64_t tile = first_tile; tile < last_tile; tile += 2) SplitPair<kProducts>(w, bias, tile, last_tile, y).multiply_row(line, row);
}

template <int kProducts>
void multiply_split(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                    int64_t first_tile, int64_t last_tile, Outputs y) {
  if (last_row - first_row == 1) return multiply_row<kProducts>(w, rows, bias, first_row, first_tile, last_tile, y);
  const int64_t start = first_row / kRegisterRows * kRegisterRows;
  configure(last_row - start < kRegisterRows ? last_row - start : kRegisterRows, kLine);
  for (int64_t begin = start; begin < last_row; begin += kSumsRows) {
    const int64_t last = begin + kSumsRows < last_row ? begin + kSumsRows : last_row;
    const uint8_t* values = split_lines<kProducts>(rows, begin);
    for (int64_t tile = first_tile; tile < last_tile; tile += 2) {
      SplitPair<kProducts> pair(w, bias, tile, last_tile, y);
      if (last - begin <= kSplitRows) pair.multiply_few(values, first_row, begin, last);
      else pair.multiply_many(values, first_row, begin, last);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace carryall
