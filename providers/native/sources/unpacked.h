// Weights as bytes in units of one scale a column, over an instruction set `Isa`: groups of 4-bit blocks, or large blocks.
#pragma once
#include "kernels.h"

namespace carryall {
namespace {

// Inputs of a unit; 0 if the weights have none.
inline int64_t unit_of(const Weights& w) {
  const bool fits = w.bits == 4 ? w.offsets != Offsets::minima : w.offsets == Offsets::middle;
  return w.group > 0 ? w.group : fits && w.block >= kLine ? w.block : 0;
}

// A number of at most 255 in every byte.
template <class Isa>
inline typename Isa::Int copies(int byte) {
  return Isa::integers(static_cast<int>(static_cast<uint32_t>(byte) * 0x01010101u));
}

// Turns the values of 4-bit block `b` into bytes: relative to the zero point, times the multiple of the block if there are
// groups, plus `raise` modulo 256.
template <class Isa>
class Nibbles {
 public:
  using Int = typename Isa::Int;

  CARRYALL_INLINE Nibbles(const Weights& w, const uint8_t* tile, int64_t b, int raise) : grouped_(w.group > 0) {
    Int zero = Isa::integers(w.offsets == Offsets::minima ? 0 : 8);
    if (w.offsets == Offsets::zero_points) zero = Isa::widened(tile + w.points() + b * kColumns);
    multiple_ = zero = Isa::words(zero, zero);
    if (grouped_) {
      // Times an unsigned nibble a multiple fits a byte, so products of 16 bits are those of their bytes.
      multiple_ = Isa::widened(tile + w.multiples() + b * kColumns);
      multiple_ = Isa::words(multiple_, multiple_);
      zero = Isa::multiply_words(zero, multiple_);
    }
    zero_ = Isa::subtract_bytes(Isa::multiply_words(zero, copies<Isa>(1)), copies<Isa>(raise));
  }

  // Inputs 0 to 3 of a line's 8.
  CARRYALL_INLINE Int low(Int line) const { return byte(Isa::low(line)); }
  CARRYALL_INLINE Int high(Int line) const { return byte(Isa::high(line)); }

 private:
    CARRYALL_INLINE Int byte(Int nibbles) const {
    if (grouped_) nibbles = Isa::multiply_words(nibbles, multiple_);
    return Isa::subtract_bytes(nibbles, zero_);
  }

  const bool grouped_;
  Int zero_, multiple_;
};

// Writes blocks [first, last) of a tile as bytes: of 4 bits as `Nibbles` do, of 8 bits as they are, minus 128, plus `raise`.
template <class Isa>
inline void unpack(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, int raise, uint8_t* bytes) {
  for (int64_t b = first; b < last; b++) {
    const uint8_t* lines = tile + b * w.block_bytes();
    const uint8_t* end = lines + w.value_bytes();
    if (w.bits == 8) {
      for (; lines < end; lines += kLine, bytes += kLine)
        Isa::store_line(bytes, Isa::subtract_bytes(Isa::line(lines), copies<Isa>(128 - raise)));
      continue;
    }
    const Nibbles<Isa> nibbles(w, tile, b, raise);
    for (; lines < end; lines += kLine, bytes += 2 * kLine) {
      const auto line = Isa::line(lines);
      Isa::store_line(bytes, nibbles.low(line));
      Isa::store_line(bytes + kLine, nibbles.high(line));
    }
  }
}

}  // namespace
}  // namespace carryall
