// Weights of GGUF files as bytes, and what their products are scaled by as floats, unpacked once for many rows. Included by the products on
// AVX-512 VNNI and on AMX.
#pragma once
#include "avx512_gguf.h"

namespace carryall {
namespace {
namespace stored {

// The lines of 16 floats of a share of the inputs: with groups, whose shares are 64 inputs, the scale of the stretch, the integers of
// blocks, the scale of minima, the integers of minima; without groups the scale, then the minimum, of a block.
struct Factors {
  static constexpr int64_t kShares = kSharedScale;  // inputs of a share of groups

  int64_t blocks, count;  // blocks of a share (groups), lines of a share (groups) or of a block
  bool minima;

  CARRYALL_INLINE explicit Factors(const Weights& w)
      : blocks(w.group > 0 ? kShares / w.block : 1), minima(w.offsets == Offsets::half_minima) {
    count = (w.group > 0 ? 1 + blocks : 1) * (minima ? 2 : 1);
  }
  CARRYALL_INLINE int64_t bytes() const { return count * kLine; }
};

CARRYALL_INLINE void store_integers(uint8_t* line, Int integers) { _mm512_store_ps(line, _mm512_cvtepi32_ps(integers)); }

// Bytes relative to zero; with kRaised unsigned ones, relative to `zero_of`.
template <int kBits, bool kRaised>
class Bytes {
 public:
  CARRYALL_INLINE explicit Bytes(const Weights& w) : coded_(w.coded()), zero_(_mm512_set1_epi8(static_cast<char>(zero_of(w)))) {
    const __m128i codes = _mm_load_si128(reinterpret_cast<const __m128i*>(codes_of(w)));
    codes_ = _mm512_broadcast_i32x4(kRaised ? _mm_xor_si128(codes, _mm_set1_epi8(-kSigned)) : codes);
  }

  // Writes the 32 inputs of a unit: byte 64 (k / 4) + 4 c + k % 4 is input k of output c.
  CARRYALL_INLINE void write(const uint8_t* unit, void* bytes) const {
    each<kUnit / 4>([&](auto line) __attribute__((always_inline)) {
      constexpr int k = 4 * decltype(line)::value;
      _mm512_storeu_si512(static_cast<uint8_t*>(bytes) + k * kColumns, four<k>(unit));
    });
  }

 private:
  template <int k>
  CARRYALL_INLINE Int four(const uint8_t* unit) const {
    if constexpr (kBits == 8) {
      const Int line = _mm512_loadu_si512(unit + k / 4 * kLine);
      return kRaised ? _mm512_xor_si512(line, _mm512_set1_epi8(-kSigned)) : line;
    } else {
      const Int values = four_inputs<kBits, k>(unit);
      if (kBits == 4 && coded_) return _mm512_shuffle_epi8(codes_, values);
      return kRaised ? values : _mm512_sub_epi8(values, zero_);
    }
  }

  const bool coded_;
  Int codes_;
  const Int zero_;
};

// The integers of the blocks of 64 inputs `p` of a stretch: scales, and minima if there are some.
template <int kBits, int kBlocks>
CARRYALL_INLINE void write_integers(const Weights& w, const uint8_t* halves, int64_t p, uint8_t* scales, uint8_t* minima) {
  if constexpr (kBlocks == 4) {
    const Fours<kBits> fours(halves, p);
    for (int j = 0; j < kBlocks; j++) store_integers(scales + j * kLine, _mm512_cvtepi8_epi32(fours.scales[j]));
    for (int j = 0; j < kBlocks && kBits == 2; j++) store_integers(minima + j * kLine, _mm512_cvtepi8_epi32(fours.minima[j]));
  } else if (w.coded()) {
    for (int j = 0; j < kBlocks; j++)
      store_integers(scales + j * kLine, _mm512_cvtepi8_epi32(columns(halves + (2 + 2 * p + j) * kColumns)));
  } else {
    const Sixes sixes(halves + kLine, p);
    for (int j = 0; j < kBlocks; j++) {
      store_integers(scales + j * kLine, _mm512_cvtepi8_epi32(sixes.scales[j]));
      store_integers(minima + j * kLine, _mm512_cvtepi8_epi32(sixes.minima[j]));
    }
  }
}

// Shares [first, last) of a tile with groups.
template <int kBits, bool kRaised>
void unpack_groups(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, uint8_t* bytes, uint8_t* factors) {
  constexpr int kBlocks = kBits == 4 || kBits == 5 ? 2 : 4;
  const Factors form(w);
  const Bytes<kBits, kRaised> form_of_bytes(w);
  const int64_t unit = w.unit_bytes();
  for (int64_t s = first; s < last; s++, bytes += kSharedScale * kColumns, factors += form.bytes()) {
    const uint8_t *stretch = tile + s / 4 * w.stretch_bytes(), *units = stretch + s % 4 * 2 * unit, *halves = stretch + w.factors();
    uint8_t* minima = factors + (1 + kBlocks) * kLine;
    _mm512_store_ps(factors, floats_of(halves));
    if (form.minima) _mm512_store_ps(minima, floats_of(halves + 2 * kColumns));
    write_integers<kBits, kBlocks>(w, halves, s % 4, factors + kLine, minima + kLine);
    for (int j = 0; j < 2; j++) form_of_bytes.write(units + j * unit, bytes + j * kUnit * kColumns);
  }
}

// Shares [first, last) of a tile of IQ3_XXS or IQ3_S.
template <bool kLong, bool kRaised>
void unpack_grids(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, uint8_t* bytes, uint8_t* factors) {
  const Grid<kLong> grid(w);
  const int64_t unit = w.unit_bytes();
  for (int64_t b = 2 * first; b < 2 * last; b++, bytes += kUnit * kColumns) {
    const uint8_t *stretch = tile + b / 8 * w.stretch_bytes(), *from = stretch + b % 8 * unit, *halves = stretch + w.factors();
    if (b % 2 == 0) _mm512_store_ps(factors, scales_of(w, halves));
    store_integers(factors + (1 + b % 2) * kLine, grid.integers(from, halves, b % 8));
    if (b % 2 == 1) factors += 3 * kLine;
    each<kUnit / 4>([&](auto line) __attribute__((always_inline)) {
      constexpr int k = 4 * decltype(line)::value;
      const Int raised = grid.template four<k>(from);
      _mm512_storeu_si512(bytes + k * kColumns, kRaised ? raised : _mm512_xor_si512(raised, _mm512_set1_epi8(-kSigned)));
    });
  }
}

// Blocks [first, last) of 32 inputs of a tile without groups.
template <int kBits, bool kRaised>
void unpack_single(const Weights& w, const uint8_t* tile, int64_t first, int64_t last, uint8_t* bytes, uint8_t* factors) {
  const Factors form(w);
  const Bytes<kBits, kRaised> form_of_bytes(w);
  for (int64_t b = first; b < last; b++, bytes += kUnit * kColumns, factors += form.bytes()) {
    const uint8_t *unit = tile + b * w.stretch_bytes(), *halves = unit + w.factors();
    _mm512_store_ps(factors, scales_of(w, halves));
    if (form.minima) _mm512_store_ps(factors + kLine, floats_of(halves + 2 * kColumns));
    form_of_bytes.write(unit, bytes);
  }
}

}  // namespace stored
}  // namespace
}  // namespace carryall
