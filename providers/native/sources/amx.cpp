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
int64_t first_rows(const Weights& w) {
  if (w.halves()) return w.coded() ? 12 : 16;
  return w.bits == 8 ? 16 : w.group == 0 && unit_of(w) > 0 ? 8 : 12;
}

// Whether AMX is faster. A strip of 16 rows takes as long with fewer, so a quarter of GGUF's rows may be missing: AMX gains less
// there than with the other weights.
bool suits(const Weights& w, int64_t count) {
  return count >= first_rows(w) && (!w.halves() || 3 * parts(count, kGroup) * kGroup <= 4 * count);
}

// Unpacks the weights of a panel. The last step is filled up with zeros to whole lines of inputs, because the values behind
// those of a row are anything.
void unpack_panel(const Panel& p, int8_t* bytes, uint8_t* factors) {
  const Weights& w = *p.weights;
  const int64_t first = p.first * p.step / w.block, last = first + p.inputs / w.block, filled = p.inputs * kColumns;
  for (int64_t t = 0; t < p.tiles; t++, bytes += p.tile_bytes, factors += p.factor_tile) {
    const uint8_t* tile = p.data + t * w.tile_bytes();
    if (w.halves()) {
      unpack_stored(w, tile, p.first, p.last, bytes, factors);
    } else {
      unpack<Avx512>(w, tile, first, last, 0, reinterpret_cast<uint8_t*>(bytes));
      memset(bytes + filled, 0, static_cast<size_t>(p.tile_bytes - filled));
    }
  }
  written(bytes);
}

// Steps of the inputs: their size, and the bytes of their weights and of what their products are scaled by.
struct Steps {
  int64_t inputs, bytes, factor_bytes;
  explicit Steps(const Weights& w) {
    if (w.halves()) {
      const StoredForm form(w);
      inputs = form.step, bytes = form.step_bytes, factor_bytes = form.factor_bytes;
    } else {
      const int64_t unit = unit_of(w);
      inputs = unit > 0 ? unit : w.block, bytes = inputs * kColumns, factor_bytes = w.group > 0 ? kLine : w.block_bytes();
    }
  }
};


void multiply_amx(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                  int64_t first_tile, int64_t last_tile, Outputs y) {
  const int64_t count = last_row - first_row;
  if (!suits(w, count)) return kAvx512Vnni.multiply(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
  if (count > kPartialRows) {
    const int64_t middle = first_row + kPartialRows;
    multiply_amx(w, rows, bias, first_row, middle, first_tile, last_tile, y);
    return multiply_amx(w, rows, bias, middle, last_row, first_tile, last_tile, y);
  }
  alignas(64) int8_t bytes[kUnpacked + kMostBlock * kColumns];
  alignas(64) uint8_t unpacked_factors[kUnpackedFactors];
  alignas(64) float partial[kPartialRows * kPartialTiles * kColumns];
  const Steps size(w);
  const int64_t steps = parts(rows.width, size.inputs), tile_size = w.tile_bytes();
  const bool many = count > kFewStrips * kGroup;
  const bool streams = many && ((reinterpret_cast<uintptr_t>(y.data) | static_cast<uintptr_t>(y.step * 4)) & (kLine - 1)) == 0;
  // The inputs of a panel: of many rows so few that a strip of them is still in the first-level cache for the next of four tiles, and
  // always whole shares of the scales of rows.
  const int64_t room = many ? kUnpacked : kUnpackedForFew, shares = larger(1, kSharedScale / size.inputs);
  const int64_t chunk = smaller((many ? room / 4 : room) / size.bytes / shares * shares, steps);
  const int64_t most = smaller(room / (chunk * size.bytes), kPartialTiles);
  configure(kGroup, smaller(w.halves() && w.block > 16 ? w.block : size.inputs, kLine));
  for (int64_t tile = first_tile; tile < last_tile; tile += most) {
    const int64_t tiles = smaller(most, last_tile - tile), column = tile * kColumns, after = tile + tiles;
    const uint8_t* data = w.data + tile * tile_size;
    Ahead ahead(w.data + after * tile_size, smaller(tiles, w.tiles() - after) * tile_size,
                parts(count, kGroup) * tiles * steps);
    for (int64_t first = 0; first < steps; first += chunk) {
      const int64_t last = smaller(first + chunk, steps), inputs = smaller(last * size.inputs, rows.width) - first * size.inputs;
      const int64_t whole = size.inputs < kLine ? inputs : parts(inputs, kLine) * kLine;
      const int64_t tile_bytes = w.halves() ? (last - first) * size.bytes : whole * kColumns;
      const uint8_t* stored = data + first * size.factor_bytes + (w.group > 0 ? w.group_scales() : w.value_bytes());
      const Panel panel{&w, &rows, bias == nullptr ? nullptr : bias + column, data, bytes,
                        w.halves() ? unpacked_factors : stored, size.factor_bytes, w.halves() ? (last - first) * size.factor_bytes : tile_size,
                        partial, {y.at(0, column), y.step}, first_row, last_row, tiles, first, last, w.outputs - column,
                        size.inputs, inputs, size.bytes, tile_bytes, &ahead, last == steps, streams};
      unpack_panel(panel, bytes, unpacked_factors);
      multiply_panel(panel);
    }
  }
  _tile_release();
  if (streams) _mm_sfence();  // before another thread is told that the results are there
}

void quantize_amx(const float* x, int64_t inputs, int64_t block, Rows rows, int64_t row) {
  kAvx512Vnni.quantize(x, inputs, block, rows, row);
}

}  // namespace

const Kernels kAmx = {"amx", has_amx, quantize_amx, multiply_amx, &kAmxAttention, round_avx512, sweep_avx512, split_row_amx, multiply_split_amx,
                      3 << 19};

}  // namespace carryall
