// NVIDIA's driver, which is loaded when kernels for a device are: without CUDA's headers, libraries and compiler.
#pragma once
#include <cstdint>

namespace carryall {

// A kernel of a device.
struct CudaKernel {
  void* function = nullptr;

  // Gives the kernel to a stream; returns a complaint, or null. Arguments are addresses of values.
  const char* launch(int64_t blocks, int threads, void* stream, void** arguments) const;
};

// Loads kernels, an image that NVRTC made, for all sessions of a device; returns a complaint, or null.
//
// `driver` is the file of the driver's library, which CUDA's runtime has started. Kernels stay until the process ends.
const char* load_cuda_image(const char* driver, int device, const void* image);

// Finds a kernel of the device that is current in this thread; returns a complaint, or null.
const char* find_cuda_kernel(const char* name, CudaKernel* kernel);

}  // namespace carryall
