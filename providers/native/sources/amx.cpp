// AMX: 16 rows by 16 outputs a tile register. The weights become signed bytes once for all rows; for few rows that costs
// more than it saves, and AVX-512 VNNI computes them, as it does the last rows if they fill little of a register.
#include <immintrin.h>

#include "cpu.h"
#include "products.h"

namespace carryall {
namespace {

constexpr int64_t kFewRows = 13, kFewLastRows = 6;
constexpr int64_t kGroup = kRowGroup;     // rows of a tile register
constexpr int64_t kUnpacked = 128 << 10;   // bytes of weights that are unpacked at a time
constexpr int64_t kMostBlock = 256;       // inputs
constexpr int64_t kMostBlocks = kUnpacked / (16 * 16);  // of them

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
        _mm512_store_si512(bytes, _mm512_xor_si512(_mm512_loadu_si512(lines), _mm512_set1_epi8(-128)));
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
      _mm512_store_si512(bytes, _mm512_sub_epi8(_mm512_and_si512(line, mask), zero));
      _mm512_store_si512(bytes + kLine, _mm512_sub_epi8(high, zero));
    }
  }
}

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

// Blocks [first, last) of the inputs of some tiles, for some rows; weights are unpacked.
struct Panel {
  const Weights* weights;
  const Rows* rows;
  const float* bias;    // of the first tile, or nullptr
  const uint8_t* data;  // the first tile
  const int8_t* bytes;  // [tiles, last - first, block * 16]
  float* y;             // of the first tile's first column, row 0
  int64_t first_row, last_row, tiles, first, last, columns;  // columns: valid ones from the first tile on
};

// Scales and sums of 16 rows, [blocks, 16], so that those of a block lie side by side.
struct Group {
  alignas(64) float scales[kMostBlocks * kGroup];
  alignas(64) int32_t sums[kMostBlocks * kGroup];
};

void transpose(const Panel& p, int64_t row, bool with_sums, Group* group) {
  for (int64_t r = 0; r < kGroup; r++) {
    const int64_t start = (row + r) * p.rows->blocks + p.first;
    for (int64_t b = 0; b < p.last - p.first; b++) group->scales[b * kGroup + r] = p.rows->scales[start + b];
    if (!with_sums) continue;
    for (int64_t b = 0; b < p.last - p.first; b++) group->sums[b * kGroup + r] = p.rows->sums[start + b];
  }
}

// What the addition of a block reads.
struct Addend {
  const float* stored;    // scales of the columns, then minima
  const uint8_t* points;  // zero points, or nullptr
  const float* scales;    // of the rows
  const int32_t* sums;
};

// Adds the products with one block to the results of 16 rows.
template <bool kInexact, bool kMinima>
CARRYALL_INLINE void add_block(const Addend& from, const int32_t* products, __m512 (&result)[kGroup]) {
  const __m512 scale = _mm512_loadu_ps(from.stored);
  __m512i less = _mm512_set1_epi32(128);
  if (kInexact) {  // products with unpacked weights of 8 bits are relative to 128, not to the zero point
    if (from.points != nullptr) {
      const __m128i points = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.points));
      less = _mm512_and_si512(_mm512_sub_epi32(less, _mm512_cvtepu8_epi32(points)), _mm512_set1_epi32(0xffff));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kGroup; r++) {
    __m512i sum = _mm512_load_si512(products + r * kColumns);
    // The sum of a block fits into the low 16 bits, as does the difference of the zero points; the high ones are 0.
    if (kInexact) sum = _mm512_dpwssd_epi32(sum, less, _mm512_set1_epi32(from.sums[r]));
    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(from.scales[r]));
    result[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, result[r]);
  }
  if (kMinima) {
    const __m512 minima = _mm512_loadu_ps(from.stored + kColumns);
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++) {
      const float total = from.scales[r] * static_cast<float>(from.sums[r]);
      result[r] = _mm512_fmadd_ps(minima, _mm512_set1_ps(total), result[r]);
    }
  }
}

template <bool kOne, bool kInexact, bool kMinima>
void add_panel(const Panel& p) {
  alignas(64) int32_t products[2][kGroup * kColumns];
  alignas(64) float edge[kGroup * kColumns];
  Group group;
  const Weights& w = *p.weights;
  const int64_t width = p.rows->width, block = w.block, outputs = w.outputs, unpacked = block * kColumns;
  const int64_t block_bytes = w.block_bytes(), tile_bytes = w.tile_bytes();
  const bool points = w.offsets == Offsets::zero_points;
  const int64_t count = p.last - p.first, tile_values = count * unpacked;
  const int8_t* values = p.rows->values + p.first_row * width + p.first * block;
  const int8_t* bytes = p.bytes;
  Even::begin<kOne>(values, width, bytes, block);
  Odd::begin<kOne>(values + block, width, bytes + unpacked, block);
  Even::end(products[0]);
  for (int64_t row = p.first_row; row < p.last_row; row += kGroup) {
    const int64_t rows = p.last_row - row < kGroup ? p.last_row - row : kGroup;
    transpose(p, row, kInexact || kMinima, &group);
    for (int64_t tile = 0; tile < p.tiles; tile++) {
      const bool last_tile = tile + 1 == p.tiles, all = last_tile && row + kGroup >= p.last_row;
      const int8_t* next_bytes = last_tile ? p.bytes : p.bytes + (tile + 1) * tile_values;
      const int64_t next_row = last_tile && !all ? row + kGroup : row;
      const int8_t* next_values = p.rows->values + next_row * width + p.first * block;
      const int64_t columns = p.columns - tile * kColumns;
      const bool whole = rows == kGroup && columns >= kColumns;
      const size_t valid = sizeof(float) * static_cast<size_t>(columns < kColumns ? columns : kColumns);
      float* y = p.y + row * outputs + tile * kColumns;
      float* place = whole ? y : edge;
      const int64_t stride = whole ? outputs : kColumns;
      for (int64_t r = 0; r < rows; r++) __builtin_prefetch(y + r * outputs, 1);
      __m512 result[kGroup];
      if (p.first == 0) {
        memset(edge, 0, kLine);
        if (p.bias != nullptr) memcpy(edge, p.bias + tile * kColumns, valid);
        const __m512 start = _mm512_load_ps(edge);
#pragma GCC unroll 16
        for (int r = 0; r < kGroup; r++) result[r] = start;
      } else {
        if (!whole)
          for (int64_t r = 0; r < rows; r++) memcpy(edge + r * kColumns, y + r * outputs, valid);
#pragma GCC unroll 16
        for (int r = 0; r < kGroup; r++) result[r] = _mm512_loadu_ps(place + r * stride);
      }
      const uint8_t* data = p.data + tile * tile_bytes;
      Addend from{reinterpret_cast<const float*>(data + p.first * block_bytes + w.value_bytes()),
                  points ? data + p.rows->blocks * block_bytes + p.first * kColumns : nullptr, group.scales, group.sums};
      const auto advance = [&]() __attribute__((always_inline)) {
        from.stored = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(from.stored) + block_bytes);
        if (kInexact && points) from.points += kColumns;
        from.scales += kGroup;
        from.sums += kGroup;
      };
      for (int64_t left = count; left > 0; left -= 2) {
        values = left > 2 ? values + 2 * block : next_values;
        bytes = left > 2 ? bytes + 2 * unpacked : next_bytes;
        Even::begin<kOne>(values, width, bytes, block);
        Odd::end(products[1]);
        add_block<kInexact, kMinima>(from, products[0], result);
        advance();
        Odd::begin<kOne>(values + block, width, bytes + unpacked, block);
        Even::end(products[0]);
        if (left == 1) break;
        add_block<kInexact, kMinima>(from, products[1], result);
        advance();
      }
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; r++) _mm512_storeu_ps(place + r * stride, result[r]);
      if (!whole)
        for (int64_t r = 0; r < rows; r++) memcpy(y + r * outputs, edge + r * kColumns, valid);
    }
  }
}

template <bool kOne>
void add_any(const Panel& p) {
  const Weights& w = *p.weights;
  const bool minima = w.offsets == Offsets::minima;
  if (w.bits == 8 && w.offsets != Offsets::middle) return minima ? add_panel<kOne, true, true>(p) : add_panel<kOne, true, false>(p);
  return minima ? add_panel<kOne, false, true>(p) : add_panel<kOne, false, false>(p);
}

void multiply_amx(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                  int64_t first_tile, int64_t last_tile, float* y) {
  const int64_t count = last_row - first_row;
  const int64_t left = count < kFewRows ? count : count % kGroup <= kFewLastRows ? count % kGroup : 0;
  if (left > 0) kAvx512Vnni.multiply(w, rows, bias, last_row - left, last_row, first_tile, last_tile, y);
  if (left == count) return;
  last_row -= left;
  alignas(64) int8_t bytes[kUnpacked + kMostBlock * kColumns];
  const int64_t step = w.block < kLine ? w.block : kLine, room = kUnpacked / (w.block * kColumns);
  const int64_t chunk = room < rows.blocks ? room : rows.blocks, most = room / chunk;
  configure(step);
  for (int64_t tile = first_tile; tile < last_tile; tile += most) {
    const int64_t tiles = tile + most < last_tile ? most : last_tile - tile, column = tile * kColumns;
    const uint8_t* data = w.data + tile * w.tile_bytes();
    for (int64_t first = 0; first < rows.blocks; first += chunk) {
      const int64_t last = first + chunk < rows.blocks ? first + chunk : rows.blocks;
      for (int64_t t = 0; t < tiles; t++)
        unpack(w, data + t * w.tile_bytes(), first, last, bytes + t * (last - first) * w.block * kColumns);
      const Panel panel{&w, &rows, bias == nullptr ? nullptr : bias + column, data, bytes,
                        y + column, first_row, last_row, tiles, first, last, w.outputs - column};
      if (w.block <= kLine) add_any<true>(panel);
      else add_any<false>(panel);
    }
  }
  _tile_release();
}

}  // namespace

const Kernels kAmx = {"amx", has_amx, quantize, multiply_amx, &kAmxAttention};

}  // namespace carryall
