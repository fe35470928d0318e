// Products on AMX with weights whose blocks have scales of their own: the products of each block leave the registers.
#pragma once
#include "amx_panel.h"

namespace carryall {
namespace {

constexpr int64_t kMostBlocks = kUnpacked / (16 * 16);  // of a panel

// `begin` computes the products of 16 rows with one block, `end` stores them. Macros, because the intrinsics take literal
// numbers only. kOne: a block is one step of inputs.
#define CARRYALL_BLOCK(name, sums, activations, weights)                                                          \
  struct name {                                                                                                  \
    template <bool kOne>                                                                                         \
    CARRYALL_INLINE static void begin(const int8_t* values, int64_t width, const int8_t* bytes, int64_t block) { \
      _tile_zero(sums);                                                                                          \
      for (int64_t k = 0; k < (kOne ? 1 : block); k += kLine) {                                                  \
        _tile_loadd(activations, values + k, width);                                                             \
        _tile_loadd(weights, bytes + k * kColumns, kLine);                                                       \
        _tile_dpbssd(sums, activations, weights);                                                                \
      }                                                                                                          \
    }                                                                                                            \
    CARRYALL_INLINE static void end(int32_t* products) { _tile_stored(sums, products, kLine); }                  \
  };
CARRYALL_BLOCK(Even, 0, 4, 6)
CARRYALL_BLOCK(Odd, 1, 5, 7)

// Scales and sums of 16 rows, so that those of a block lie side by side.
struct Group {
  alignas(kLine) float scales[kMostBlocks * kGroup];  // [shares, 16]
  alignas(kLine) int32_t sums[kMostBlocks * kGroup];  // [blocks, 16]

  void read(const Panel& p, int64_t row) {
    const Rows& from = *p.rows;
    const int64_t begin = p.first / from.share, end = (p.last + from.share - 1) / from.share;
    for (int64_t r = 0; r < kGroup; r++) {
      const float* own = from.scales + (row + r) * from.shares;
      for (int64_t s = begin; s < end; s++) scales[(s - begin) * kGroup + r] = own[s];
    }
    if (p.weights->offsets == Offsets::middle) return;
    for (int64_t r = 0; r < kGroup; r++) {
      const int32_t* own = from.sums + (row + r) * from.blocks;
      for (int64_t b = p.first; b < p.last; b++) sums[(b - p.first) * kGroup + r] = own[b];
    }
  }
};

// What the addition of a block reads.
struct Addend {
  const float* stored;    // scales of the columns, then minima
  const uint8_t* points;  // zero points, or nullptr
  const float* scales;    // of the rows
  const int32_t* sums;

  CARRYALL_INLINE void next(int64_t block_bytes) {
    stored = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(stored) + block_bytes);
    points += kColumns;
    sums += kGroup;
  }
};

// Adds the products with one block to `added`: to the sum over the blocks that share scales of the rows, if they do, else,
// multiplied by them, to the results.
template <bool kShared, bool kInexact, bool kMinima>
CARRYALL_INLINE void add_block(const Addend& from, bool zero_points, const int32_t* products, __m512 (&added)[kGroup]) {
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
    if (kInexact) product = _mm512_dpwssd_epi32(product, less, _mm512_set1_epi32(from.sums[r]));
    const __m512 start = kShared ? added[r] : _mm512_setzero_ps();
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, start);
    if (kMinima) sum = _mm512_fmadd_ps(minima, _mm512_cvtepi32_ps(_mm512_set1_epi32(from.sums[r])), sum);
    added[r] = kShared ? sum : _mm512_fmadd_ps(sum, _mm512_set1_ps(from.scales[r]), added[r]);
  }
}

// Adds the sums over blocks, multiplied by the scales of the rows, to the results [16, 16], and begins new sums.
CARRYALL_INLINE void add_sums(const float* scales, float* results, __m512 (&sums)[kGroup]) {
#pragma GCC unroll 16
  for (int r = 0; r < kGroup; r++) {
    float* result = results + r * kColumns;
    _mm512_store_ps(result, _mm512_fmadd_ps(sums[r], _mm512_set1_ps(scales[r]), _mm512_load_ps(result)));
    sums[r] = _mm512_setzero_ps();
  }
}

template <bool kOne, bool kShared, bool kInexact, bool kMinima>
void add_panel(const Panel& p) {
  alignas(kLine) int32_t products[2][kGroup * kColumns];
  alignas(kLine) float results[kGroup * kColumns];
  Group group;
  const Weights& w = *p.weights;
  const int64_t width = p.rows->width, block = w.block, unpacked = block * kColumns, count = p.last - p.first;
  const int64_t block_bytes = w.block_bytes(), share = p.rows->share;
  const bool zero_points = w.offsets == Offsets::zero_points;
  const auto values_of = [&](int64_t row) { return p.rows->values + row * width + p.first * block; };
  // Blocks are computed two ahead, then those of the next tile. The last ones, which nobody adds, are any memory.
  const int8_t *values = values_of(p.first_row), *bytes = p.bytes;
  Even::begin<kOne>(values, width, bytes, block);
  Odd::begin<kOne>(values + block, width, bytes + unpacked, block);
  Even::end(products[0]);
  for (int64_t row = p.first_row; row < p.last_row; row += kGroup) {
    const int64_t rows = p.last_row - row < kGroup ? p.last_row - row : kGroup;
    group.read(p, row);
    for (int64_t tile = 0; tile < p.tiles; tile++) {
      const bool last_tile = tile + 1 == p.tiles;
      const int8_t* next_bytes = last_tile ? p.bytes : p.bytes + (tile + 1) * count * unpacked;
      const int8_t* next_values = values_of(last_tile && row + kGroup < p.last_row ? row + kGroup : row);
      const int64_t left_columns = p.columns - tile * kColumns, columns = left_columns < kColumns ? left_columns : kColumns;
      const __mmask16 valid = static_cast<__mmask16>((1 << columns) - 1);
      float* y = p.y + row * w.outputs + tile * kColumns;
      for (int64_t r = 0; r < rows; r++) __builtin_prefetch(y + r * w.outputs, 1);
      __m512 start = _mm512_setzero_ps();
      if (p.bias != nullptr) start = _mm512_maskz_loadu_ps(valid, p.bias + tile * kColumns);
      for (int64_t r = 0; r < rows; r++) {
        if (p.first > 0) start = _mm512_maskz_loadu_ps(valid, y + r * w.outputs);
        _mm512_store_ps(results + r * kColumns, start);
      }
      __m512 added[kGroup];
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++) added[r] = kShared ? _mm512_setzero_ps() : _mm512_load_ps(results + r * kColumns);
      const uint8_t* data = p.data + tile * w.tile_bytes();
      Addend from{reinterpret_cast<const float*>(data + p.first * block_bytes + w.value_bytes()),
                  data + w.points() + p.first * kColumns, group.scales, group.sums};
      int64_t open = share;
      const auto add = [&](const int32_t* block_products) __attribute__((always_inline)) {
        add_block<kShared, kInexact, kMinima>(from, zero_points, block_products, added);
        from.next(block_bytes);
        if (--open > 0) return;
        if (kShared) add_sums(from.scales, results, added);
        from.scales += kGroup;
        open = share;
      };
      for (int64_t left = count; left > 0; left -= 2) {
        values = left > 2 ? values + 2 * block : next_values;
        bytes = left > 2 ? bytes + 2 * unpacked : next_bytes;
        Even::begin<kOne>(values, width, bytes, block);
        Odd::end(products[1]);
        add(products[0]);
        Odd::begin<kOne>(values + block, width, bytes + unpacked, block);
        Even::end(products[0]);
        if (left > 1) add(products[1]);
      }
      if (kShared && open < share) add_sums(from.scales, results, added);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++)
        if (!kShared) _mm512_store_ps(results + r * kColumns, added[r]);
      for (int64_t r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(y + r * w.outputs, valid, _mm512_load_ps(results + r * kColumns));
    }
  }
}

template <bool kOne, bool kInexact>
void add_any(const Panel& p) {
  const bool minima = p.weights->offsets == Offsets::minima;
  if constexpr (kOne && !kInexact)
    if (p.rows->share > 1) return minima ? add_panel<true, true, false, true>(p) : add_panel<true, true, false, false>(p);
  return minima ? add_panel<kOne, false, kInexact, true>(p) : add_panel<kOne, false, kInexact, false>(p);
}

inline void multiply_blocks(const Panel& panel) {
  const Weights& w = *panel.weights;
  const bool one = w.block <= kLine, inexact = w.bits == 8 && w.offsets != Offsets::middle;
  if (inexact) one ? add_any<true, true>(panel) : add_any<false, true>(panel);
  else one ? add_any<true, false>(panel) : add_any<false, false>(panel);
}

}  // namespace
}  // namespace carryall
