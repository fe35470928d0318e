// SiluAndMul: the gate of a MLP whose products are merged, x [rows, 2 * width] -> y [rows, width].
//
// In place of Split, QuickGelu and Mul: two launches and four passes over memory less. A thread computes
// neighbours that fill 16 bytes; a row is read in the order of memory.
#include "types.cuh"

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Values {
  T of[kCount];
};

template <class T, int kCount>
__device__ void silu_and_mul(const T* x, T* y, long long rows, long long width) {
  using Part = Values<T, kCount>;
  const long long parts = width / kCount, step = static_cast<long long>(gridDim.x) * blockDim.x;
  const Part* from = reinterpret_cast<const Part*>(x);
  Part* to = reinterpret_cast<Part*>(y);
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * parts; i += step) {
    const long long place = i + i / parts * parts;
    const Part gates = from[place], values = from[place + parts];
    Part results;
    for (int j = 0; j < kCount; j++) {
      const float gate = to_float(gates.of[j]);
      results.of[j] = from_float<T>(gate / (1.0f + expf(-gate)) * to_float(values.of[j]));
    }
    to[i] = results;
  }
}

// `whole` is whether rows and both arrays begin at multiples of 16 bytes.
template <class T>
__device__ void silu_and_mul(const T* x, T* y, long long rows, long long width, int whole) {
  if (whole)
    silu_and_mul<T, 16 / sizeof(T)>(x, y, rows, width);
  else
    silu_and_mul<T, 1>(x, y, rows, width);
}

extern "C" __global__ void silu_and_mul_float(const float* x, float* y, long long rows, long long width, int whole) {
  silu_and_mul(x, y, rows, width, whole);
}

extern "C" __global__ void silu_and_mul_half(const Half* x, Half* y, long long rows, long long width, int whole) {
  silu_and_mul(x, y, rows, width, whole);
}

extern "C" __global__ void silu_and_mul_bfloat16(const Bfloat16* x, Bfloat16* y, long long rows, long long width,
                                                 int whole) {
  silu_and_mul(x, y, rows, width, whole);
}
