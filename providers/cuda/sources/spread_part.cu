// The part of a rank in rows of all ranks: x [rows, own] -> y [rows, whole], 0 elsewhere. A sum over the ranks joins them.

extern "C" __global__ void spread_part(const float* x, float* y, long long rows, long long own, long long whole,
                                       long long offset) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * whole; i += step) {
    const long long column = i % whole - offset;
    y[i] = column >= 0 && column < own ? x[i / whole * own + column] : 0.0f;
  }
}
