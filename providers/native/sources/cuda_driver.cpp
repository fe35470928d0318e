#include "cuda_driver.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <vector>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace carryall {
namespace {

constexpr int kNotFound = 500;  // CUDA_ERROR_NOT_FOUND
constexpr int64_t kMostBlocks = 0x7fffffff;

// The functions that are used, as of CUDA driver API 12.
struct Driver {
  int (*DeviceGet)(int*, int);
  int (*DevicePrimaryCtxRetain)(void**, int);
  int (*CtxPushCurrent)(void*);
  int (*CtxPopCurrent)(void**);
  int (*CtxGetDevice)(int*);
  int (*ModuleLoadData)(void**, const void*);
  int (*ModuleGetFunction)(void**, void*, const char*);
  int (*LaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*GetErrorString)(int, const char**);
};

std::mutex lock;
Driver driver;
bool opened = false;
std::map<int, std::vector<void*>>* modules = nullptr;  // by device; not destroyed, because sessions may outlive it

const char* complaint(const char* call, int code) {
  static thread_local char message[200];
  const char* text = nullptr;
  if (driver.GetErrorString == nullptr || driver.GetErrorString(code, &text) != 0 || text == nullptr) text = "unknown";
  snprintf(message, sizeof message, "%s failed: %s (error %d)", call, text, code);
  return message;
}

#define CARRYALL_CUDA(name, ...) \
  if (int code = driver.name(__VA_ARGS__)) return complaint("cu" #name, code)

template <class Function>
bool resolve(void* library, const char* name, Function* function) {
#if defined(_WIN32)
  *function = reinterpret_cast<Function>(GetProcAddress(static_cast<HMODULE>(library), name));
#else
  *function = reinterpret_cast<Function>(dlsym(library, name));
#endif
  return *function != nullptr;
}

const char* open_driver(const char* file) {
  if (opened) return nullptr;
#if defined(_WIN32)
  void* library = LoadLibraryA(file);
#else
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
#endif
  if (library == nullptr) return "NVIDIA's driver cannot be loaded";
  const bool whole = resolve(library, "cuDeviceGet", &driver.DeviceGet) &&
                     resolve(library, "cuDevicePrimaryCtxRetain", &driver.DevicePrimaryCtxRetain) &&
                     resolve(library, "cuCtxPushCurrent_v2", &driver.CtxPushCurrent) &&
                     resolve(library, "cuCtxPopCurrent_v2", &driver.CtxPopCurrent) &&
                     resolve(library, "cuCtxGetDevice", &driver.CtxGetDevice) &&
                     resolve(library, "cuModuleLoadData", &driver.ModuleLoadData) &&
                     resolve(library, "cuModuleGetFunction", &driver.ModuleGetFunction) &&
                     resolve(library, "cuLaunchKernel", &driver.LaunchKernel) &&
                     resolve(library, "cuGetErrorString", &driver.GetErrorString);
  if (!whole) return "NVIDIA's driver is older than CUDA 12";
  modules = new std::map<int, std::vector<void*>>;
  opened = true;
  return nullptr;
}

}  // namespace

const char* load_cuda_image(const char* file, int index, const void* image) {
  const std::lock_guard<std::mutex> guard(lock);
  if (const char* wrong = open_driver(file)) return wrong;
  int device = 0;
  CARRYALL_CUDA(DeviceGet, &device, index);
  void *context = nullptr, *module = nullptr, *former = nullptr;
  CARRYALL_CUDA(DevicePrimaryCtxRetain, &context, device);
  CARRYALL_CUDA(CtxPushCurrent, context);
  const int code = driver.ModuleLoadData(&module, image);
  CARRYALL_CUDA(CtxPopCurrent, &former);
  if (code != 0) return complaint("cuModuleLoadData", code);
  (*modules)[device].push_back(module);
  return nullptr;
}

const char* find_cuda_kernel(const char* name, CudaKernel* kernel) {
  const std::lock_guard<std::mutex> guard(lock);
  if (!opened) return "carryall's CUDA kernels are not loaded";
  int device = 0;
  CARRYALL_CUDA(CtxGetDevice, &device);
  for (void* module : (*modules)[device]) {
    const int code = driver.ModuleGetFunction(&kernel->function, module, name);
    if (code == 0) return nullptr;
    if (code != kNotFound) return complaint("cuModuleGetFunction", code);
  }
  static thread_local char message[120];
  snprintf(message, sizeof message, "the CUDA kernel %s is not loaded for device %d", name, device);
  return message;
}

const char* CudaKernel::launch(int64_t blocks, int threads, void* stream, void** arguments) const {
  if (blocks < 1) return nullptr;
  const unsigned grid = static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
  CARRYALL_CUDA(LaunchKernel, function, grid, 1, 1, static_cast<unsigned>(threads), 1, 1, 0, stream, arguments, nullptr);
  return nullptr;
}

}  // namespace carryall
