// Plain C++ for every processor; the reference for the other instruction sets, bit by bit.
#include <cmath>

#include "gguf_products.h"

namespace carryall {
namespace {

struct Portable {
  struct Int {
    int32_t lanes[16];
  };
  struct Float {
    float lanes[16];
  };
  static constexpr int kLanes = 16, kRows = 4, kByteOffset = 0;

  static Float load(const float* x) {
    Float y;
    memcpy(&y, x, sizeof y);
    return y;
  }
  static void store(float* y, const Float& x) { memcpy(y, &x, sizeof x); }
  static Float floats(float x) {
    Float y;
    for (float& lane : y.lanes) lane = x;
    return y;
  }
  static Int integers(int32_t x) {
    Int y;
    for (int32_t& lane : y.lanes) lane = x;
    return y;
  }
  static Float multiply(Float a, const Float& b) {
    for (int i = 0; i < kLanes; i++) a.lanes[i] *= b.lanes[i];
    return a;
  }
  static Float fused(const Float& a, const Float& b, Float c) {
    for (int i = 0; i < kLanes; i++) c.lanes[i] = std::fma(a.lanes[i], b.lanes[i], c.lanes[i]);
    return c;
  }
  static Float converted(const Int& x) {
    Float y;
    for (int i = 0; i < kLanes; i++) y.lanes[i] = static_cast<float>(x.lanes[i]);
    return y;
  }
  static Int add(Int a, const Int& b) {
    for (int i = 0; i < kLanes; i++) a.lanes[i] += b.lanes[i];
    return a;
  }
  static Int subtract(Int a, const Int& b) {
    for (int i = 0; i < kLanes; i++) a.lanes[i] -= b.lanes[i];
    return a;
  }
  static Int negative_product(Int a, int32_t b) {
    for (int32_t& lane : a.lanes) lane *= -b;
    return a;
  }
  static Int product(Int a, const Int& b) {
    for (int i = 0; i < kLanes; i++) a.lanes[i] *= b.lanes[i];
    return a;
  }
  static Int loaded(const int32_t* x) {
    Int y;
    memcpy(&y, x, sizeof y);
    return y;
  }
  static Int widened(const uint8_t* x) {
    Int y;
    for (int i = 0; i < kLanes; i++) y.lanes[i] = x[i];
    return y;
  }

  template <int kBits, int kCount, int kSums>
  static void accumulate(Int (&sums)[kCount][kSums], const uint8_t* lines, const int8_t* values, int64_t row_step) {
    constexpr int kStep = kBits == 4 ? 8 : 4;  // inputs of a line
    for (int k = 0; k < 16; k += kStep, lines += kLine)
      for (int m = 0; m < kCount; m++)
        for (int i = 0; i < 4; i++) {
          const int8_t* x = values + m * row_step + k + i;
          for (int c = 0; c < kLanes; c++) {
            const int32_t w = lines[4 * c + i];
            sums[m][0].lanes[c] += kBits == 4 ? (w & 15) * x[0] + (w >> 4) * x[4] : w * x[0];
          }
        }
  }
};

bool always() { return true; }

void multiply_portable(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                       int64_t first_tile, int64_t last_tile, Outputs y) {
  const auto chosen = w.halves() ? multiply<Stored<Portable>> : multiply<OneRegister<Portable>>;
  chosen(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace

const Kernels kPortable = {"portable", always, quantize, multiply_portable, &kPortableAttention, round_portable, sweep_portable};

}  // namespace carryall
