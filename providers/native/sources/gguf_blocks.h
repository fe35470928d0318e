// Weights as GGUF files hold them: packing a file's blocks into tiles of the same number of bytes, and reading them.
// Types of blocks: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4 (32 weights with a scale), Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS,
// IQ3_XXS, IQ3_S (256 weights, whose scale and minimum blocks of 32 or 16 multiply by integers). Their bytes: ggml/src/ggml-common.h of github.com/ggml-org/llama.cpp.
#pragma once
#include <cstring>

#include "gguf_grids.h"
#include "layout.h"

namespace carryall {

// Packs tiles [first, last) of weights without data. `rows` are the addresses of the outputs in the file. Returns the first
// output with a scale that is infinite or NaN, or -1.
int64_t pack_stored(const Weights& weights, const uint8_t* const* rows, int64_t first, int64_t last, uint8_t* tiles);

// The bytes of a row in the file.
int64_t stored_row_bytes(const Weights& weights);

// Writes output `index` [inputs] as floats: the values that llama.cpp computes with.
void read_stored_row(const Weights& weights, int64_t index, float* y);

namespace {

// Exact for finite numbers.
CARRYALL_INLINE float float_of_half(const uint8_t* half) {
  uint16_t x;
  memcpy(&x, half, sizeof x);
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
  if (exponent == 0) {
    const float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign == 0 ? small : -small;
  }
  const uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

// Exact for every number, infinities and NaN.
CARRYALL_INLINE float float_of_float16(uint16_t half) {
  if ((half & 0x7c00) != 0x7c00) return float_of_half(reinterpret_cast<const uint8_t*>(&half));
  const uint32_t bits = static_cast<uint32_t>(half & 0x8000) << 16 | 0x7f800000 | static_cast<uint32_t>(half & 1023) << 13;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

// 2^(e - 128); exact, as subnormal numbers too.
CARRYALL_INLINE float float_of_exponent(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

// The values of codes: those of IQ4_NL and IQ4_XS, and twice those of E2M1 (MXFP4).
alignas(16) constexpr int8_t kCodes[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t kFloatCodes[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

CARRYALL_INLINE const int8_t* codes_of(const Weights& w) {
  return w.offsets == Offsets::half_codes ? kCodes : kFloatCodes;
}

constexpr int64_t kGridSigns = 8 * kColumns, kGridHigh = kGridSigns + kLine;  // their places in a unit

// The signs of 8 inputs from 8 `eighth` on of column `c`, a bit each, 1 for minus.
CARRYALL_INLINE int grid_signs(const uint8_t* unit, const Weights& w, int eighth, int64_t c) {
  uint32_t signs;
  memcpy(&signs, unit + kGridSigns + 4 * c, sizeof signs);
  if (w.offsets == Offsets::long_grid) return static_cast<int>(signs >> 8 * eighth & 255);
  const uint32_t seven = signs >> 7 * eighth & 127, four = seven ^ seven >> 4, two = four ^ four >> 2;
  return static_cast<int>(seven | ((two ^ two >> 1) & 1) << 7);
}

// As `unpack_unit`.
CARRYALL_INLINE void unpack_grid(const uint8_t* unit, const Weights& w, uint8_t* bytes) {
  const bool is_long = w.offsets == Offsets::long_grid;
  for (int k = 0; k < 8; k++)
    for (int64_t c = 0; c < kColumns; c++) {
      const int number = unit[k * kColumns + c] | (is_long ? (unit[kGridHigh + c] >> k & 1) << 8 : 0);
      const uint32_t four = is_long ? kLongGridBytes[number] : kShortGridBytes[number];
      const int signs = grid_signs(unit, w, k / 2, c) >> k % 2 * 4;
      for (int i = 0; i < 4; i++) {
        const int magnitude = static_cast<int>(four >> 8 * i & 255);
        bytes[k * kLine + 4 * c + i] = static_cast<uint8_t>(128 + ((signs >> i & 1) != 0 ? -magnitude : magnitude));
      }
    }
}

// Unsigned weights of 32 inputs of a tile: byte 64 (k / 4) + 4 c + k % 4 is input k of output c. Those of 8 bits, and the values of
// codes, are raised by 128.
CARRYALL_INLINE void unpack_unit(const uint8_t* unit, const Weights& w, uint8_t* bytes) {
  const int64_t bits = w.bits;
  if (w.grids()) return unpack_grid(unit, w, bytes);
  if (bits == 8) {
    for (int i = 0; i < 8 * kLine; i++) bytes[i] = unit[i] ^ 128;
    return;
  }
  if (bits < 4) {
    for (int k = 0; k < 8; k++)
      for (int i = 0; i < kLine; i++) {
        const int low = unit[k / 4 * kLine + i] >> k % 4 * 2 & 3, high = bits == 3 ? unit[2 * kLine + i] >> k & 1 : 0;
        bytes[k * kLine + i] = static_cast<uint8_t>(low | high << 2);
      }
    return;
  }
  for (int line = 0; line < 4; line++)  // two loops, since compilers do not see lines in one
    for (int i = 0; i < kLine; i++) {
      bytes[2 * line * kLine + i] = unit[line * kLine + i] & 15;
      bytes[(2 * line + 1) * kLine + i] = unit[line * kLine + i] >> 4;
    }
  if (w.coded()) {
    const int8_t* codes = codes_of(w);
    for (int i = 0; i < 8 * kLine; i++) bytes[i] = static_cast<uint8_t>(codes[bytes[i]] + 128);
    return;
  }
  const uint8_t* high = unit + 4 * kLine;
  for (int k = 0; bits == 5 && k < 8; k++)
    for (int i = 0; i < kLine; i++) bytes[k * kLine + i] |= static_cast<uint8_t>((high[i] >> k & 1) << 4);
  for (int k = 0; bits == 6 && k < 8; k++)
    for (int i = 0; i < kLine; i++) bytes[k * kLine + i] |= static_cast<uint8_t>((high[k / 4 * kLine + i] >> k % 4 * 2 & 3) << 4);
}

// The integers that a block of a stretch multiplies the scale and the minimum of column `c` by.
// Where there are sixteen of 6 bits, `index` counts scales and minima alternately.
CARRYALL_INLINE int six_of(const uint8_t* factors, int64_t index, int64_t c) {
  const uint8_t low = factors[index / 2 * kColumns + c], high = factors[(8 + index / 4) * kColumns + c];
  return (low >> index % 2 * 4 & 15) | (high >> index % 4 * 2 & 3) << 4;
}

CARRYALL_INLINE int scale_of(const Weights& w, const uint8_t* factors, int64_t block, int64_t c) {
  if (w.offsets == Offsets::long_grid) return 2 * (factors[(2 + block / 2) * kColumns + c] >> block % 2 * 4 & 15) + 1;
  if (w.offsets == Offsets::short_grid) {
    const uint8_t* unit = factors - (w.group / w.block - block) * w.unit_bytes();  // factors follow the units
    return 2 * (unit[kGridSigns + 4 * c + 3] >> 4) + 1;
  }
  if (w.bits == 3) return six_of(factors + 2 * kColumns, block, c) - 32;
  if (w.offsets != Offsets::half_minima) return static_cast<int8_t>(factors[2 * kColumns + block * kColumns + c]);
  return w.block == 16 ? factors[(4 + block) * kColumns + c] & 15 : six_of(factors + 4 * kColumns, 2 * block, c);
}

CARRYALL_INLINE int minimum_of(const Weights& w, const uint8_t* factors, int64_t block, int64_t c) {
  return w.block == 16 ? factors[(4 + block) * kColumns + c] >> 4 : six_of(factors + 4 * kColumns, 2 * block + 1, c);
}

// The scale of column `c` of a stretch.
CARRYALL_INLINE float stretch_scale(const Weights& w, const uint8_t* factors, int64_t c) {
  if (w.offsets == Offsets::exponent_codes) return float_of_exponent(factors[c]);
  return float_of_half(factors + 2 * c) * (w.offsets == Offsets::short_grid ? 0.25f : 1);
}

// What unsigned weights are relative to.
CARRYALL_INLINE int zero_of(const Weights& w) {
  return w.offsets == Offsets::half_minima ? 0 : w.coded() ? 128 : 1 << (w.bits - 1);
}

}  // namespace
}  // namespace carryall
