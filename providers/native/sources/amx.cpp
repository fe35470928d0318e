// AMX: 16 rows by 16 outputs a tile register. The weights become signed bytes once for all rows; for few rows that costs
// more than it saves, and AVX-512 VNNI computes them, as it does the last rows if they fill little of a register.
#include <immintrin.h>

#include "amx_blocks.h"
#include "amx_units.h"
#include "cpu.h"
#include "products.h"

namespace carryall {
namespace {

// Measured on a Xeon (family 6, model 167) with 576 x 3,072 and 1,024 x 3,072, one thread: with 4 bits AMX takes 1.1 times
// as long as VNNI for 10 rows and 0.9 times for 12; with 8 bits 1.1 times for 12 and 0.95 times for 16; with units of 64
// inputs 1.05 times for 8 and 0.73 times for 12. Sixteen more rows take as long as 4 or 5 rows with VNNI.
constexpr int64_t kFewRows = 12, kFewRowsOfBytes = 15, kFewRowsOfUnits = 8, kFewLastRows = 4;

void multiply_amx(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                  int64_t first_tile, int64_t last_tile, float* y) {
  const int64_t count = last_row - first_row, unit = unit_of(w);
  const int64_t few = unit > 0 ? kFewRowsOfUnits : w.bits == 4 ? kFewRows : kFewRowsOfBytes;
  const int64_t left = count < few ? count : count % kGroup <= kFewLastRows ? count % kGroup : 0;
  if (left > 0) kAvx512Vnni.multiply(w, rows, bias, last_row - left, last_row, first_tile, last_tile, y);
  if (left == count) return;
  last_row -= left;
  alignas(64) int8_t bytes[kUnpacked + kMostBlock * kColumns];
  const int64_t room = kUnpacked / (w.block * kColumns), whole = unit > 0 ? room - room % (unit / w.block) : room;
  const int64_t chunk = whole < rows.blocks ? whole : rows.blocks;
  const int64_t tile_bytes = unpacked_bytes(chunk * w.block), fitting = kUnpacked / tile_bytes;
  const int64_t most = fitting > 1 ? fitting / 2 * 2 : 1, step = unit > 0 || w.block > kLine ? kLine : w.block;
  configure(kGroup, step);
  for (int64_t tile = first_tile; tile < last_tile; tile += most) {
    const int64_t tiles = tile + most < last_tile ? most : last_tile - tile, column = tile * kColumns;
    const uint8_t* data = w.data + tile * w.tile_bytes();
    for (int64_t first = 0; first < rows.blocks; first += chunk) {
      const int64_t last = first + chunk < rows.blocks ? first + chunk : rows.blocks, inputs = (last - first) * w.block;
      const int64_t of_tile = unit > 0 ? unpacked_bytes(inputs) : inputs * kColumns;
      for (int64_t t = 0; t < tiles; t++) {
        int8_t* to = bytes + t * of_tile;
        unpack<Avx512>(w, data + t * w.tile_bytes(), first, last, 0, reinterpret_cast<uint8_t*>(to));
        memset(to + inputs * kColumns, 0, static_cast<size_t>(of_tile - inputs * kColumns));
      }
      written(bytes);
      const Panel panel{&w, &rows, bias == nullptr ? nullptr : bias + column, data, bytes,
                        y + column, first_row, last_row, tiles, first, last, w.outputs - column};
      unit > 0 ? multiply_units(panel, unit) : multiply_blocks(panel);
    }
  }
  _tile_release();
}

}  // namespace

const Kernels kAmx = {"amx", has_amx, quantize, multiply_amx, &kAmxAttention};

}  // namespace carryall
