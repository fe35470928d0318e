// A product of few rows with int4 weights in MatMulNBits' layout, that reads each weight once.
//
//   x        half [rows, inner]
//   weights  uint8 [columns, inner / 2], the first weight of two in the lower half of a byte
//   scales   half [columns, inner / group]
//   y        half [rows, columns]
//
// onnxruntime's kernel for more than 16 rows writes all weights as half to memory and reads them again. Here a block of 8
// warps has 16 columns and all rows; each warp multiplies a part of the inner axis in steps of 128, and at the end the
// sums of the warps are added in their order. Weights are rounded to half, as onnxruntime rounds them.
//
// A tile's product adds over 16 places of the inner axis, in any order, as long as both factors have the same one. So
// thread t of four holds 32 places that lie side by side, and multiplies 4 of them in each of 8 products: it loads 16
// bytes of weights and of x at a time.
#include "tiles.cuh"

struct Words {
  unsigned of[4];
};

constexpr int kWarps = 8, kColumns = 16, kStep = 128, kOwn = 32;  // kOwn: places of a thread in a step

__device__ inline Words load(const void* from) { return *static_cast<const Words*>(from); }

// Two weights, of `word` from bit `first` on.
__device__ inline unsigned two_weights(unsigned word, int first, float scale) {
  const int low = static_cast<int>(word >> first & 15) - 8, high = static_cast<int>(word >> (first + 4) & 15) - 8;
  return from_float<Half>(low * scale).bits | static_cast<unsigned>(from_float<Half>(high * scale).bits) << 16;
}

template <int kTiles>  // of 16 rows
__device__ void multiply(const Half* x, const unsigned char* weights, const Half* scales, Half* y, int rows, int columns,
                         int inner, int group) {
  __shared__ float total[16 * kTiles * kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * kColumns, groups = inner / group;
  float sums[kTiles][2][4] = {};
  for (int begin = warp * kStep; begin < inner; begin += kWarps * kStep) {
    const int place = begin + kOwn * t;
    Words packed[2] = {};
    float halves[2][2] = {};  // scales of the first and the last 16 weights
    for (int n = 0; n < 2; n++) {
      const int column = first + 8 * n + g;
      if (column >= columns || place >= inner) continue;  // 0 with a scale of 0
      packed[n] = load(weights + static_cast<long long>(column) * (inner / 2) + place / 2);
      for (int h = 0; h < 2; h++)
        halves[n][h] = to_float(scales[static_cast<long long>(column) * groups + (place + 16 * h) / group]);
    }
    for (int word = 0; word < 4; word++) {  // 8 weights: two products
      unsigned b[2][2][2];
      for (int n = 0; n < 2; n++)
        for (int i = 0; i < 4; i++) b[n][i / 2][i % 2] = two_weights(packed[n].of[word], 8 * i, halves[n][word / 2]);
      for (int m = 0; m < kTiles; m++) {
        Words own[2] = {};
        for (int h = 0; h < 2; h++) {
          const int row = 16 * m + 8 * h + g;
          if (row < rows && place < inner) own[h] = load(x + static_cast<long long>(row) * inner + place + 8 * word);
        }
        for (int i = 0; i < 2; i++) {
          const unsigned a[4] = {own[0].of[2 * i], own[1].of[2 * i], own[0].of[2 * i + 1], own[1].of[2 * i + 1]};
          for (int n = 0; n < 2; n++) add_product(sums[m][n], a, b[n][i]);
        }
      }
    }
  }
  for (int turn = 0; turn < kWarps; turn++) {
    if (warp == turn)
      for (int m = 0; m < kTiles; m++)
        for (int n = 0; n < 2; n++)
          for (int i = 0; i < 4; i++) {
            float* sum = total + (16 * m + g + i / 2 * 8) * kColumns + 8 * n + 2 * t + i % 2;
            *sum = turn == 0 ? sums[m][n][i] : *sum + sums[m][n][i];
          }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < rows * kColumns; i += 32 * kWarps) {
    const int row = i / kColumns, column = first + i % kColumns;
    if (column < columns) y[static_cast<long long>(row) * columns + column] = from_float<Half>(total[i]);
  }
}

extern "C" __global__ void int4_product_32(const Half* x, const unsigned char* weights, const Half* scales, Half* y, int rows,
                                           int columns, int inner, int group) {
  multiply<2>(x, weights, scales, y, rows, columns, inner, group);
}

extern "C" __global__ void int4_product_64(const Half* x, const unsigned char* weights, const Half* scales, Half* y, int rows,
                                           int columns, int inner, int group) {
  multiply<4>(x, weights, scales, y, rows, columns, inner, group);
}

extern "C" __global__ void int4_product_128(const Half* x, const unsigned char* weights, const Half* scales, Half* y, int rows,
                                            int columns, int inner, int group) {
  multiply<8>(x, weights, scales, y, rows, columns, inner, group);
}
