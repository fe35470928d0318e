// Products with split weights on AMX. A float is the sum of two bfloat16, high and low, and a product is high * high +
// low * high + high * low, summed in float32; what is left out is 2^-16 of it. Included by one source.
//
// Every row goes through the same operations in the same order, whatever the rows beside it: AMX computes an element from its
// own row and column, 32 inputs at a time; the sums of 128 inputs are added to the bias, in order.
//
// Split rows, in Rows::values: [rows / 16][steps of 32 inputs][high, low][16 rows] lines of 32 bfloat16, input i beside input
// i + 16; missing inputs are zeros. Weights: see layout.h.
#pragma once
#include "kernels.h"

#include "attention_tiles.h"

namespace carryall {
namespace {

constexpr int64_t kChunkSteps = 4, kStepBytes = 2 * kTileBytes, kChunkBytes = kChunkSteps * kStepBytes;
constexpr int64_t kSplitRows = 2 * kRegisterRows, kSplitColumns = 2 * kColumns;

// Ties are rounded away from zero; the low part of an infinity or NaN is NaN.
CARRYALL_INLINE void split(__m512 x, __m512 y, uint8_t* line) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32(bits(x), half), b = _mm512_add_epi32(bits(y), half);
  const __m512i c = _mm512_add_epi32(bits(_mm512_sub_ps(x, upper(a))), half);
  const __m512i d = _mm512_add_epi32(bits(_mm512_sub_ps(y, upper(b))), half);
  _mm512_store_si512(line, paired(a, b));
  _mm512_store_si512(line + kTileBytes, paired(c, d));
}

void split_row(const float* x, int64_t inputs, Rows rows, int64_t row) {
  const int64_t steps = rows.width / kSplitStep;
  uint8_t* to = reinterpret_cast<uint8_t*>(rows.values) + row / kRegisterRows * steps * kStepBytes + row % kRegisterRows * kLine;
  int64_t k = 0;
  for (; k + kSplitStep <= inputs; k += kSplitStep, to += kStepBytes) split(_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k + 16), to);
  if (k < inputs) split(_mm512_maskz_loadu_ps(lanes(0, inputs - k), x + k), _mm512_maskz_loadu_ps(lanes(0, inputs - k - 16), x + k + 16), to);
}

// Adds what AMX has summed for rows [first, last) of a group to y, or to the bias in the first chunk.
CARRYALL_INLINE void add_sums(const float* sums, const float* bias, bool begins, int64_t first, int64_t last, int64_t columns,
                              float* y, int64_t step) {
  for (int64_t c = 0; c < columns; c += kColumns) {
    const __mmask16 mask = lanes(0, columns - c);
    const __m512 begin = begins && bias != nullptr ? _mm512_maskz_loadu_ps(mask, bias + c) : _mm512_setzero_ps();
    for (int64_t m = first; m < last; m++) {
      float* to = y + m * step + c;
      const __m512 before = begins ? begin : _mm512_maskz_loadu_ps(mask, to);
      _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, _mm512_load_ps(sums + m * kSplitColumns + c)));
    }
  }
}

CARRYALL_INLINE void fetch_lines(const uint8_t* lines, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(lines + i, 0, 3);
}

// A pair of tiles, or the last one twice, in a chunk of inputs.
struct SplitTiles {
  const uint8_t *left, *right;  // of the chunk
  const uint8_t* later;         // what is read next of the left one; that of the right one lies `apart` bytes behind it
  int64_t apart, steps;
};

// Sums a chunk for up to 32 rows, if there are no others. This takes less time than to read the weights, so each step asks for
// a later one.
void sum_few(const SplitTiles& p, const uint8_t* a, int64_t row_bytes, bool two, float* sums) {
  clear_one();
  if (two) clear_other();
  written(a);
  for (int64_t at = 0; at < p.steps * kStepBytes; at += kStepBytes) {
    fetch_lines(p.later + at, kStepBytes);
    fetch_lines(p.later + p.apart + at, kStepBytes);
    if (two) add_two<true>(a + at, row_bytes, p.left + at, p.right + at);
    else add_one<true>(a + at, p.left + at, p.right + at);
  }
  if (two) store_two(sums, kSplitColumns);
  else store_one(sums, kSplitColumns);
}

// Sums a chunk for up to 32 of many rows; group `g` of `groups` asks for its part of what is read next.
void sum_some(const SplitTiles& p, const uint8_t* a, int64_t row_bytes, bool two, int64_t g, int64_t groups, float* sums) {
  const int64_t first = kChunkBytes / kLine * g / groups * kLine, last = kChunkBytes / kLine * (g + 1) / groups * kLine;
  fetch_lines(p.later + first, last - first);
  fetch_lines(p.later + p.apart + first, last - first);
  const auto operand = [&](int64_t t, int64_t step) { return (t == 0 ? p.left : p.right) + step * kStepBytes; };
  if (two) multiply_two<true>(a, row_bytes, operand, p.steps, sums, kSplitColumns);
  else multiply_one<true>(a, operand, p.steps, sums, kSplitColumns);
}

void multiply_split(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                    int64_t first_tile, int64_t last_tile, Outputs y) {
  alignas(64) float sums[kSplitRows * kSplitColumns];
  const int64_t tile_bytes = w.tile_bytes(), row_bytes = tile_bytes;  // of 16 rows
  const int64_t begin = first_row / kRegisterRows * kRegisterRows, count = last_row - begin, groups = (count + kSplitRows - 1) / kSplitRows;
  const uint8_t* values = reinterpret_cast<const uint8_t*>(rows.values) + begin / kRegisterRows * row_bytes;
  configure(count < kRegisterRows ? count : kRegisterRows, kLine);
  for (int64_t tile = first_tile; tile < last_tile; tile += 2) {
    const int64_t tiles = tile + 1 < last_tile ? 2 : 1, column = tile * kColumns, left = w.outputs - column;
    const int64_t columns = left < tiles * kColumns ? left : tiles * kColumns;
    for (int64_t at = 0; at < tile_bytes; at += kChunkBytes) {
      const int64_t bytes = tile_bytes - at < kChunkBytes ? tile_bytes - at : kChunkBytes;
      const uint8_t* weights = w.data + tile * tile_bytes + at;
      const SplitTiles p = {weights, weights + (tiles - 1) * tile_bytes,
                            at + bytes == tile_bytes ? w.data + (tile + 2) * tile_bytes : weights + kChunkBytes, tile_bytes, bytes / kStepBytes};
      for (int64_t g = 0; g < groups; g++) {
        const int64_t row = g * kSplitRows, some = count - row < kSplitRows ? count - row : kSplitRows;
        const uint8_t* a = values + row / kRegisterRows * row_bytes + at;
        if (groups == 1) sum_few(p, a, row_bytes, some > kRegisterRows, sums);
        else sum_some(p, a, row_bytes, some > kRegisterRows, g, groups, sums);
        written(sums);
        add_sums(sums, bias == nullptr ? nullptr : bias + column, at == 0, begin + row < first_row ? first_row - begin - row : 0, some,
                 columns, y.at(begin + row, column), y.step);
      }
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace carryall
