#include "cpu.h"

#include <cstdint>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace carryall {

#if defined(__x86_64__)
namespace {

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

// CPUID of a leaf; zeros if the processor has no such leaf.
Registers cpuid(uint32_t leaf, uint32_t sub) {
  Registers r;
  if (__get_cpuid_max(0, nullptr) >= leaf) __cpuid_count(leaf, sub, r.a, r.b, r.c, r.d);
  return r;
}

bool bit(uint32_t word, int number) { return (word >> number & 1) != 0; }

// Whether the operating system saves all registers named by `mask` (Intel SDM volume 1, 13.3: XCR0).
bool saves(uint32_t mask) {
  if (!bit(cpuid(1, 0).c, 27)) return false;  // OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

constexpr uint32_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;

}  // namespace

// Asked once: in a virtual machine CPUID takes about 50 us.
bool has_avx2() {
  static const bool has = [] {
    const Registers one = cpuid(1, 0);
    return bit(one.c, 12) && bit(one.c, 28) && bit(one.c, 29) && bit(cpuid(7, 0).b, 5) && saves(kYmm);  // FMA, AVX, F16C, AVX2
  }();
  return has;
}

bool has_avxvnni() {
  static const bool has = has_avx2() && bit(cpuid(7, 1).a, 4);
  return has;
}

bool has_avx512vnni() {
  static const bool has = [] {
    const Registers seven = cpuid(7, 0);
    const bool base = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31);  // F, DQ, BW, VL
    return has_avx2() && base && bit(seven.c, 11) && saves(kZmm);
  }();
  return has;
}

bool has_avx512bf16() {
  static const bool has = has_avx512vnni() && bit(cpuid(7, 1).a, 5);
  return has;
}

bool has_amx() {
#if defined(__linux__)
  static const bool usable = [] {
    const Registers seven = cpuid(7, 0);
    const bool tiles = bit(seven.d, 22) && bit(seven.d, 24) && bit(seven.d, 25);  // BF16, TILE, INT8
    if (!has_avx512bf16() || !bit(seven.c, 1) || !tiles || !saves(kTiles)) return false;  // bit 1 of ECX: VBMI
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, for all threads
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return usable;
#else
  return false;
#endif
}

const Kernels* const kAllKernels[] = {&kAmx, &kAvx512Bf16, &kAvx512Vnni, &kAvxVnni, &kAvx2, &kPortable, nullptr};

#elif defined(__aarch64__)

bool has_dotprod() {
#if defined(__APPLE__)
  return true;  // every Apple processor for macOS has it
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP
#else
  return false;
#endif
}

bool has_i8mm() {
#if defined(__APPLE__)
  int has = 0;
  size_t bytes = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &bytes, nullptr, 0) == 0 && has != 0;
#elif defined(__linux__)
  return has_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1) != 0;  // HWCAP2_I8MM
#else
  return false;
#endif
}

const Kernels* const kAllKernels[] = {&kI8mm, &kDotprod, &kPortable, nullptr};

#else

const Kernels* const kAllKernels[] = {&kPortable, nullptr};

#endif

}  // namespace carryall
