// AMX: 16 rows by 16 outputs a tile register. The weights become signed bytes once for all rows; for few rows that costs
// more than it saves, and AVX-512 VNNI computes them, as it does the last rows if they fill little of a register.
#include <immintrin.h>

#include "cpu.h"
#include "products.h"

namespace carryall {
namespace {

// Measured on a Xeon (family 6, model 167), 1,024 x 3,072, one thread: with blocks of 32, AMX takes 1.8 times as long as
// VNNI for 8 rows, 1.3 times for 20 and 0.83 times for 32; with blocks of 128, 1.5 times for 8 and 0.95 times for 16.
constexpr int64_t kFewRows = 28, kFewRowsOfLargeBlocks = 14, kLargeBlock = 128;
constexpr int64_t kFewLastRows = 6;
constexpr int64_t kGroup = kRowGroup;  // rows of a tile register
constexpr int64_t kAhead = 2;           // blocks
constexpr int64_t kPass = 256;         // rows whose sums stay in the first-level cache
constexpr int64_t kInputs = 1024;      // unpacked at a time; a multiple of every block size

struct Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Registers 0 to 3 hold products, 4 and 5 activations, 6 and 7 weights; `step` inputs at a time.
void configure(int64_t step) {
  Configuration wanted;
  for (int i = 0; i < 8; i++) {
    wanted.column_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? step : kLine);
    wanted.rows[i] = static_cast<uint8_t>(i >= 6 ? step / 4 : kGroup);
  }
  _tile_loadconfig(&wanted);
}

// Writes blocks [first, last) of a tile as signed bytes: relative to the zero point in 4 bits, to 128 in 8 bits.
void unpack(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, int8_t* bytes) {
  const uint8_t* points = tile + w.blocks() * w.block_bytes() + first * kColumns;
  for (int64_t b = first; b < last; b++, points += kColumns) {
    const uint8_t* lines = tile + b * w.block_bytes();
    const uint8_t* end = lines + w.value_bytes();
    if (w.bits == 8) {
      for (; lines < end; lines += kLine, bytes += kLine)
        _mm512_storeu_si512(bytes, _mm512_xor_si512(_mm512_loadu_si512(lines), _mm512_set1_epi8(-128)));
      continue;
    }
    __m512i zero = _mm512_set1_epi8(w.offsets == Offsets::minima ? 0 : 8);
    if (w.offsets == Offsets::zero_points) {
      const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(points)));
      zero = _mm512_mullo_epi32(wide, _mm512_set1_epi32(0x01010101));
    }
    const __m512i mask = _mm512_set1_epi8(15);
    for (; lines < end; lines += kLine, bytes += 2 * kLine) {
      const __m512i line = _mm512_loadu_si512(lines);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
      _mm512_storeu_si512(bytes, _mm512_sub_epi8(_mm512_and_si512(line, mask), zero));
      _mm512_storeu_si512(bytes + kLine, _mm512_sub_epi8(high, zero));
    }
  }
}

// Stores the products of 16 rows with one block. Four sets of registers, so that blocks begin before the products of
// those before are added. Macros, because the intrinsics take literal numbers only.
#define CARRYALL_MULTIPLY_BLOCK(name, sums, activations, weights)                                                \
  inline void name(const int8_t* values, int64_t width, const int8_t* bytes, int64_t block, int64_t step,         \
                   int32_t* products) {                                                                           \
    _tile_zero(sums);                                                                                             \
    for (int64_t k = 0; k < block; k += step) {                                                                   \
      _tile_loadd(activations, values + k, width);                                                                \
      _tile_loadd(weights, bytes + k * kColumns, kLine);                                                          \
      _tile_dpbssd(sums, activations, weights);                                                                   \
    }                                                                                                             \
    _tile_stored(sums, products, kLine);                                                                          \
  }
CARRYALL_MULTIPLY_BLOCK(multiply_block0, 0, 4, 6)
CARRYALL_MULTIPLY_BLOCK(multiply_block1, 1, 5, 7)
CARRYALL_MULTIPLY_BLOCK(multiply_block2, 2, 4, 6)
CARRYALL_MULTIPLY_BLOCK(multiply_block3, 3, 5, 7)

// The products of rows with unpacked weights of 8 bits are relative to 128, not to the zero point.
inline void correct(const Weights& w, const uint8_t* points, const int32_t* sums, int64_t blocks, int32_t* products) {
  __m512i zero = _mm512_set1_epi32(-128);
  if (w.offsets == Offsets::zero_points) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(points)));
    zero = _mm512_add_epi32(wide, zero);
  }
  for (int64_t r = 0; r < kGroup; r++) {
    const __m512i less = _mm512_mullo_epi32(zero, _mm512_set1_epi32(sums[r * blocks]));
    int32_t* product = products + r * kColumns;
    _mm512_store_si512(product, _mm512_sub_epi32(_mm512_load_si512(product), less));
  }
}

// Adds blocks [first, last) to the results of 16 rows, [16, 16].
void add_blocks(const Weights& w, const Rows& rows, int64_t row, const uint8_t* tile, int64_t first, int64_t last,
                const int8_t* bytes, int64_t step, float* results) {
  alignas(64) int32_t products[4][kGroup * kColumns];
  const int64_t blocks = rows.blocks, block_bytes = w.block_bytes(), value_bytes = w.value_bytes();
  const float* factors = rows.scales + row * blocks;
  const int32_t* sums = rows.sums + row * blocks;
  const bool inexact = w.bits == 8 && w.offsets != Offsets::middle;
  const int8_t* values = rows.values + row * rows.width;
  const auto begin = [&](int64_t b) {
    if (b >= last) return;
    const int8_t *x = values + b * w.block, *unpacked = bytes + (b - first) * w.block * kColumns;
    switch (b & 3) {
      case 0: return multiply_block0(x, rows.width, unpacked, w.block, step, products[0]);
      case 1: return multiply_block1(x, rows.width, unpacked, w.block, step, products[1]);
      case 2: return multiply_block2(x, rows.width, unpacked, w.block, step, products[2]);
      default: return multiply_block3(x, rows.width, unpacked, w.block, step, products[3]);
    }
  };
  for (int64_t b = first; b < first + kAhead; b++) begin(b);
  __m512 result[kGroup];
#pragma GCC unroll 16
  for (int r = 0; r < kGroup; r++) result[r] = _mm512_load_ps(results + r * kColumns);
  for (int64_t b = first; b < last; b++) {
    int32_t* product = products[b & 3];
    begin(b + kAhead);
    if (inexact) correct(w, tile + blocks * block_bytes + b * kColumns, sums + b, blocks, product);
    const float* stored = reinterpret_cast<const float*>(tile + b * block_bytes + value_bytes);
    const __m512 scale = _mm512_loadu_ps(stored);
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++) {
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(factors[r * blocks + b]));
      result[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(product + r * kColumns)), both, result[r]);
    }
    if (w.offsets == Offsets::minima) {
      const __m512 minima = _mm512_loadu_ps(stored + kColumns);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++) {
        const float total = factors[r * blocks + b] * static_cast<float>(sums[r * blocks + b]);
        result[r] = _mm512_fmadd_ps(minima, _mm512_set1_ps(total), result[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kGroup; r++) _mm512_store_ps(results + r * kColumns, result[r]);
}

void multiply_amx(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                  int64_t first_tile, int64_t last_tile, float* y) {
  const int64_t count = last_row - first_row, few = w.block >= kLargeBlock ? kFewRowsOfLargeBlocks : kFewRows;
  const int64_t left = count < few ? count : count % kGroup <= kFewLastRows ? count % kGroup : 0;
  if (left > 0) kAvx512Vnni.multiply(w, rows, bias, last_row - left, last_row, first_tile, last_tile, y);
  if (left == count) return;
  last_row -= left;
  alignas(64) int8_t bytes[kInputs * kColumns];
  alignas(64) float results[kPass * kColumns];
  const int64_t step = w.block < kLine ? w.block : kLine, blocks = rows.blocks, chunk = kInputs / w.block;
  configure(step);
  for (int64_t tile = first_tile; tile < last_tile; tile++) {
    const uint8_t* data = w.data + tile * w.tile_bytes();
    const int64_t column = tile * kColumns, outputs = w.outputs - column;
    const size_t columns = sizeof(float) * static_cast<size_t>(outputs < kColumns ? outputs : kColumns);
    alignas(64) float start[kColumns] = {};
    if (bias != nullptr) memcpy(start, bias + column, columns);
    for (int64_t row = first_row; row < last_row; row += kPass) {
      const int64_t end = row + kPass < last_row ? row + kPass : last_row;
      for (int64_t r = 0; r < kPass; r++) memcpy(results + r * kColumns, start, sizeof start);
      for (int64_t first = 0; first < blocks; first += chunk) {
        const int64_t last = first + chunk < blocks ? first + chunk : blocks;
        unpack(w, data, first, last, bytes);
        for (int64_t r = row; r < end; r += kGroup)
          add_blocks(w, rows, r, data, first, last, bytes, step, results + (r - row) * kColumns);
      }
      for (int64_t r = row; r < end; r++) memcpy(y + r * w.outputs + column, results + (r - row) * kColumns, columns);
    }
  }
  _tile_release();
}

}  // namespace

const Kernels kAmx = {"amx", has_amx, quantize, multiply_amx, &kAmxAttention};

}  // namespace carryall
