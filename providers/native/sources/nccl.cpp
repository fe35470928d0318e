#include "nccl.h"

#include <cstdio>
#include <cstring>
#include <type_traits>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include "ort_api.h"

namespace carryall {
namespace {

constexpr uint64_t kJoins = ~uint64_t{0};  // what ranks do while they exchange the id

struct Id {
  char content[128];
};

struct Nccl {
  int (*GetUniqueId)(Id*);
  int (*CommInitRank)(void**, int, Id, int);
  int (*AllReduce)(const void*, void*, size_t, int, int, void*, void*);
  const char* (*GetErrorString)(int);
};

Nccl nccl;
bool loaded = false;
void* communicator = nullptr;

const char* complaint(const char* call, int code) {
  static thread_local char message[200];
  snprintf(message, sizeof message, "%s failed: %s (error %d)", call, nccl.GetErrorString(code), code);
  return message;
}

}  // namespace

#if defined(_WIN32)
const char* load_nccl(const char*) { return "NCCL does not exist for Windows"; }
#else
const char* load_nccl(const char* file) {
  if (loaded) return nullptr;
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "NCCL cannot be loaded";
  const auto resolve = [library](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    return *function != nullptr;
  };
  const bool whole =
      resolve("ncclGetUniqueId", &nccl.GetUniqueId) && resolve("ncclCommInitRank", &nccl.CommInitRank) &&
      resolve("ncclAllReduce", &nccl.AllReduce) && resolve("ncclGetErrorString", &nccl.GetErrorString);
  if (!whole) return "the library of NCCL lacks functions";
  loaded = true;
  return nullptr;
}
#endif

const char* join_nccl(Ranks* group, uint32_t rank) {
  if (communicator != nullptr) return nullptr;
  if (!loaded) return "NCCL is not loaded";
  Id id = {};
  if (rank == 0)
    if (int code = nccl.GetUniqueId(&id)) return complaint("ncclGetUniqueId", code);
  memcpy(group->own(), &id, sizeof id);
  if (const char* wrong = group->meet(kJoins)) return wrong;
  memcpy(&id, group->of(0), sizeof id);
  if (int code = nccl.CommInitRank(&communicator, static_cast<int>(group->ranks()), id, static_cast<int>(rank)))
    return complaint("ncclCommInitRank", code);
  return nullptr;
}

const char* add_over_ranks(const float* x, float* y, int64_t count, void* stream) {
  constexpr int kFloat32 = 7, kSum = 0;  // ncclDataType_t, ncclRedOp_t
  const int code = nccl.AllReduce(x, y, static_cast<size_t>(count), kFloat32, kSum, communicator, stream);
  return code == 0 ? nullptr : complaint("ncclAllReduce", code);
}

}  // namespace carryall

// Loads NCCL, see load_nccl; returns a complaint, or null.
extern "C" CARRYALL_EXPORT const char* carryall_nccl_load(const char* file) { return carryall::load_nccl(file); }
