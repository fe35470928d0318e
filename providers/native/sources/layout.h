// The layout of quantized weights, version 2. It does not depend on the instruction set.
//
// A tile holds 16 outputs. Within a tile, block after block of inputs; within a block:
//   values  4 bits: 64 bytes for 8 inputs. Byte 4 c + i has input i of output c in its low nibble, input i + 4
//                   in its high nibble.
//           8 bits: 64 bytes for 4 inputs. Byte 4 c + i has input i of output c.
//   scales  16 float32, only without groups
//   minima  16 float32, only with Offsets::minima
// With groups, the scale of a block is a multiple (0 to 15) of the scale of its group, and the magnitude of a value
// relative to its zero point, times the multiple, is at most 127. After the blocks follow
//   scales       16 float32 per group
//   multiples    16 bytes per block
// With Offsets::zero_points 16 bytes per block follow. A tile is padded to a multiple of 64 bytes. Values are unsigned.
// Missing inputs and outputs are stored as zeros.
//
// Weights of GGUF files, with Offsets::half_middle or half_minima, take as many bytes as in the file. Their tiles hold stretch
// after stretch of inputs: 32 inputs without groups, 256 with. Within a stretch, for each 32 inputs:
//   values  4, 5, 6 bits: the lower 4 bits as above, 256 bytes; then the bits above. Single bits (5 bits): 64 bytes, bit j of byte
//           4 c + i is that of input 4 j + i. Pairs of bits (6 bits): 64 bytes for 16 inputs, bits 2 j and 2 j + 1 of byte 4 c + i
//           are those of input 4 j + i. 2 bits: pairs of bits. 3 bits: the lower pairs of bits, then single bits.
//           8 bits: as above, but signed.
// then
//   scales  16 float16
//   minima  16 float16, only with half_minima; they are subtracted with groups and added without
// and with groups, whose blocks have integers for the scale and the minimum of the stretch as factors:
//   with half_minima, blocks of 32   8 times 16 bytes: the lower 4 bits of a block's scale, and above them of its minimum;
//                                    4 times 16 bytes: the upper 2 bits of scale and minimum of two blocks, from bit 0 on
//   with half_minima, blocks of 16   16 times 16 bytes: the 4 bits of a block's scale, and above them of its minimum
//   with half_middle (blocks of 16)  16 times 16 signed bytes: scales; with 3 bits their 6 bits, more by 32, where blocks of 32
//                                    have scales (the even blocks) and minima (the odd ones)
//   with half_codes (blocks of 32)   8 times 16 signed bytes: scales
//   with long_grid (blocks of 32)    4 times 16 bytes: the 4 bits of the scales of two blocks
// With half_codes and exponent_codes, 4 bits are the number of a value in a table (gguf_blocks.h). The scales of exponent_codes are
// 16 bytes e that mean 2^(e - 128).
//
// With short_grid and long_grid, whose blocks of 32 are 4 at a time, values of 32 inputs are 8 times 16 bytes, the numbers of four
// magnitudes in a table (gguf_grids.h); then 64 bytes, the signs of each output; with long_grid 16 bytes, bit j the ninth of number j.
// With short_grid an output has 7 signs for 8 inputs, whose minuses are even in number, and above them the 4 bits of the scale. A
// scale s means 2 s + 1 times the stretch's scale, with short_grid a quarter of it.
//
// Floats, with blocks of 1: 16 outputs for each input, of 2 bytes with Offsets::float16 or bfloat16, of 4 with float32. With Offsets::split,
// which AMX reads as it is stored, a float of 4 bytes is the sum of two bfloat16, and one of 2 bytes is a bfloat16: for each 32 inputs
// 16 lines of high parts, then, of 4 bytes, 16 of low ones; line i has those of input i beside those of input i + 16 of each output.
// Offsets::rounded is the same of 2 bytes for products whose rows AMX rounds to bfloat16.
#pragma once
#include <cstdint>
#include <cstring>

namespace carryall {

constexpr int64_t kLayoutVersion = 2;
constexpr int64_t kColumns = 16;  // outputs of a tile
constexpr int64_t kLine = 64;     // bytes
constexpr int64_t kUnit = 32;     // inputs whose bits lie together in weights of GGUF files
constexpr int64_t kSplitStep = 32;  // inputs whose parts lie together
constexpr int64_t kSharedScale = 64;  // inputs of a row with a common scale, at least, where blocks of weights need none of their own
constexpr int64_t kLargest = int64_t{1} << 24;  // of inputs and of outputs; keeps every product below in 63 bits

enum class Offsets : int64_t { middle = 0, zero_points = 1, minima = 2, half_middle = 3, half_minima = 4, float16 = 5, bfloat16 = 6, half_codes = 7, exponent_codes = 8, float32 = 9, split = 10, short_grid = 11, long_grid = 12, rounded = 13 };

// Inlined always: sources are compiled for different instruction sets, and the linker keeps one copy of a function.
#define CARRYALL_INLINE [[gnu::always_inline]] inline

struct Weights {
  const uint8_t* data = nullptr;
  int64_t inputs = 0, outputs = 0, bits = 0, block = 0;
  Offsets offsets = Offsets::middle;
  int64_t group = 0;  // inputs with a common scale, or 0: each block has its own

  CARRYALL_INLINE int64_t blocks() const { return (inputs + block - 1) / block; }
  CARRYALL_INLINE int64_t width() const { return blocks() * block; }  // inputs with the padding of the last block
  CARRYALL_INLINE int64_t tiles() const { return (outputs + kColumns - 1) / kColumns; }
  CARRYALL_INLINE int64_t value_bytes() const { return kColumns * block * bits / 8; }
  CARRYALL_INLINE int64_t block_bytes() const {
    return value_bytes() + kLine * (group > 0 ? 0 : offsets == Offsets::minima ? 2 : 1);
  }
  CARRYALL_INLINE int64_t groups() const { return group > 0 ? (width() + group - 1) / group : 0; }
  // Positions in a tile.
  CARRYALL_INLINE int64_t group_scales() const { return blocks() * block_bytes(); }
  CARRYALL_INLINE int64_t multiples() const { return group_scales() + groups() * kLine; }
  CARRYALL_INLINE int64_t points() const { return multiples() + (group > 0 ? blocks() * kColumns : 0); }
  CARRYALL_INLINE bool floats() const { return bits >= 16; }
  CARRYALL_INLINE bool splits() const { return offsets == Offsets::split || offsets == Offsets::rounded; }
  CARRYALL_INLINE int64_t row_parts() const { return offsets == Offsets::rounded ? 1 : 2; }  // bfloat16 of an activation, if it splits
  CARRYALL_INLINE int64_t split_bytes() const { return kSplitStep * kColumns * bits / 8; }  // of kSplitStep inputs
  // Of weights of GGUF files.
  CARRYALL_INLINE bool grids() const { return offsets == Offsets::short_grid || offsets == Offsets::long_grid; }
  CARRYALL_INLINE bool coded() const { return offsets == Offsets::half_codes || offsets == Offsets::exponent_codes || grids(); }
  CARRYALL_INLINE bool halves() const { return offsets == Offsets::half_middle || offsets == Offsets::half_minima || coded(); }
  // Whether the factors of blocks are sixteen integers of 6 bits.
  CARRYALL_INLINE bool sixes() const { return (bits == 3 && !grids()) || (offsets == Offsets::half_minima && block == 32); }
  CARRYALL_INLINE int64_t stretch() const { return group > 0 ? group : block; }
  CARRYALL_INLINE int64_t unit_bytes() const { return kUnit * kColumns * bits / 8 + (offsets == Offsets::long_grid ? kColumns : 0); }
  CARRYALL_INLINE int64_t factors() const { return stretch() / kUnit * unit_bytes(); }  // their position in a stretch
  CARRYALL_INLINE int64_t stretch_bytes() const {
    const int64_t integers = sixes() ? 12 : offsets == Offsets::short_grid ? 0 : offsets == Offsets::long_grid ? 4 : group / block;
    const int64_t of_blocks = group == 0 ? 0 : integers * kColumns;
    const int64_t bytes = offsets == Offsets::exponent_codes ? 1 : offsets == Offsets::half_minima ? 4 : 2;  // of an output
    return factors() + bytes * kColumns + of_blocks;
  }
  // Inputs of a row with a common scale.
  CARRYALL_INLINE int64_t share() const {
    const int64_t shared = halves() ? (group > 0 ? kSharedScale : block) : group > 0 ? group : bits == 4 ? kSharedScale : 1;
    return shared > block ? shared : block;
  }
  CARRYALL_INLINE int64_t tile_bytes() const {
    if (splits()) return (inputs + kSplitStep - 1) / kSplitStep * split_bytes();
    if (floats()) return (inputs * bits / 8 * kColumns + kLine - 1) / kLine * kLine;
    if (halves()) return (inputs / stretch() * stretch_bytes() + kLine - 1) / kLine * kLine;
    const int64_t end = points() + (offsets == Offsets::zero_points ? blocks() * kColumns : 0);
    return (end + kLine - 1) / kLine * kLine;
  }
  CARRYALL_INLINE int64_t bytes() const { return tiles() * tile_bytes(); }

  // Returns what is wrong with the sizes, nullptr if nothing is.
  CARRYALL_INLINE const char* complaint() const {
    if (inputs < 1 || inputs > kLargest) return "inputs is not in [1, 2^24]";
    if (outputs < 1 || outputs > kLargest) return "outputs is not in [1, 2^24]";
    if (halves()) return complaint_of_halves();
    const bool half = offsets == Offsets::float16 || offsets == Offsets::bfloat16, whole = offsets == Offsets::float32;
    if (splits() ? bits != 16 && (bits != 32 || row_parts() == 1) : half != (bits == 16) || whole != (bits == 32))
      return "weights of 16 bits have the offsets 5, 6, 10 or 13, those of 32 bits 9 or 10, and no others have these";
    if (floats()) return block == 1 && group == 0 ? nullptr : "weights of 16 and 32 bits have blocks of 1 and no groups";
    if (bits != 4 && bits != 8) return "bits is not 4 or 8";
    if (block < 16 || block > 256 || (block & (block - 1)) != 0) return "block_size is not 16, 32, 64, 128 or 256";
    const int64_t kind = static_cast<int64_t>(offsets);
    if (kind < 0 || kind > 2) return "offsets is not 0 to 13";
    if (group == 0) return nullptr;
    if (group < 64 || group > 256 || group % 64 != 0) return "group_size is not 0, 64, 128, 192 or 256";
    if (group % block != 0 || bits != 4 || offsets == Offsets::minima) return "these weights have no groups";
    return nullptr;
  }

 private:
  CARRYALL_INLINE const char* complaint_of_halves() const {
    const bool minima = offsets == Offsets::half_minima;
    const bool single = group == 0 && block == 32 && (bits == 4 || bits == 5 || (bits == 8 && !minima));
    const bool thirty_two = block == 32 && minima && (bits == 4 || bits == 5);
    const bool nested = group == 256 && (thirty_two || (block == 16 && (minima ? bits == 2 : bits == 3 || bits == 6)));
    if (grids()) {
      if (bits != 3 || block != 32 || group != 256) return "no type of GGUF files has these bits, block_size, group_size and offsets";
    } else if (coded()) {
      const bool known = bits == 4 && block == 32 && (group == 0 || (group == 256 && offsets == Offsets::half_codes));
      if (!known) return "no type of GGUF files has these bits, block_size, group_size and offsets";
    } else if (!single && !nested) return "no type of GGUF files has these bits, block_size, group_size and offsets";
    if (inputs % stretch() != 0) return "inputs is no multiple of the blocks of these weights";
    return nullptr;
  }
};

// The float of weight `input` of a column, whose parts begin at `column` in a tile of split weights. A low part is 16 lines behind its
// high one.
CARRYALL_INLINE float split_weight(const uint8_t* column, int64_t input, int64_t bits) {
  const uint8_t* line = column + input / kSplitStep * kSplitStep * kColumns * bits / 8 + input % 16 * kLine;
  float sum = 0;
  for (int64_t part = 0; part < bits / 16; part++, line += kColumns * kLine) {
    uint32_t pair;
    memcpy(&pair, line, sizeof pair);
    pair = input / 16 % 2 != 0 ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &pair, sizeof value);
    sum = part == 0 ? value : sum + value;
  }
  return sum;
}

// Rows of activations in memory.
struct Inputs {
  const float* data = nullptr;
  int64_t step = 0;  // floats from one row to the next
  CARRYALL_INLINE const float* row(int64_t index) const { return data + index * step; }
};

// Rows of results in memory.
struct Outputs {
  float* data;
  int64_t step;  // floats from one row to the next
  CARRYALL_INLINE float* at(int64_t row, int64_t column) const { return data + row * step + column; }
};

}  // namespace carryall
