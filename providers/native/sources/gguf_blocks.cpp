#include "gguf_blocks.h"

namespace carryall {
namespace {

constexpr int64_t kMost = 256;  // weights of a block of a file

uint32_t word(const uint8_t* x) {
  uint32_t y;
  memcpy(&y, x, sizeof y);
  return y;
}

bool finite(const uint8_t* half) { return (half[1] & 0x7c) != 0x7c; }

// A block of a file: its weights as unsigned bytes (8 bits: as stored), the addresses of scale and minimum, and for types of
// 256 weights the integers of its smaller blocks.
struct Block {
  uint8_t values[kMost];
  const uint8_t *scale, *minimum = nullptr;
  uint8_t scales[16], minima[16];
};

int64_t block_bytes(const Weights& w) {
  if (w.grids()) return w.offsets == Offsets::short_grid ? 98 : 110;
  const int64_t scales = w.offsets == Offsets::half_minima ? 4 : w.offsets == Offsets::exponent_codes ? 1 : 2;
  const int64_t integers = w.group == 0 ? 0 : w.sixes() ? 12 : w.offsets == Offsets::half_codes ? 6 : 16;
  return w.stretch() * w.bits / 8 + scales + integers;
}

// The eight scales and minima of 6 bits in 12 bytes of Q4_K and Q5_K.
void read_sixes(const uint8_t* x, Block* block) {
  for (int j = 0; j < 4; j++) {
    block->scales[j] = x[j] & 63;
    block->minima[j] = x[j + 4] & 63;
    block->scales[j + 4] = static_cast<uint8_t>((x[j + 8] & 15) | x[j] >> 6 << 4);
    block->minima[j + 4] = static_cast<uint8_t>(x[j + 8] >> 4 | x[j + 4] >> 6 << 4);
  }
}

void read_k4(const uint8_t* x, int64_t bits, Block* block) {
  block->scale = x;
  block->minimum = x + 2;
  read_sixes(x + 4, block);
  const uint8_t *high = x + 16, *low = x + (bits == 5 ? 48 : 16);
  for (int part = 0; part < 4; part++) {
    uint8_t* to = block->values + 64 * part;
    const uint8_t* from = low + 32 * part;
    for (int i = 0; i < 32; i++) {
      to[i] = from[i] & 15;
      to[i + 32] = from[i] >> 4;
    }
    for (int i = 0; bits == 5 && i < 32; i++) {
      to[i] |= static_cast<uint8_t>((high[i] >> 2 * part & 1) << 4);
      to[i + 32] |= static_cast<uint8_t>((high[i] >> (2 * part + 1) & 1) << 4);
    }
  }
}

void read_k6(const uint8_t* x, Block* block) {
  for (int half = 0; half < 2; half++) {
    uint8_t* to = block->values + 128 * half;
    const uint8_t *low = x + 64 * half, *high = x + 128 + 32 * half;
    for (int i = 0; i < 32; i++) {
      to[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
      to[i + 32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      to[i + 64] = static_cast<uint8_t>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      to[i + 96] = static_cast<uint8_t>(low[i + 32] >> 4 | high[i] >> 6 << 4);
    }
  }
  memcpy(block->scales, x + 192, 16);
  block->scale = x + 208;
}

// The lower 2 bits of values of Q2_K and Q3_K, in 64 bytes.
void read_pairs(const uint8_t* x, Block* block) {
  for (int part = 0; part < 8; part++) {
    const uint8_t* from = x + part / 4 * 32;
    uint8_t* to = block->values + 32 * part;
    for (int i = 0; i < 32; i++) to[i] = static_cast<uint8_t>(from[i] >> 2 * (part % 4) & 3);
  }
}

void read_k2(const uint8_t* x, Block* block) {
  for (int j = 0; j < 16; j++) {
    block->scales[j] = x[j] & 15;
    block->minima[j] = x[j] >> 4;
  }
  read_pairs(x + 16, block);
  block->scale = x + 80;
  block->minimum = x + 82;
}

// Its sixteen scales of 6 bits are more by 32: the lower 4 bits in 8 bytes, the upper 2 in 4.
void read_k3(const uint8_t* x, Block* block) {
  read_pairs(x + 32, block);
  for (int part = 0; part < 8; part++)
    for (int i = 0; i < 32; i++) block->values[32 * part + i] |= static_cast<uint8_t>((x[i] >> part & 1) << 2);
  for (int j = 0; j < 16; j++)
    block->scales[j] = static_cast<uint8_t>((x[96 + j % 8] >> j / 8 * 4 & 15) | (x[104 + j % 4] >> j / 4 * 2 & 3) << 4);
  block->scale = x + 108;
}

// The eight scales of 6 bits, less 32, in 6 bytes of IQ4_XS.
void read_codes(const uint8_t* x, Block* block) {
  block->scale = x;
  const int high = x[2] | x[3] << 8;
  for (int j = 0; j < 8; j++) {
    const int scale = (x[4 + j / 2] >> j % 2 * 4 & 15) | (high >> 2 * j & 3) << 4;
    block->scales[j] = static_cast<uint8_t>(scale - 32);
    const uint8_t* from = x + 8 + 16 * j;
    uint8_t* to = block->values + 32 * j;
    for (int i = 0; i < 16; i++) {
      to[i] = from[i] & 15;
      to[i + 16] = from[i] >> 4;
    }
  }
}

void read_bytes(const uint8_t* x, Block* block) {
  block->scale = x;
  memcpy(block->values, x + 2, 32);
}

void read_block(const uint8_t* x, const Weights& w, Block* block) {
  if (w.group == 0) return read_bytes(x, block);  // of 8 bits; those of 4 and 5 are not taken apart
  if (w.coded()) return read_codes(x, block);
  if (w.bits == 2) return read_k2(x, block);
  if (w.bits == 3) return read_k3(x, block);
  if (w.bits == 6) return read_k6(x, block);
  read_k4(x, w.bits, block);
}

// Writes 32 weights into the bytes of one column of a unit, which begin at `to`.
void write_unit(const uint8_t* values, int64_t bits, uint8_t* to) {
  if (bits == 8) {
    for (int k = 0; k < 8; k++) memcpy(to + k * kLine, values + 4 * k, 4);
    return;
  }
  uint32_t words[8], high[2] = {};
  for (int k = 0; k < 8; k++) words[k] = word(values + 4 * k);
  if (bits < 4) {
    uint32_t low[2] = {};
    for (int k = 0; k < 8; k++) {
      low[k / 4] |= (words[k] & 0x03030303) << k % 4 * 2;
      high[0] |= (words[k] >> 2 & 0x01010101) << k;
    }
    memcpy(to, low, sizeof low[0]);
    memcpy(to + kLine, low + 1, sizeof low[1]);
    if (bits == 3) memcpy(to + 2 * kLine, high, sizeof high[0]);
    return;
  }
  for (int k = 0; k < 8; k += 2) {
    const uint32_t both = (words[k] & 0x0f0f0f0f) | (words[k + 1] & 0x0f0f0f0f) << 4;
    memcpy(to + k / 2 * kLine, &both, sizeof both);
  }
  to += 4 * kLine;
  if (bits == 5) {
    for (int k = 0; k < 8; k++) high[0] |= (words[k] >> 4 & 0x01010101) << k;
    memcpy(to, high, sizeof high[0]);
  } else if (bits == 6) {
    for (int k = 0; k < 8; k++) high[k / 4] |= (words[k] >> 4 & 0x03030303) << k % 4 * 2;
    memcpy(to, high, sizeof high[0]);
    memcpy(to + kLine, high + 1, sizeof high[1]);
  }
}

// Writes the nibbles of a block of 32 weights into its column, without taking them apart: in half of the time of `write_unit`
// and what it needs, and in a quarter with `write_fifth_bits`. Larger blocks gain nothing.
void write_nibbles(const uint8_t* from, uint8_t* to) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int k = 0; k < 4; k++, to += kLine) {
    const uint8_t* x = from + k % 2 * 8;
    const int shift = k / 2 * 4;
    const uint32_t both = (word(x) >> shift & kLow) | (word(x + 4) >> shift & kLow) << 4;
    memcpy(to, &both, sizeof both);
  }
}

// Writes the fifth bits of a block of 32 weights into its column: bit 4k + j of a block is bit k of byte j of a column.
void write_fifth_bits(const uint8_t* from, uint8_t* to) {
  for (int j = 0; j < 4; j++) {
    uint32_t bits = word(from) >> j & 0x11111111;
    bits = (bits | bits >> 3) & 0x03030303;
    bits = (bits | bits >> 6) & 0x000f000f;
    to[j] = static_cast<uint8_t>(bits | bits >> 12);
  }
}

// Writes the factors of one column of a stretch.
void write_factors(const Block& block, const Weights& w, int64_t c, uint8_t* factors) {
  if (w.offsets == Offsets::exponent_codes) {
    factors[c] = *block.scale;
    return;
  }
  memcpy(factors + 2 * c, block.scale, 2);
  if (block.minimum != nullptr) memcpy(factors + 2 * kColumns + 2 * c, block.minimum, 2);
  if (w.group == 0) return;
  const bool minima = w.offsets == Offsets::half_minima;
  uint8_t* to = factors + (minima ? 4 : 2) * kColumns + c;
  if (!w.sixes()) {
    for (int64_t b = 0; b < w.group / w.block; b++)
      to[b * kColumns] = static_cast<uint8_t>(block.scales[b] | (minima ? block.minima[b] << 4 : 0));
    return;
  }
  uint8_t all[16];
  for (int i = 0; i < 16; i++) all[i] = !minima ? block.scales[i] : i % 2 == 0 ? block.scales[i / 2] : block.minima[i / 2];
  for (int i = 0; i < 16; i += 2) to[i / 2 * kColumns] = static_cast<uint8_t>((all[i] & 15) | all[i + 1] << 4);
  for (int i = 0; i < 16; i += 4)
    to[(8 + i / 4) * kColumns] = static_cast<uint8_t>(all[i] >> 4 | all[i + 1] >> 4 << 2 | all[i + 2] >> 4 << 4 | all[i + 3] >> 4 << 6);
}

// Writes a block of IQ3_XXS or IQ3_S into column `c` of a stretch: the numbers of the grid in 64 bytes; with the long one their ninth
// bits in 8; the signs in 32; with the long grid the scales in 4.
void write_grid(const uint8_t* from, const Weights& w, int64_t c, uint8_t* stretch) {
  const bool is_long = w.offsets == Offsets::long_grid;
  const uint8_t *numbers = from + 2, *high = from + 66, *signs = from + (is_long ? 74 : 66);
  for (int u = 0; u < 8; u++) {
    uint8_t* unit = stretch + u * w.unit_bytes();
    for (int k = 0; k < 8; k++) unit[k * kColumns + c] = numbers[8 * u + k];
    memcpy(unit + kGridSigns + 4 * c, signs + 4 * u, 4);
    if (is_long) unit[kGridHigh + c] = high[u];
  }
  uint8_t* factors = stretch + w.factors();
  memcpy(factors + 2 * c, from, 2);
  for (int j = 0; is_long && j < 4; j++) factors[(2 + j) * kColumns + c] = from[106 + j];
}

}  // namespace

int64_t stored_row_bytes(const Weights& w) { return w.inputs / w.stretch() * block_bytes(w); }

int64_t pack_stored(const Weights& w, const uint8_t* const* rows, int64_t first, int64_t last, uint8_t* tiles) {
  const int64_t stretches = w.inputs / w.stretch(), size = block_bytes(w), unit = w.unit_bytes();
  const bool nibbles = w.group == 0 && (w.bits == 4 || w.bits == 5);
  for (int64_t tile = first; tile < last; tile++) {
    uint8_t *to = tiles + tile * w.tile_bytes(), *end = to + w.tile_bytes();
    const bool whole = (tile + 1) * kColumns <= w.outputs;
    if (!whole) memset(to, 0, static_cast<size_t>(w.tile_bytes()));
    for (int64_t s = 0; s < stretches; s++, to += w.stretch_bytes())
      for (int64_t c = 0; c < kColumns && tile * kColumns + c < w.outputs; c++) {
        Block block;
        const uint8_t* from = rows[tile * kColumns + c] + s * size;
        if (w.grids()) {
          if (!finite(from)) return tile * kColumns + c;
          write_grid(from, w, c, to);
          continue;
        }
        if (!nibbles) {
          read_block(from, w, &block);
        } else {
          block.scale = from;
          if (w.offsets == Offsets::half_minima) block.minimum = from + 2;
        }
        const bool number = w.offsets == Offsets::exponent_codes ? *block.scale != 255 : finite(block.scale);
        if (!number || (block.minimum != nullptr && !finite(block.minimum))) return tile * kColumns + c;
        if (nibbles) write_nibbles(from + size - kUnit / 2, to + 4 * c);
        if (nibbles && w.bits == 5) write_fifth_bits(from + size - kUnit / 2 - 4, to + 4 * kLine + 4 * c);
        for (int64_t u = 0; !nibbles && u < w.stretch() / kUnit; u++)
          write_unit(block.values + u * kUnit, w.bits, to + u * unit + 4 * c);
        write_factors(block, w, c, to + w.factors());
      }
    if (whole) memset(to, 0, static_cast<size_t>(end - to));
  }
  return -1;
}

void read_stored_row(const Weights& w, int64_t index, float* y) {
  const int64_t c = index % kColumns, stretches = w.inputs / w.stretch();
  const uint8_t* stretch = w.data + index / kColumns * w.tile_bytes();
  for (int64_t s = 0; s < stretches; s++, stretch += w.stretch_bytes()) {
    const uint8_t* factors = stretch + w.factors();
    const float scale = stretch_scale(w, factors, c);
    const float minimum = w.offsets == Offsets::half_minima ? float_of_half(factors + 2 * kColumns + 2 * c) : 0;
    uint8_t bytes[kUnit * kColumns];
    for (int64_t k = 0; k < w.stretch(); k++, y++) {
      if (k % kUnit == 0) unpack_unit(stretch + k / kUnit * w.unit_bytes(), w, bytes);
      const int value = bytes[k % kUnit / 4 * kLine + 4 * c + k % 4] - zero_of(w);
      const int64_t block = k / w.block;
      const float step = w.group == 0 ? scale : scale * static_cast<float>(scale_of(w, factors, block, c));
      const float product = step * static_cast<float>(value);
      if (w.offsets != Offsets::half_minima) *y = product;
      else if (w.group == 0) *y = product + minimum;
      else *y = product - minimum * static_cast<float>(minimum_of(w, factors, block, c));
    }
  }
}

}  // namespace carryall
