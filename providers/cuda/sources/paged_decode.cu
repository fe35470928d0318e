// PagedDecode: attention of one new token a row over KV in blocks, com.microsoft PagedAttention's for such steps.
//
//   packed  T [rows, (heads + 2 * kv_heads) * size]: query, key and value of the token
//   caches  C [blocks, block, kv_heads, size]; the token's key and value are written to them
//   past    int [rows], the tokens before; table int [rows, width], the blocks of a row
//   y       T [rows, heads * size]
//
// In place of the operator's 5 launches: norms and rotary of query and key, the cache's new row and attention are one
// kernel; a second one joins the parts of a context that was split (flash decoding: T. Dao et al., 2023). A block of 128
// threads has a part of one row's context for one KV head and all query heads that share it, so that the cache is read
// once. It takes 64 positions at a time: 8 threads have a position in products with keys, size / 8 threads one of values.
// All sums are in float and in a fixed order. Caches of 8 bits hold value / scale; the scale of keys is applied to the
// query, that of values to the result.
#include "float8.cuh"
#include "types.cuh"

constexpr int kThreads = 128, kTile = 64, kLargest = 256, kAtOnce = 8;
constexpr float kLowest = -3.0e38f;

template <class C>
struct alignas(sizeof(C) * kAtOnce) Several {
  C of[kAtOnce];
};

// What a cache holds, as float; and a float as a cache holds it.
__device__ inline float held(Half value) { return to_float(value); }
__device__ inline float held(Bfloat16 value) { return to_float(value); }
__device__ inline float held(signed char value) { return static_cast<float>(value); }
__device__ inline float held(Float8 value) { return to_float(value); }

template <class C>
__device__ inline C stored(float value) {
  return from_float<C>(value);
}
template <>
__device__ inline signed char stored<signed char>(float value) {
  return static_cast<signed char>(rintf(fminf(fmaxf(value, -128.0f), 127.0f)));
}

__device__ inline float warp_sum(float value) {
  for (int gap = 16; gap > 0; gap /= 2) value += __shfl_xor_sync(0xffffffffu, value, gap);
  return value;
}

__device__ inline float warp_most(float value) {
  for (int gap = 16; gap > 0; gap /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, gap));
  return value;
}

// Normalises and turns a head by a warp; rounds it to T. `weights`, `cosines` and `sines` may be null.
template <class T>
__device__ void prepare(const T* from, const T* weights, const T* cosines, const T* sines, float* to, int size, int rotary,
                        int interleaved, float epsilon) {
  const int lane = threadIdx.x % 32;
  float squares = 0.0f;
  for (int i = lane; i < size; i += 32) squares += to_float(from[i]) * to_float(from[i]);
  squares = warp_sum(squares);
  const float factor = weights == nullptr ? 1.0f : 1.0f / sqrtf(squares / static_cast<float>(size) + epsilon);
  for (int i = lane; i < size; i += 32) to[i] = to_float(from[i]) * factor * (weights == nullptr ? 1.0f : to_float(weights[i]));
  __syncwarp();
  for (int i = lane; cosines != nullptr && i < rotary / 2; i += 32) {
    const int low = interleaved ? 2 * i : i, high = interleaved ? 2 * i + 1 : i + rotary / 2;
    const float a = to[low], b = to[high], c = to_float(cosines[i]), s = to_float(sines[i]);
    to[low] = a * c - b * s;
    to[high] = b * c + a * s;
  }
  __syncwarp();
  for (int i = lane; i < size; i += 32) to[i] = to_float(from_float<T>(to[i]));
  __syncwarp();
}

// One value of the result, of sums with weights exp(score - most); a sink is a score without a value.
template <class T>
__device__ inline T result(float value, float most, float total, const T* sinks, int head, float scale) {
  if (sinks != nullptr) {
    const float sink = to_float(sinks[head]), highest = fmaxf(most, sink), shrunk = expf(most - highest);
    value *= shrunk;
    total = total * shrunk + expf(sink - highest);
  }
  return from_float<T>(value / total * scale);
}

// The numbers of a launch.
struct Sizes {
  int heads, kv_heads, size, rotary, interleaved, block, width, window, splits;
  int channels;  // whether scales are [kv_heads * size] instead of one
  float scale, softcap, epsilon;
};

template <class T, class C, int kGroup>  // kGroup: most query heads of a KV head
__device__ void decode(const T* packed, C* keys, C* values, const int* past, const int* table, const T* cosines, const T* sines,
                       const T* sinks, const T* query_norm, const T* key_norm, const float* key_scales,
                       const float* value_scales, float* parts, T* y, Sizes sizes) {
  __shared__ float queries[kGroup * kLargest];  // and at the end the sums
  __shared__ float scores[kGroup][kTile];
  __shared__ float new_key[kLargest], new_value[kLargest];
  __shared__ float mosts[kGroup], totals[kGroup], factors[kGroup];
  const int size = sizes.size, kv_heads = sizes.kv_heads, group = sizes.heads / kv_heads;
  const int split = blockIdx.x % sizes.splits, kv = blockIdx.x / sizes.splits % kv_heads;
  const int row = blockIdx.x / sizes.splits / kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int last = past[row], first = sizes.window > 0 && last + 1 > sizes.window ? last + 1 - sizes.window : 0;
  const int share = (last + 1 - first + sizes.splits - 1) / sizes.splits, whole = (share + 15) / 16 * 16;
  const int begin = first + split * whole, end = begin + whole < last + 1 ? begin + whole : last + 1;
  float* part = parts + static_cast<long long>(blockIdx.x) * group * (size + 2);
  if (begin >= end) {
    for (int h = threadIdx.x; h < group; h += kThreads) part[h * (size + 2) + size + 1] = 0.0f;  // no weight
    return;
  }

  const T* own = packed + static_cast<long long>(row) * (sizes.heads + 2 * kv_heads) * size;
  const int angles = sizes.rotary / 2;
  const T* cosine = cosines == nullptr ? nullptr : cosines + static_cast<long long>(last) * angles;
  const T* sine = cosines == nullptr ? nullptr : sines + static_cast<long long>(last) * angles;
  const float* key_scale = key_scales == nullptr ? nullptr : key_scales + (sizes.channels ? kv * size : 0);
  const float* value_scale = value_scales == nullptr ? nullptr : value_scales + (sizes.channels ? kv * size : 0);
  for (int h = warp; h <= group; h += kThreads / 32) {
    const T* from = own + static_cast<long long>(h < group ? kv * group + h : sizes.heads + kv) * size;
    prepare(from, h < group ? query_norm : key_norm, cosine, sine, h < group ? queries + h * size : new_key, size, sizes.rotary,
            sizes.interleaved, sizes.epsilon);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < size; d += kThreads) {
    const float scale = key_scale == nullptr ? 1.0f : key_scale[sizes.channels ? d : 0];
    const float value = to_float(own[static_cast<long long>(sizes.heads + kv_heads + kv) * size + d]);
    const C key = stored<C>(new_key[d] / scale);
    const C kept = stored<C>(value / (value_scale == nullptr ? 1.0f : value_scale[sizes.channels ? d : 0]));
    new_key[d] = held(key);
    new_value[d] = held(kept);
    for (int h = 0; h < group; h++) queries[h * size + d] *= scale;
    if (end != last + 1) continue;
    const long long place = static_cast<long long>(table[row * sizes.width + last / sizes.block]) * sizes.block + last % sizes.block;
    keys[(place * kv_heads + kv) * size + d] = key;
    values[(place * kv_heads + kv) * size + d] = kept;
  }
  for (int h = threadIdx.x; h < group; h += kThreads) {
    mosts[h] = kLowest;
    totals[h] = 0.0f;
  }
  __syncthreads();

  const int slices = size / kAtOnce, parted = kThreads / slices, slice = threadIdx.x % slices, turn = threadIdx.x / slices;
  float sums[kGroup][kAtOnce] = {};
  for (int tile = begin; tile < end; tile += kTile) {
    for (int pass = 0; pass < kTile / 16 && tile + 16 * pass < end; pass++) {
      const int near = 16 * pass + static_cast<int>(threadIdx.x) / 8, position = tile + near;
      float dots[kGroup] = {};
      if (position < end) {
        const long long place = static_cast<long long>(table[row * sizes.width + position / sizes.block]) * sizes.block + position % sizes.block;
        const Several<C>* key = reinterpret_cast<const Several<C>*>(keys + (place * kv_heads + kv) * size);
        for (int i = lane % 8; i < slices; i += 8) {
          Several<C> loaded;
          if (position < last) loaded = key[i];
          for (int j = 0; j < kAtOnce; j++) {
            const float value = position < last ? held(loaded.of[j]) : new_key[i * kAtOnce + j];
#pragma unroll
            for (int h = 0; h < kGroup; h++)
              if (h < group) dots[h] += queries[h * size + i * kAtOnce + j] * value;
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kGroup; h++) {
        for (int gap = 4; gap > 0; gap /= 2) dots[h] += __shfl_xor_sync(0xffffffffu, dots[h], gap);
        float score = dots[h] * sizes.scale;
        if (sizes.softcap > 0.0f) score = sizes.softcap * tanhf(score / sizes.softcap);
        if (lane % 8 == 0) scores[h][near] = position < end ? score : kLowest;
      }
    }
    __syncthreads();
    const int count = end - tile < kTile ? end - tile : kTile;
    for (int h = warp; h < group; h += kThreads / 32) {
      float most = kLowest, total = 0.0f;
      for (int i = lane; i < count; i += 32) most = fmaxf(most, scores[h][i]);
      most = fmaxf(warp_most(most), mosts[h]);
      for (int i = lane; i < count; i += 32) {
        scores[h][i] = expf(scores[h][i] - most);
        total += scores[h][i];
      }
      total = warp_sum(total);
      if (lane == 0) {
        factors[h] = expf(mosts[h] - most);
        totals[h] = totals[h] * factors[h] + total;
        mosts[h] = most;
      }
      __syncwarp();
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kGroup; h++)
      for (int j = 0; j < kAtOnce && h < group; j++) sums[h][j] *= factors[h];
    for (int i = turn; i < count && turn < parted; i += parted) {
      const int position = tile + i;
      const long long place = static_cast<long long>(table[row * sizes.width + position / sizes.block]) * sizes.block + position % sizes.block;
      Several<C> loaded;
      if (position < last) loaded = reinterpret_cast<const Several<C>*>(values + (place * kv_heads + kv) * size)[slice];
      for (int j = 0; j < kAtOnce; j++) {
        const float value = position < last ? held(loaded.of[j]) : new_value[slice * kAtOnce + j];
#pragma unroll
        for (int h = 0; h < kGroup; h++)
          if (h < group) sums[h][j] += scores[h][i] * value;
      }
    }
    __syncthreads();
  }

  for (int each = 0; each < parted; each++) {
    if (turn == each)
#pragma unroll
      for (int h = 0; h < kGroup; h++)
        for (int j = 0; j < kAtOnce && h < group; j++) {
          float* sum = queries + h * size + slice * kAtOnce + j;
          *sum = each == 0 ? sums[h][j] : *sum + sums[h][j];
        }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < group * size; i += kThreads) {
    const int h = i / size, d = i % size, head = kv * group + h;
    if (sizes.splits > 1) {
      part[h * (size + 2) + d] = queries[i];
      part[h * (size + 2) + size] = mosts[h];
      part[h * (size + 2) + size + 1] = totals[h];
      continue;
    }
    const float scale = value_scale == nullptr ? 1.0f : value_scale[sizes.channels ? d : 0];
    y[(static_cast<long long>(row) * sizes.heads + head) * size + d] = result(queries[i], mosts[h], totals[h], sinks, head, scale);
  }
}

// A block joins the parts of one row and query head.
template <class T>
__device__ void join(const float* parts, const T* sinks, const float* value_scales, T* y, Sizes sizes) {
  const int size = sizes.size, group = sizes.heads / sizes.kv_heads, head = blockIdx.x % sizes.heads;
  const int kv = head / group, row = blockIdx.x / sizes.heads;
  const long long step = static_cast<long long>(group) * (size + 2);
  parts += (static_cast<long long>(row) * sizes.kv_heads + kv) * sizes.splits * step + head % group * (size + 2);
  float most = kLowest, total = 0.0f;
  for (int i = 0; i < sizes.splits; i++)
    if (parts[i * step + size + 1] > 0.0f) most = fmaxf(most, parts[i * step + size]);
  for (int i = 0; i < sizes.splits; i++)
    if (parts[i * step + size + 1] > 0.0f) total += parts[i * step + size + 1] * expf(parts[i * step + size] - most);
  for (int d = threadIdx.x; d < size; d += kThreads) {
    float value = 0.0f;
    for (int i = 0; i < sizes.splits; i++)
      if (parts[i * step + size + 1] > 0.0f) value += parts[i * step + d] * expf(parts[i * step + size] - most);
    const float scale = value_scales == nullptr ? 1.0f : value_scales[sizes.channels ? kv * size + d : 0];
    y[static_cast<long long>(blockIdx.x) * size + d] = result(value, most, total, sinks, head, scale);
  }
}

#define CARRYALL_DECODE(name, T, C, group)                                                                                  \
  extern "C" __global__ void name(const T* packed, C* keys, C* values, const int* past, const int* table, const T* cosines,  \
                                  const T* sines, const T* sinks, const T* query_norm, const T* key_norm,                    \
                                  const float* key_scales, const float* value_scales, float* parts, T* y, Sizes sizes) {     \
    decode<T, C, group>(packed, keys, values, past, table, cosines, sines, sinks, query_norm, key_norm, key_scales,          \
                        value_scales, parts, y, sizes);                                                                      \
  }
#define CARRYALL_JOIN(name, T)                                                                                              \
  extern "C" __global__ void name(const float* parts, const T* sinks, const float* value_scales, T* y, Sizes sizes) {        \
    join<T>(parts, sinks, value_scales, y, sizes);                                                                           \
  }

CARRYALL_DECODE(paged_decode_half_2, Half, Half, 2)
CARRYALL_DECODE(paged_decode_half_4, Half, Half, 4)
CARRYALL_DECODE(paged_decode_half_int8_2, Half, signed char, 2)
CARRYALL_DECODE(paged_decode_half_int8_4, Half, signed char, 4)
CARRYALL_DECODE(paged_decode_half_float8_2, Half, Float8, 2)
CARRYALL_DECODE(paged_decode_half_float8_4, Half, Float8, 4)
CARRYALL_DECODE(paged_decode_bfloat16_2, Bfloat16, Bfloat16, 2)
CARRYALL_DECODE(paged_decode_bfloat16_4, Bfloat16, Bfloat16, 4)
CARRYALL_DECODE(paged_decode_bfloat16_int8_2, Bfloat16, signed char, 2)
CARRYALL_DECODE(paged_decode_bfloat16_int8_4, Bfloat16, signed char, 4)
CARRYALL_DECODE(paged_decode_bfloat16_float8_2, Bfloat16, Float8, 2)
CARRYALL_DECODE(paged_decode_bfloat16_float8_4, Bfloat16, Float8, 4)
CARRYALL_JOIN(paged_join_half, Half)
CARRYALL_JOIN(paged_join_bfloat16, Bfloat16)
