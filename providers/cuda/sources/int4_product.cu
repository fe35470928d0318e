// A product of few rows with int4 weights in MatMulNBits' layout, that reads each weight once.
//
//   x        half [rows, inner]
//   weights  uint8 [columns, inner / 2], the first weight of two in the lower half of a byte
//   scales   half [columns, inner / group]
//   zeros    uint8 [columns, (inner / group + 1) / 2], packed as weights are; null: 8
//   y        half [rows, columns]
//
// onnxruntime's kernel for more than 16 rows writes all weights as half to memory and reads them again. Here a block of 8
// warps has all rows and 16 columns for each of `kAcross` warps; the others have further parts of the inner axis, in steps
// of 128, and at the end the sums of the parts are added in their order. Warps of a block read the same x at about the
// same time, so that x comes from L2 once for 16 * kAcross columns. Weights are rounded to half, as onnxruntime does.
//
// A tile's product adds over 16 places of the inner axis, in any order, as long as both factors have the same one. So
// thread t of four holds 32 places that lie side by side, and multiplies 4 of them in each of 8 products: it loads 16
// bytes of weights and of x at a time.
#include "tiles.cuh"

struct Words {
  unsigned of[4];
};

constexpr int kWarps = 8, kWide = 16, kStep = 128, kOwn = 32;  // kOwn: places of a thread in a step

__device__ inline Words load(const void* from) { return *static_cast<const Words*>(from); }

// Two weights, of `word` from bit `first` on.
__device__ inline unsigned two_weights(unsigned word, int first, float scale, int zero) {
  const int low = static_cast<int>(word >> first & 15) - zero, high = static_cast<int>(word >> (first + 4) & 15) - zero;
  return from_float<Half>(low * scale).bits | static_cast<unsigned>(from_float<Half>(high * scale).bits) << 16;
}

__device__ inline int zero_point(const unsigned char* zeros, long long column, int groups, int group) {
  return zeros == nullptr ? 8 : zeros[column * ((groups + 1) / 2) + group / 2] >> 4 * (group % 2) & 15;
}

template <int kTiles, int kAcross>  // kTiles of 16 rows
__device__ void multiply(const Half* x, const unsigned char* weights, const Half* scales, const unsigned char* zeros, Half* y,
                         int rows, int columns, int inner, int group) {
  constexpr int kParts = kWarps / kAcross, kColumns = kWide * kAcross;
  __shared__ float total[16 * kTiles * kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own = warp % kAcross * kWide, part = warp / kAcross;
  const int first = blockIdx.x * kColumns, groups = inner / group;
  float sums[kTiles][2][4] = {};
  for (int begin = part * kStep; begin < inner; begin += kParts * kStep) {
    const int place = begin + kOwn * t;
    Words packed[2] = {};
    float halves[2][2] = {};  // scales of the first and the last 16 weights
    int zero[2][2] = {};
    for (int n = 0; n < 2; n++) {
      const int column = first + own + 8 * n + g;
      if (column >= columns || place >= inner) continue;  // 0 with a scale of 0
      packed[n] = load(weights + static_cast<long long>(column) * (inner / 2) + place / 2);
      for (int h = 0; h < 2; h++) {
        const int from = (place + 16 * h) / group;
        halves[n][h] = to_float(scales[static_cast<long long>(column) * groups + from]);
        zero[n][h] = zero_point(zeros, column, groups, from);
      }
    }
    for (int word = 0; word < 4; word++) {  // 8 weights: two products
      unsigned b[2][2][2];
      for (int n = 0; n < 2; n++)
        for (int i = 0; i < 4; i++)
          b[n][i / 2][i % 2] = two_weights(packed[n].of[word], 8 * i, halves[n][word / 2], zero[n][word / 2]);
      for (int m = 0; m < kTiles; m++) {
        Words loaded[2] = {};
        for (int h = 0; h < 2; h++) {
          const int row = 16 * m + 8 * h + g;
          if (row < rows && place < inner) loaded[h] = load(x + static_cast<long long>(row) * inner + place + 8 * word);
        }
        for (int i = 0; i < 2; i++) {
          const unsigned a[4] = {loaded[0].of[2 * i], loaded[1].of[2 * i], loaded[0].of[2 * i + 1],
                                 loaded[1].of[2 * i + 1]};
          for (int n = 0; n < 2; n++) add_product(sums[m][n], a, b[n][i]);
        }
      }
    }
  }
  for (int turn = 0; turn < kParts; turn++) {
    if (part == turn)
      for (int m = 0; m < kTiles; m++)
        for (int n = 0; n < 2; n++)
          for (int i = 0; i < 4; i++) {
            float* sum = total + (16 * m + g + i / 2 * 8) * kColumns + own + 8 * n + 2 * t + i % 2;
            *sum = turn == 0 ? sums[m][n][i] : *sum + sums[m][n][i];
          }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < rows * kColumns; i += 32 * kWarps) {
    const int row = i / kColumns, column = first + i % kColumns;
    if (column < columns) y[static_cast<long long>(row) * columns + column] = from_float<Half>(total[i]);
  }
}

extern "C" __global__ void int4_product_16(const Half* x, const unsigned char* weights, const Half* scales,
                                           const unsigned char* zeros, Half* y, int rows, int columns, int inner,
                                           int group) {
  multiply<1, 1>(x, weights, scales, zeros, y, rows, columns, inner, group);
}

extern "C" __global__ void int4_product_32(const Half* x, const unsigned char* weights, const Half* scales,
                                           const unsigned char* zeros, Half* y, int rows, int columns, int inner,
                                           int group) {
  multiply<2, 2>(x, weights, scales, zeros, y, rows, columns, inner, group);
}

extern "C" __global__ void int4_product_64(const Half* x, const unsigned char* weights, const Half* scales,
                                           const unsigned char* zeros, Half* y, int rows, int columns, int inner,
                                           int group) {
  multiply<4, 4>(x, weights, scales, zeros, y, rows, columns, inner, group);
}

extern "C" __global__ void int4_product_128(const Half* x, const unsigned char* weights, const Half* scales,
                                            const unsigned char* zeros, Half* y, int rows, int columns, int inner,
                                            int group) {
  multiply<8, 4>(x, weights, scales, zeros, y, rows, columns, inner, group);
}

// Weights as half [columns, inner], for products of many rows; a thread has 8 of them.
extern "C" __global__ void int4_weights(const unsigned char* weights, const Half* scales, const unsigned char* zeros,
                                        unsigned* whole, long long columns, int inner, int group) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x, words = columns * inner / 8;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    const long long column = i * 8 / inner, from = i * 8 % inner / group;
    const unsigned word = reinterpret_cast<const unsigned*>(weights)[i];
    const float scale = to_float(scales[column * (inner / group) + from]);
    const int zero = zero_point(zeros, column, inner / group, static_cast<int>(from));
    for (int pair = 0; pair < 4; pair++) whole[4 * i + pair] = two_weights(word, 8 * pair, scale, zero);
  }
}
