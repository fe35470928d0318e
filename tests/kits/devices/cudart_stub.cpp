// A CUDA runtime without a device, over which the real CUDA provider of ONNX Runtime loads and runs.
//
// Device memory is a file in memory, mapped twice: at the addresses that callers see no access is allowed, so
// that a read by the host is a segmentation fault; copies go through the second mapping. Kernels compute
// nothing. Rules of captures are those of CUDA's reference (stream management, cudaStreamBeginCapture): what
// breaks one is refused with CUDA's error, and written to the log as "illegal". Layouts of structures and
// numbers of errors and attributes are those of CUDA 13.
//
// Environment: CUDA_STUB_LOG, a file; CUDA_STUB_DEVICES, their number (1); CUDA_STUB_CAPABILITY (80);
// CUDA_STUB_CAPTURE_MS, how long a capture takes at least (0).
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInvalidConfiguration = 9,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureImplicit = 906,
  kNotSupported = 801,
};
enum Mode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
struct Dim3 {
  unsigned x, y, z;
};

constexpr size_t kArena = size_t{24} << 30, kPage = 512;
constexpr int kMaxDevices = 8;

std::recursive_mutex guard;
using Lock = std::lock_guard<std::recursive_mutex>;
char *device_base = nullptr, *host_base = nullptr;
size_t arena_top = 0;
size_t used[kMaxDevices], total[kMaxDevices];
struct Block {
  size_t size;
  int device;
};
std::map<char *, Block> live;
std::multimap<size_t, char *> unused;
std::map<const void *, std::string> kernel_names;
std::atomic<long> calls_until_lost{-1};
std::atomic<int> lost_code{0};
thread_local int last_error = kSuccess;
thread_local int current = 0;
thread_local int interaction = 0;  // of this thread with captures: a Mode

struct Capture {
  int mode;
  std::thread::id thread;
  int device;
  bool valid = true;
  size_t kernels = 0;
  std::vector<std::function<void()>> copies;
};
using Captures = std::map<void *, std::shared_ptr<Capture>>;
Captures captures;                                       // by stream
std::map<void *, std::shared_ptr<Capture>> event_captures;  // by event
struct Stream {
  int device;
  bool blocking;  // waits for the legacy stream, and the legacy stream for it
};
std::map<void *, Stream> streams;
struct Graph {
  size_t kernels;
  int device;
  std::vector<std::function<void()>> copies;
};

int number(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

void note(const char *format, ...) {
  static FILE *file = [] {
    const char *path = getenv("CUDA_STUB_LOG");
    return path ? fopen(path, "a") : nullptr;
  }();
  if (!file) return;
  Lock lock(guard);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fflush(file);
}

int fail(int code) { return last_error = code; }

// Returns the error of a device that is lost, which every later call returns too.
int lost() {
  if (lost_code) return fail(lost_code);
  if (calls_until_lost < 0) return kSuccess;
  if (calls_until_lost-- > 0) return kSuccess;
  lost_code = 719;  // cudaErrorLaunchFailure
  note("lost");
  return fail(lost_code);
}

int illegal(const char *call, int code = kCaptureUnsupported) {
  note("illegal %s", call);
  for (auto &[stream, capture] : captures) capture->valid = false;
  return fail(code);
}

// Calls that a capture prohibits by its mode, in its own thread or in all.
int unsafe(const char *call) {
  Lock lock(guard);
  if (int code = lost()) return code;
  for (auto &[stream, capture] : captures) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != kRelaxed;
    if (own && interaction != kRelaxed) return illegal(call);
    if (capture->mode == kGlobal && interaction == kGlobal) return illegal(call);
  }
  return kSuccess;
}

std::shared_ptr<Capture> capture_of(void *stream) {
  auto found = captures.find(stream);
  return found == captures.end() ? nullptr : found->second;
}

bool blocks_captures() {
  for (auto &[stream, capture] : captures)
    if (streams[stream].blocking) return true;
  return false;
}

// Work for a stream: of the current device, and not for the legacy stream while one that waits for it is captured.
int enqueue(const char *call, void *stream) {
  if (int code = lost()) return code;
  if (!stream && blocks_captures()) return illegal(call, kCaptureImplicit);
  auto owner = streams.find(stream);
  if (stream && owner != streams.end() && owner->second.device != current) {
    note("illegal %s on a stream of device %d, from device %d", call, owner->second.device, current);
    return fail(kInvalidHandle);
  }
  return kSuccess;
}

void reserve() {
  if (device_base) return;
  int file = memfd_create("cuda_stub", 0);
  if (file < 0 || ftruncate(file, kArena)) abort();
  int flags = MAP_SHARED | MAP_NORESERVE;
  device_base = static_cast<char *>(mmap(nullptr, kArena, PROT_NONE, flags, file, 0));
  host_base = static_cast<char *>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, flags, file, 0));
  if (device_base == MAP_FAILED || host_base == MAP_FAILED) abort();
}

bool on_device(const void *address) {
  auto place = static_cast<const char *>(address);
  return device_base && place >= device_base && place < device_base + kArena;
}

char *reachable(const void *address) {
  auto place = static_cast<char *>(const_cast<void *>(address));
  return on_device(address) ? host_base + (place - device_base) : place;
}

// Whether [address, address + size) lies in one allocation, or on the host.
bool allocated(const void *address, size_t size) {
  if (!on_device(address)) return true;
  auto place = static_cast<char *>(const_cast<void *>(address));
  auto block = live.upper_bound(place);
  if (block == live.begin()) return false;
  --block;
  return place + size <= block->first + block->second.size;
}

int allocate(void **address, size_t wanted) {
  Lock lock(guard);
  reserve();
  size_t size = std::max(kPage, (wanted + kPage - 1) / kPage * kPage);
  size_t limit = total[current] ? total[current] : size_t{16} << 30;
  auto again = unused.lower_bound(size);
  bool fits = again != unused.end() && again->first <= size + size / 16 + 4096;
  size_t taken = fits ? again->first : size;
  if (used[current] + taken > limit || (!fits && arena_top + taken > kArena)) {
    note("full %zu", wanted);
    return fail(kMemoryAllocation);
  }
  char *place = fits ? again->second : device_base + arena_top;
  if (fits) unused.erase(again);
  else arena_top += taken;
  live[place] = {taken, current};
  used[current] += taken;
  *address = place;
  return kSuccess;
}

int release(void *address) {
  Lock lock(guard);
  if (!address) return kSuccess;
  auto block = live.find(static_cast<char *>(address));
  if (block == live.end()) {
    note("illegal free");
    return fail(kInvalidValue);
  }
  used[block->second.device] -= block->second.size;
  unused.emplace(block->second.size, block->first);
  live.erase(block);
  return kSuccess;
}

const char *direction(const void *to, const void *from) {
  return on_device(to) ? (on_device(from) ? "on-device" : "upload") : (on_device(from) ? "download" : "host");
}

int copy_now(const char *call, void *to, const void *from, size_t size) {
  if (!allocated(to, size) || !allocated(from, size)) {
    note("illegal %s of %zu bytes outside of an allocation", call, size);
    return fail(kInvalidValue);
  }
  memmove(reachable(to), reachable(from), size);
  return kSuccess;
}

int launch(const void *function, Dim3 grid, Dim3 block, void *stream) {
  Lock lock(guard);
  if (int code = enqueue("launch", stream)) return code;
  auto capture = capture_of(stream);
  if (capture) ++capture->kernels;
  auto name = kernel_names.find(function);
  note("kernel %d %s%s", current, name == kernel_names.end() ? "?" : name->second.c_str(),
       capture ? " captured" : "");
  if (!grid.x || !grid.y || !grid.z || !block.x || block.x * block.y * block.z > 1024) {
    note("illegal launch of %u,%u,%u blocks of %u threads", grid.x, grid.y, grid.z, block.x * block.y * block.z);
    return fail(kInvalidConfiguration);
  }
  return kSuccess;
}

int capability() { return number("CUDA_STUB_CAPABILITY", 80); }
int devices() { return number("CUDA_STUB_DEVICES", 1); }
void *handle() {
  static std::atomic<uintptr_t> next{0x5000};
  return reinterpret_cast<void *>(next += 16);
}
template <typename T>
void put(void *structure, size_t offset, T value) {
  memcpy(static_cast<char *>(structure) + offset, &value, sizeof value);
}

}  // namespace

// For tests: the memory of each device, and a device that is lost after a number of calls.
API void stub_memory(size_t bytes) { std::fill(total, total + kMaxDevices, bytes); }
API void stub_lose_after(long calls) { calls_until_lost = calls; }
API size_t stub_used(int device) { return used[device]; }
API void *stub_reachable(void *address) { return reachable(address); }

API int cudaMalloc(void **address, size_t size) {
  if (int code = unsafe("cudaMalloc")) return code;
  return allocate(address, size);
}
API int cudaFree(void *address) {
  if (lost_code) return release(address), kSuccess;  // shutting down must not fail twice
  if (address)
    if (int code = unsafe("cudaFree")) return code;
  return release(address);
}
API int cudaMallocFromPoolAsync(void **address, size_t size, void *, void *) { return allocate(address, size); }
API int cudaFreeAsync(void *address, void *) { return release(address); }
API int cudaMallocHost(void **address, size_t size, unsigned) {
  if (int code = unsafe("cudaMallocHost")) return code;
  return posix_memalign(address, kPage, std::max<size_t>(size, 1)) ? fail(kMemoryAllocation) : kSuccess;
}
API int cudaHostAlloc(void **address, size_t size, unsigned flags) { return cudaMallocHost(address, size, flags); }
API int cudaFreeHost(void *address) {
  free(address);
  return kSuccess;
}
API int cudaMemGetInfo(size_t *unoccupied, size_t *all) {
  if (int code = lost()) return code;
  *all = total[current] ? total[current] : size_t{16} << 30;
  *unoccupied = *all - std::min(*all, used[current]);
  return kSuccess;
}

API int cudaMemcpy(void *to, const void *from, size_t size, int) {
  if (int code = unsafe("cudaMemcpy")) return code;
  Lock lock(guard);
  note("copy %s %zu", direction(to, from), size);
  return copy_now("cudaMemcpy", to, from, size);
}
API int cudaMemcpyAsync(void *to, const void *from, size_t size, int, void *stream) {
  Lock lock(guard);
  if (int code = enqueue("cudaMemcpyAsync", stream)) return code;
  auto capture = capture_of(stream);
  note("copy %s %zu%s", direction(to, from), size, capture ? " captured" : "");
  if (!capture) return copy_now("cudaMemcpyAsync", to, from, size);
  capture->copies.push_back([=] { copy_now("replayed copy", to, from, size); });
  return kSuccess;
}
API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                          size_t height, int kind, void *stream) {
  for (size_t row = 0; row < height; ++row) {
    auto target = static_cast<char *>(to) + row * to_pitch;
    auto source = static_cast<const char *>(from) + row * from_pitch;
    if (int code = cudaMemcpyAsync(target, source, width, kind, stream)) return code;
  }
  return kSuccess;
}
API int cudaMemset(void *to, int value, size_t size) {
  if (int code = unsafe("cudaMemset")) return code;
  auto place = reinterpret_cast<uintptr_t>(reachable(to)), last = place + size;
  uintptr_t first = (place + 4095) / 4096 * 4096, end = last / 4096 * 4096;
  // Whole pages are given back, so that a large cache takes memory from its first write.
  if (value || first >= end || madvise(reinterpret_cast<void *>(first), end - first, MADV_REMOVE)) first = end = last;
  memset(reinterpret_cast<void *>(place), value, first - place);
  memset(reinterpret_cast<void *>(end), value, last - end);
  return kSuccess;
}
API int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
  Lock lock(guard);
  if (int code = enqueue("cudaMemsetAsync", stream)) return code;
  if (!allocated(to, size)) {
    note("illegal cudaMemsetAsync outside of an allocation");
    return fail(kInvalidValue);
  }
  if (auto capture = capture_of(stream)) capture->copies.push_back([=] { memset(reachable(to), value, size); });
  else memset(reachable(to), value, size);
  return kSuccess;
}
API int cudaMemcpyFromSymbol(void *to, const void *, size_t size, size_t, int) {
  if (int code = unsafe("cudaMemcpyFromSymbol")) return code;
  memset(to, 0, size);
  return kSuccess;
}

API void **__cudaRegisterFatBinary(void *) {
  static void *binary;
  return &binary;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
API void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, void *, void *,
                                void *, void *, int *) {
  Lock lock(guard);
  kernel_names[function] = name;
}

struct Configuration {
  Dim3 grid, block;
  size_t shared;
  void *stream;
};
static thread_local std::vector<Configuration> configurations;
API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void *stream) {
  auto top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *static_cast<void **>(stream) = top.stream;
  return kSuccess;
}
API int __cudaGetKernel(void **kernel, const void *function) {
  *kernel = const_cast<void *>(function);
  return kSuccess;
}
API int __cudaLaunchKernel(void *function, Dim3 grid, Dim3 block, void **, size_t, void *stream) {
  return launch(function, grid, block, stream);
}
API int cudaLaunchKernel(const void *function, Dim3 grid, Dim3 block, void **, size_t, void *stream) {
  return launch(function, grid, block, stream);
}
API int cudaLaunchCooperativeKernel(const void *function, Dim3 grid, Dim3 block, void **, size_t, void *stream) {
  return launch(function, grid, block, stream);
}
struct LaunchConfiguration {
  Dim3 grid, block;
  size_t shared;
  void *stream;
};
API int cudaLaunchKernelExC(const LaunchConfiguration *what, const void *function, void **) {
  return launch(function, what->grid, what->block, what->stream);
}
// A launch by the driver, of a kernel that is known by its name.
API int stub_launch(const void *function, const char *name, unsigned blocks, unsigned threads, void *stream) {
  {
    Lock lock(guard);
    kernel_names[function] = name;
  }
  return launch(function, {blocks, 1, 1}, {threads, 1, 1}, stream);
}
API int cudaLaunchHostFunc(void *, void (*function)(void *), void *data) {
  function(data);
  return kSuccess;
}
API int cudaFuncGetAttributes(void *attributes, const void *) {
  memset(attributes, 0, 144);
  put<int>(attributes, 24, 1024);  // maxThreadsPerBlock
  put<int>(attributes, 28, 64);    // numRegs
  put<int>(attributes, 32, capability());
  put<int>(attributes, 36, capability());
  put<int>(attributes, 44, 163840);  // maxDynamicSharedSizeBytes
  return kSuccess;
}
API int cudaFuncSetAttribute(const void *, int, int) { return kSuccess; }
API int cudaKernelSetAttributeForDevice(void *, int, int, int) { return kSuccess; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
  *blocks = 2;
  return kSuccess;
}
API int cudaLibraryLoadData(void **library, const void *, void *, void *, unsigned, void *, void *, unsigned) {
  *library = handle();
  return kSuccess;
}
API int cudaLibraryGetKernel(void **kernel, void *, const char *name) {
  *kernel = const_cast<char *>(name);
  return kSuccess;
}
API int cudaLibraryUnload(void *) { return kSuccess; }

API int cudaGetDeviceCount(int *count) {
  *count = devices();
  return kSuccess;
}
API int cudaGetDevice(int *device) {
  *device = current;
  return kSuccess;
}
API int cudaSetDevice(int device) {
  if (lost_code) return fail(lost_code);
  if (device < 0 || device >= devices()) return fail(kInvalidDevice);
  current = device;
  return kSuccess;
}
API int cudaGetDeviceProperties(void *properties, int) {
  memset(properties, 0, 1008);
  strcpy(static_cast<char *>(properties), "CUDA stub");
  put<size_t>(properties, 288, size_t{16} << 30);  // totalGlobalMem
  put<size_t>(properties, 296, 49152);             // sharedMemPerBlock
  put<int>(properties, 304, 65536);                // regsPerBlock
  put<int>(properties, 308, 32);                   // warpSize
  put<int>(properties, 320, 1024);                 // maxThreadsPerBlock
  const int threads[] = {1024, 1024, 64}, grid[] = {2147483647, 65535, 65535};
  memcpy(static_cast<char *>(properties) + 324, threads, sizeof threads);
  memcpy(static_cast<char *>(properties) + 336, grid, sizeof grid);
  put<size_t>(properties, 352, 65536);  // totalConstMem
  put<int>(properties, 360, capability() / 10);
  put<int>(properties, 364, capability() % 10);
  put<size_t>(properties, 368, 512);     // textureAlignment
  put<int>(properties, 384, 108);        // multiProcessorCount
  put<int>(properties, 560, 1);          // concurrentKernels
  put<int>(properties, 584, 3);          // asyncEngineCount
  put<int>(properties, 588, 1);          // unifiedAddressing
  put<int>(properties, 592, 5120);       // memoryBusWidth
  put<int>(properties, 596, 40 << 20);   // l2CacheSize
  put<int>(properties, 604, 2048);       // maxThreadsPerMultiProcessor
  put<size_t>(properties, 624, 167936);  // sharedMemPerMultiprocessor
  put<int>(properties, 632, 65536);      // regsPerMultiprocessor
  put<int>(properties, 668, 1);          // cooperativeLaunch
  put<size_t>(properties, 672, 166912);  // sharedMemPerBlockOptin
  put<int>(properties, 688, 32);         // maxBlocksPerMultiProcessor
  put<size_t>(properties, 696, 1024);    // reservedSharedMemPerBlock
  put<int>(properties, 720, 1);          // memoryPoolsSupported
  return kSuccess;
}
API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  static const std::map<int, int> known{{1, 1024},   {5, 2147483647}, {6, 65535},   {7, 65535},   {8, 49152},
                                        {10, 32},    {16, 108},       {81, 167936}, {97, 166912}, {111, 1024}};
  if (device < 0 || device >= devices()) return fail(kInvalidDevice);
  auto found = known.find(attribute);
  if (attribute == 75) *value = capability() / 10;
  else if (attribute == 76) *value = capability() % 10;
  else *value = found == known.end() ? 1 : found->second;
  return kSuccess;
}
API int cudaDriverGetVersion(int *version) {
  *version = 13000;
  return kSuccess;
}
API int cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
API int cudaPointerGetAttributes(void *attributes, const void *address) {
  memset(attributes, 0, 88);
  put<int>(attributes, 0, on_device(address) ? 2 : 0);
  put<const void *>(attributes, on_device(address) ? 8 : 16, address);
  return kSuccess;
}
API const char *cudaGetErrorString(int code) {
  static thread_local char text[64];
  snprintf(text, sizeof text, "CUDA stub error %d", code);
  return text;
}
API const char *cudaGetErrorName(int code) { return cudaGetErrorString(code); }
API int cudaPeekAtLastError() { return last_error; }
API int cudaGetLastError() {
  int code = last_error;
  last_error = lost_code;  // a lost device stays lost
  return code;
}

API int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
  if (int code = lost()) return code;
  Lock lock(guard);
  *stream = handle();
  streams[*stream] = {current, !(flags & 1)};  // cudaStreamNonBlocking
  return kSuccess;
}
API int cudaStreamCreate(void **stream) { return cudaStreamCreateWithFlags(stream, 0); }
API int cudaStreamDestroy(void *stream) {
  Lock lock(guard);
  streams.erase(stream);
  return kSuccess;
}
API int cudaStreamSynchronize(void *stream) {
  Lock lock(guard);
  note("wait stream");
  if (int code = lost()) return code;
  if (capture_of(stream) || (!stream && blocks_captures())) return illegal("cudaStreamSynchronize");
  return kSuccess;
}
API int cudaDeviceSynchronize() {
  Lock lock(guard);
  if (int code = lost()) return code;
  for (auto &[stream, capture] : captures)
    if (capture->device == current) return illegal("cudaDeviceSynchronize");
  return kSuccess;
}
API int cudaStreamWaitEvent(void *stream, void *event, unsigned) {
  Lock lock(guard);
  auto source = event_captures.find(event);
  if (source != event_captures.end() && captures.count(stream) == 0) captures[stream] = source->second;
  return kSuccess;
}
API int cudaEventCreateWithFlags(void **event, unsigned) {
  *event = handle();
  return kSuccess;
}
API int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
API int cudaEventDestroy(void *event) {
  Lock lock(guard);
  event_captures.erase(event);
  return kSuccess;
}
API int cudaEventRecordWithFlags(void *event, void *stream, unsigned) {
  Lock lock(guard);
  if (int code = enqueue("cudaEventRecord", stream)) return code;
  event_captures.erase(event);
  if (auto capture = capture_of(stream)) event_captures[event] = capture;
  return kSuccess;
}
API int cudaEventRecord(void *event, void *stream) { return cudaEventRecordWithFlags(event, stream, 0); }
API int cudaEventSynchronize(void *event) {
  Lock lock(guard);
  note("wait event");
  if (int code = lost()) return code;
  return event_captures.count(event) ? illegal("cudaEventSynchronize") : kSuccess;
}
API int cudaEventElapsedTime(float *milliseconds, void *, void *) {
  *milliseconds = 1;
  return kSuccess;
}

API int cudaThreadExchangeStreamCaptureMode(int *mode) {
  std::swap(interaction, *mode);
  return kSuccess;
}
API int cudaStreamBeginCapture(void *stream, int mode) {
  {
    Lock lock(guard);
    if (int code = enqueue("cudaStreamBeginCapture", stream)) return code;
    if (!stream || capture_of(stream)) return illegal("cudaStreamBeginCapture");
    auto capture = std::make_shared<Capture>();
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->device = current;
    captures[stream] = capture;
    note("begin %d", mode);
  }
  usleep(1000 * number("CUDA_STUB_CAPTURE_MS", 0));  // lets other threads work meanwhile
  return kSuccess;
}
API int cudaStreamEndCapture(void *stream, void **graph) {
  Lock lock(guard);
  auto capture = capture_of(stream);
  *graph = nullptr;
  if (!capture) return illegal("cudaStreamEndCapture");
  for (auto entry = captures.begin(); entry != captures.end();)
    entry = entry->second == capture ? captures.erase(entry) : std::next(entry);
  for (auto entry = event_captures.begin(); entry != event_captures.end();)
    entry = entry->second == capture ? event_captures.erase(entry) : std::next(entry);
  note("end %zu kernels %zu copies", capture->kernels, capture->copies.size());
  if (!capture->valid) return fail(kCaptureInvalidated);
  *graph = new Graph{capture->kernels, capture->device, capture->copies};
  return kSuccess;
}
API int cudaStreamIsCapturing(void *stream, int *status) {
  Lock lock(guard);
  auto capture = capture_of(stream);
  *status = capture ? (capture->valid ? 1 : 2) : 0;
  return kSuccess;
}
API int cudaGraphInstantiate(void **executable, void *graph, unsigned long long) {
  *executable = new Graph(*static_cast<Graph *>(graph));
  return kSuccess;
}
API int cudaGraphLaunch(void *executable, void *stream) {
  Lock lock(guard);
  if (int code = enqueue("cudaGraphLaunch", stream)) return code;
  auto graph = static_cast<Graph *>(executable);
  note("replay %d %zu", current, graph->kernels);
  for (auto &copy : graph->copies) copy();
  return kSuccess;
}
API int cudaGraphDestroy(void *graph) {
  delete static_cast<Graph *>(graph);
  return kSuccess;
}
API int cudaGraphExecDestroy(void *executable) {
  note("forget %d", static_cast<Graph *>(executable)->device);
  delete static_cast<Graph *>(executable);
  return kSuccess;
}

API int cudaMemPoolCreate(void **pool, const void *) {
  *pool = handle();
  return kSuccess;
}
API int cudaMemPoolDestroy(void *) { return kSuccess; }
API int cudaMemPoolGetAttribute(void *, int, void *value) {
  memset(value, 0, 8);
  return kSuccess;
}
API int cudaMemPoolSetAttribute(void *, int, void *) { return kSuccess; }
API int cudaMemPoolTrimTo(void *, size_t) { return kSuccess; }
API int cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned, unsigned long long, int *found) {
  *function = nullptr;
  if (found) *found = 1;  // the symbol is not found
  return kNotSupported;
}
