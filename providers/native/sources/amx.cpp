// AMX: 16 rows by 16 outputs a tile register. The weights become signed bytes once for all rows; for few rows that costs
// more than it saves, and AVX-512 VNNI computes them.
#include <immintrin.h>

#include "amx_steps.h"
#include "cpu.h"
#include "products.h"
#include "split_amx.h"

namespace carryall {
namespace {

// Rows from which AMX is faster than VNNI, with weights in memory, on a Xeon (family 6, model 167), one thread.
int64_t first_rows(const Weights& w) { return w.bits == 8 ? 16 : w.group == 0 && unit_of(w) > 0 ? 8 : 12; }

// Unpacks the weights of a panel. The last step is filled up with zeros to whole lines of inputs, because the values behind
// those of a row are anything.
void unpack_panel(const Panel& p, int8_t* bytes) {
  const Weights& w = *p.weights;
  const int64_t first = p.first * p.step / w.block, last = first + p.inputs / w.block, filled = p.inputs * kColumns;
  for (int64_t t = 0; t < p.tiles; t++, bytes += p.tile_bytes) {
    unpack<Avx512>(w, p.data + t * w.tile_bytes(), first, last, 0, reinterpret_cast<uint8_t*>(bytes));
    memset(bytes + filled, 0, static_cast<size_t>(p.tile_bytes - filled));
  }
  written(bytes);
}

void multiply_amx(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                  int64_t first_tile, int64_t last_tile, Outputs y) {
  const int64_t count = last_row - first_row, unit = unit_of(w);
  if (w.halves() || count < first_rows(w)) return kAvx512Vnni.multiply(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
  alignas(64) int8_t bytes[kUnpacked + kMostBlock * kColumns];
  const int64_t step = unit > 0 ? unit : w.block, steps = parts(rows.width, step), tile_size = w.tile_bytes();
  const int64_t room = count > kFewStrips * kGroup ? kUnpacked : kUnpackedForFew;
  const int64_t chunk = smaller(room / (step * kColumns), steps), most = larger(1, room / (chunk * step * kColumns));
  configure(kGroup, smaller(step, kLine));
  for (int64_t tile = first_tile; tile < last_tile; tile += most) {
    const int64_t tiles = smaller(most, last_tile - tile), column = tile * kColumns, after = tile + tiles;
    Ahead ahead(w.data + after * tile_size, smaller(tiles, w.tiles() - after) * tile_size,
                parts(count, kGroup) * tiles * steps);
    for (int64_t first = 0; first < steps; first += chunk) {
      const int64_t last = smaller(first + chunk, steps), inputs = smaller(last * step, rows.width) - first * step;
      const int64_t tile_bytes = (step < kLine ? inputs : parts(inputs, kLine) * kLine) * kColumns;
      const Panel panel{&w, &rows, bias == nullptr ? nullptr : bias + column, w.data + tile * tile_size, bytes, {y.at(0, column), y.step},
                        first_row, last_row, tiles, first, last, w.outputs - column, step, inputs, tile_bytes, &ahead};
      unpack_panel(panel, bytes);
      multiply_panel(panel);
    }
  }
  _tile_release();
}

void quantize_amx(const float* x, int64_t inputs, int64_t block, Rows rows, int64_t row) {
  kAvx512Vnni.quantize(x, inputs, block, rows, row);
}

}  // namespace

const Kernels kAmx = {"amx", has_amx, quantize_amx, multiply_amx, &kAmxAttention, round_avx512, split_row_amx, multiply_split_amx};

}  // namespace carryall
