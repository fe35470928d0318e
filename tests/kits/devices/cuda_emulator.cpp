// NVIDIA's driver without a device: kernels of carryall, compiled as C++, run on the CPU when they are launched.
//
// The threads of a block are contexts of one thread of the system, which change at barriers only, in an order that
// `emulator_order` chooses; in random ones, some warps run ahead of others. So a result that depends on the order lacks a
// barrier. Blocks run one after the other. Barriers that not all threads of a block reach are an error. Source: CUDA
// programming guide, "Thread hierarchy" and "Synchronization functions".
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __restrict__

struct Place {
  unsigned x = 0, y = 0, z = 0;
};
static Place threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t kStack = 64 << 10;
constexpr unsigned kWarp = 32;

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  bool ended = false;
};

struct Barrier {
  unsigned arrived = 0;
  uint64_t round = 0;
};

std::vector<Thread> threads;
ucontext_t scheduler;
unsigned running = 0;
void (*body)(void **) = nullptr;
void **arguments = nullptr;
int order = 0;
std::string fault;
Barrier of_block, of_warp[1024 / kWarp];
uint64_t progress = 0;  // barriers reached and threads ended
unsigned char exchanged[1024][8];

void enter() {
  body(arguments);
  threads[running].ended = true;
  progress++;
}

void leave() {
  const unsigned index = running;
  swapcontext(&threads[index].context, &scheduler);
  running = index;
  threadIdx.x = index;
}

void wait_at(Barrier &barrier, unsigned count) {
  progress++;
  const uint64_t round = barrier.round;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.round++;
  }
  while (barrier.round == round) leave();
}

void warp_barrier() {
  const unsigned first = running / kWarp * kWarp;
  wait_at(of_warp[running / kWarp], std::min<unsigned>(kWarp, static_cast<unsigned>(threads.size()) - first));
}

// Sets the threads of a block to the beginning; returns false if they wait for one that does not come.
bool run_block(unsigned size) {
  of_block = {};
  for (Barrier &barrier : of_warp) barrier = {};
  for (unsigned i = 0; i < size; i++) {
    Thread &thread = threads[i];
    thread.ended = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, enter, 0);
  }
  std::vector<unsigned> turns(size);
  for (unsigned i = 0; i < size; i++) turns[i] = i;
  if (order == 1) std::reverse(turns.begin(), turns.end());
  std::mt19937 random(static_cast<unsigned>(order));
  uint32_t resting = 0;
  int idle = 0;
  for (;;) {
    if (order > 1) std::shuffle(turns.begin(), turns.end(), random);
    const uint64_t before = progress;
    if (order > 1 && random() % 16 == 0) resting = random();  // warps that the others run ahead of
    unsigned left = 0;
    for (const unsigned index : turns) {
      if (threads[index].ended) continue;
      if (resting >> index / kWarp & 1) {
        left++;
        continue;
      }
      running = index;
      threadIdx.x = index;
      swapcontext(&scheduler, &threads[index].context);
      left += !threads[index].ended;
    }
    if (left == 0) return of_block.arrived == 0;
    idle = progress == before ? idle + 1 : 0;
    if (idle > (resting == 0 ? 0 : 1000)) return false;
  }
}

}  // namespace

inline void __syncthreads() { wait_at(of_block, static_cast<unsigned>(threads.size())); }
inline void __syncwarp(unsigned = 0xffffffffu) { warp_barrier(); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T atomicAdd(T *address, T value) {
  const T former = *address;
  *address += value;
  return former;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int lane) {
  memcpy(exchanged[running], &value, sizeof value);
  warp_barrier();
  T other;
  memcpy(&other, exchanged[running ^ static_cast<unsigned>(lane)], sizeof other);
  warp_barrier();
  return other;
}

#include "types.cuh"
#include "float8.cuh"

inline float to_float(Half value) {
  _Float16 half;
  memcpy(&half, &value, sizeof half);
  return static_cast<float>(half);
}
template <>
inline Half from_float<Half>(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  Half result;
  memcpy(&result, &half, sizeof result);
  return result;
}

// Each thread of a warp shows its own elements of A and B to the others.
struct Fragments {
  unsigned a[4], b[2];
};
static Fragments fragments[1024];

inline float half_of(unsigned pair, int index) {
  return to_float(Half{static_cast<unsigned short>(pair >> 16 * index)});
}

inline void add_product(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  const unsigned lane = running % kWarp, first = running - lane;
  memcpy(fragments[running].a, a, sizeof a);
  memcpy(fragments[running].b, b, sizeof b);
  warp_barrier();
  for (int i = 0; i < 4; i++) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2, low = i / 2;
    for (unsigned k = 0; k < 16; k++) {
      const Fragments &left = fragments[first + row * 4 + k % 8 / 2], &right = fragments[first + column * 4 + k % 8 / 2];
      sums[i] += half_of(left.a[low + k / 8 * 2], k % 2) * half_of(right.b[k / 8], k % 2);
    }
  }
  warp_barrier();
}

namespace products {
#include "int4_product.cu"
}
namespace decoding {
#include "paged_decode.cu"
}
namespace silu {
#include "silu_and_mul.cu"
}
namespace tokens {
#include "draw_tokens.cu"
}
namespace parts {
#include "spread_part.cu"
}

namespace {

template <class... Types, size_t... Places>
void call(void (*kernel)(Types...), void **values, std::index_sequence<Places...>) {
  kernel(*static_cast<Types *>(values[Places])...);
}
template <auto kKernel>
struct Called;
template <class... Types, void (*kKernel)(Types...)>
struct Called<kKernel> {
  static void run(void **values) { call(kKernel, values, std::index_sequence_for<Types...>{}); }
};

struct Kernel {
  const char *name;
  void (*run)(void **);
};
#define KERNEL(room, name) {#name, Called<&room::name>::run}
Kernel kernels[] = {
    KERNEL(silu, silu_and_mul_float), KERNEL(silu, silu_and_mul_half),
    KERNEL(silu, silu_and_mul_bfloat16), KERNEL(tokens, draw_tokens),
    KERNEL(parts, spread_part),      KERNEL(products, int4_product_32),
    KERNEL(products, int4_product_64), KERNEL(products, int4_product_128),
    KERNEL(products, int4_product_16), KERNEL(products, int4_weights),
    KERNEL(decoding, paged_decode_half_2), KERNEL(decoding, paged_decode_half_4),
    KERNEL(decoding, paged_decode_half_int8_2), KERNEL(decoding, paged_decode_half_int8_4),
    KERNEL(decoding, paged_decode_half_float8_2), KERNEL(decoding, paged_decode_half_float8_4),
    KERNEL(decoding, paged_decode_bfloat16_2), KERNEL(decoding, paged_decode_bfloat16_4),
    KERNEL(decoding, paged_decode_bfloat16_int8_2), KERNEL(decoding, paged_decode_bfloat16_int8_4),
    KERNEL(decoding, paged_decode_bfloat16_float8_2), KERNEL(decoding, paged_decode_bfloat16_float8_4),
    KERNEL(decoding, paged_join_half), KERNEL(decoding, paged_join_bfloat16),
};
std::mutex guard;
long launches = 0;

}  // namespace

#define API extern "C" __attribute__((visibility("default")))
// 0: threads in their order; 1: in reverse; others: in random orders of this seed.
API void emulator_order(int chosen) { order = chosen; }
API long emulator_launches() { return launches; }

API int cuDeviceGet(int *device, int index) { return (*device = index) != 0; }
API int cuDevicePrimaryCtxRetain(void **context, int) { return *context = &guard, 0; }
API int cuCtxPushCurrent_v2(void *) { return 0; }
API int cuCtxPopCurrent_v2(void **context) { return *context = &guard, 0; }
API int cuCtxGetDevice(int *device) { return *device = 0; }
API int cuModuleLoadData(void **module, const void *) { return *module = &guard, 0; }
API int cuModuleGetFunction(void **function, void *, const char *name) {
  for (Kernel &kernel : kernels)
    if (std::string(kernel.name) == name) return *function = &kernel, 0;
  return 500;  // CUDA_ERROR_NOT_FOUND
}
API int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned size, unsigned, unsigned, unsigned, void *,
                       void **values, void **) {
  const std::lock_guard<std::mutex> lock(guard);
  if (x == 0 || y * z != 1 || size == 0 || size > 1024) return fault = "the sizes of a launch are not supported", 1;
  if (threads.size() != size) threads = std::vector<Thread>(size);
  launches++;
  body = static_cast<Kernel *>(function)->run;
  arguments = values;
  gridDim = {x, 1, 1};
  blockDim = {size, 1, 1};
  for (unsigned block = 0; block < x; block++) {
    blockIdx.x = block;
    if (!run_block(size)) return fault = "threads of a block wait at different barriers", 1;
  }
  return 0;
}
API int cuGetErrorString(int, const char **text) { return *text = fault.c_str(), 0; }
