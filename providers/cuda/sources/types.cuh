// Types of 16 bits without CUDA's headers, which NVRTC does not bring along; all sums are in float.
#pragma once

struct Half {
  unsigned short bits;
};

struct Bfloat16 {
  unsigned short bits;
};

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(Bfloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

template <class T>
__device__ inline T from_float(float value);

template <>
__device__ inline float from_float<float>(float value) {
  return value;
}

// Rounds to the nearest, ties to even.
template <>
__device__ inline Bfloat16 from_float<Bfloat16>(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return {0x7fc0};
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#ifdef __CUDA_ARCH__
__device__ inline float to_float(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

template <>
__device__ inline Half from_float<Half>(float value) {
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
#endif
