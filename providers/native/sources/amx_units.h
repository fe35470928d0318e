// Products on AMX with weights that are signed bytes in units of one scale a column: groups of blocks, or large blocks.
// The sums of a unit stay in the registers, which hold 32 rows by 32 outputs. The products of a unit are scaled and added
// while the next ones are computed.
#pragma once
#include "amx_panel.h"

namespace carryall {
namespace {

constexpr int64_t kMostUnits = kUnpacked / (64 * kColumns);  // of a panel

// Bytes of the unpacked weights of a tile: whole registers of 64 inputs.
inline int64_t unpacked_bytes(int64_t inputs) { return (inputs + kLine - 1) / kLine * kLine * kColumns; }

// The products of a unit of inputs, of up to 32 rows and 2 tiles: register t holds rows t / tiles and tile t % tiles.
struct Products {
  int64_t tile, unit;
  int buffer;
};

// Up to 32 rows of a panel.
struct Strip {
  const Panel& panel;
  const int64_t unit, inputs, units;  // inputs of a unit; inputs and units of the panel
  int64_t row = 0;                    // the first one
  alignas(kLine) float scales[kMostUnits][2 * kGroup];  // of the rows
  alignas(kLine) int32_t products[2][4][kGroup * kColumns];
  alignas(kLine) float sums[4][kGroup * kColumns];  // over the units so far

  Strip(const Panel& panel, int64_t unit)
      : panel(panel), unit(unit), inputs((panel.last - panel.first) * panel.weights->block),
        units((inputs + unit - 1) / unit) {}

  void begin(int64_t first_row, int64_t count) {
    row = first_row;
    const Rows& rows = *panel.rows;
    const int64_t first = panel.first * panel.weights->block / unit;
    for (int64_t r = 0; r < count; r++)
      for (int64_t u = 0; u < units; u++) scales[u][r] = rows.scales[(row + r) * rows.shares + first + u];
  }

  // Multiplies products by the scales and adds them to the sums; the first ones to the results of earlier panels or the
  // bias, the last ones become results.
  template <bool kFirst, bool kLast>
  void add_as(const Products& of, int64_t tile, int64_t first, const int32_t* from, float* to) {
    const Weights& w = *panel.weights;
    const int64_t number = panel.first * w.block / unit + of.unit;
    const uint8_t* stored = panel.data + tile * w.tile_bytes();
    stored += w.group > 0 ? w.group_scales() + number * kLine : number * w.block_bytes() + w.value_bytes();
    const __m512 scale = _mm512_loadu_ps(stored);
    const float* of_rows = scales[of.unit] + first;
    float* y = panel.y + (row + first) * w.outputs + tile * kColumns;
    const int64_t left = panel.columns - tile * kColumns, count = panel.last_row - row - first;
    const __mmask16 valid = static_cast<__mmask16>(left < kColumns ? (1 << left) - 1 : 0xffff);
    __m512 start = _mm512_setzero_ps();
    if (kFirst && panel.bias != nullptr) start = _mm512_maskz_loadu_ps(valid, panel.bias + tile * kColumns);
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++, from += kColumns, to += kColumns, y += w.outputs) {
      if (!kFirst) start = _mm512_load_ps(to);
      if (kFirst && panel.first > 0 && r < count) start = _mm512_maskz_loadu_ps(valid, y);
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(from)), scale);
      const __m512 sum = _mm512_fmadd_ps(scaled, _mm512_set1_ps(of_rows[r]), start);
      if (!kLast) _mm512_store_ps(to, sum);
      if (kLast && r < count) _mm512_mask_storeu_ps(y, valid, sum);
    }
  }

  template <int kTiles>
  CARRYALL_INLINE void add(const Products& of, int t) {
    const int64_t tile = of.tile + t % kTiles, first = t / kTiles * kGroup;
    const int32_t* from = products[of.buffer][t];
    const bool last = of.unit == units - 1;
    if (of.unit > 0) last ? add_as<false, true>(of, tile, first, from, sums[t]) : add_as<false, false>(of, tile, first, from, sums[t]);
    else last ? add_as<true, true>(of, tile, first, from, sums[t]) : add_as<true, false>(of, tile, first, from, sums[t]);
  }

  // Adds 64 inputs to the registers.
  template <int kRows, int kTiles>
  CARRYALL_INLINE static void step(const int8_t* values, int64_t width, const int8_t* bytes, const int8_t* other) {
    _tile_loadd(4, values, width);
    _tile_loadd(6, bytes, kLine);
    _tile_dpbssd(0, 4, 6);
    if (kTiles > 1) {
      _tile_loadd(7, other, kLine);
      _tile_dpbssd(1, 4, 7);
    }
    if (kRows > 1) {
      _tile_loadd(5, values + kGroup * width, width);
      _tile_dpbssd(2, 5, 6);
      if (kTiles > 1) _tile_dpbssd(3, 5, 7);
    }
  }

  // Tiles [first, last), kTiles at a time. The products of a unit are added while those of the next one are computed.
  template <int kRows, int kTiles>
  void multiply(int64_t first, int64_t last) {
    constexpr int kRegisters = kRows * kTiles, kHalf = kRegisters / 2;
    const int64_t width = panel.rows->width, tile_bytes = unpacked_bytes(inputs);
    const int8_t* values = panel.rows->values + row * width + panel.first * panel.weights->block;
    Products open{-1, 0, 1};  // computed, not added
    for (int64_t tile = first; tile < last; tile += kTiles) {
      const int8_t* bytes = panel.bytes + tile * tile_bytes;
      const float* y = panel.y + row * panel.weights->outputs + tile * kColumns;
      for (int64_t r = 0; r < kRows * kGroup && r < panel.last_row - row; r++, y += panel.weights->outputs)
        for (int t = 0; t < kTiles; t++) __builtin_prefetch(y + t * kColumns, 1);
      for (int64_t u = 0; u < units; u++) {
        const int64_t start = u * unit, end = start + unit < inputs ? start + unit : inputs;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        step<kRows, kTiles>(values + start, width, bytes + start * kColumns, bytes + tile_bytes + start * kColumns);
        for (int t = 0; open.tile >= 0 && t < kHalf; t++) add<kTiles>(open, t);
        for (int64_t k = start + kLine; k < end; k += kLine)
          step<kRows, kTiles>(values + k, width, bytes + k * kColumns, bytes + tile_bytes + k * kColumns);
        for (int t = kHalf; open.tile >= 0 && t < kRegisters; t++) add<kTiles>(open, t);
        open = {tile, u, 1 - open.buffer};
        int32_t(*to)[kGroup * kColumns] = products[open.buffer];
        _tile_stored(0, to[0], kLine);
        if (kTiles > 1) _tile_stored(1, to[1], kLine);
        if (kRows > 1) _tile_stored(2, to[kTiles], kLine);
        if (kRegisters > 3) _tile_stored(3, to[3], kLine);
      }
    }
    for (int t = 0; open.tile >= 0 && t < kRegisters; t++) add<kTiles>(open, t);
  }
};

// Weights of the panel are unpacked in whole registers a tile.
inline void multiply_units(const Panel& panel, int64_t unit) {
  Strip strip(panel, unit);
  const int64_t even = panel.tiles / 2 * 2;
  for (int64_t row = panel.first_row; row < panel.last_row; row += 2 * kGroup) {
    const bool two = panel.last_row - row > kGroup;
    strip.begin(row, two ? 2 * kGroup : kGroup);
    two ? strip.multiply<2, 2>(0, even) : strip.multiply<1, 2>(0, even);
    two ? strip.multiply<2, 1>(even, panel.tiles) : strip.multiply<1, 1>(even, panel.tiles);
  }
}

}  // namespace
}  // namespace carryall
