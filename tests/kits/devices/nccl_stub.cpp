// NCCL between processes of one machine, without devices: "streams" are the calling thread.
//
// The id names memory that the ranks share. Sums are in the order of ranks. Environment: NCCL_STUB_FAIL, the number
// of a call of ncclAllReduce that fails.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kMost = 1 << 20;
constexpr int kRanks = 8;
struct Shared {
  std::atomic<int> arrived, round;
  float values[kRanks][kMost];
};
Shared* shared = nullptr;
int ranks = 0, rank = 0, calls = 0;

void barrier() {
  const int round = shared->round;
  if (++shared->arrived == ranks) {
    shared->arrived = 0;
    shared->round++;
  }
  while (shared->round == round) sched_yield();
}

}  // namespace

struct Id {
  char content[128];
};

API int ncclGetUniqueId(Id* id) {
  snprintf(id->content, sizeof id->content, "/nccl_stub_%d", getpid());
  const int file = shm_open(id->content, O_CREAT | O_RDWR, 0600);
  return file < 0 || ftruncate(file, sizeof(Shared)) != 0 || close(file) != 0;
}
API int ncclCommInitRank(void** communicator, int count, Id id, int own) {
  const int file = shm_open(id.content, O_RDWR, 0600);
  if (file < 0 || count > kRanks) return 2;
  shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  ranks = count, rank = own, *communicator = shared;
  barrier();
  if (own == 0) shm_unlink(id.content);
  return 0;
}
API int ncclAllReduce(const float* x, float* y, size_t count, int type, int operation, void* communicator, void*) {
  const char* failing = getenv("NCCL_STUB_FAIL");
  if (failing != nullptr && ++calls == atoi(failing)) return 1;
  if (communicator != shared || type != 7 || operation != 0 || count > kMost) return 4;
  memcpy(shared->values[rank], x, count * sizeof(float));
  barrier();
  for (size_t i = 0; i < count; i++) {
    float sum = shared->values[0][i];
    for (int other = 1; other < ranks; other++) sum += shared->values[other][i];
    y[i] = sum;
  }
  barrier();
  return 0;
}
API const char* ncclGetErrorString(int code) { return code == 1 ? "unhandled cuda error" : "invalid argument"; }
