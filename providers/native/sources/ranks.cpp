#include "ranks.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "integers.h"

#if !defined(_WIN32)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace carryall {
namespace {

using Clock = std::chrono::steady_clock;

// Waits without taking the processor from a rank that still computes: it may run on the same core.
void pause_for(Clock::duration waited) {
  if (waited < std::chrono::microseconds(30)) return;
  if (waited < std::chrono::microseconds(300)) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

}  // namespace

#if defined(_WIN32)
Ranks* Ranks::open(uint32_t, uint32_t, const char** complaint) {
  *complaint = "models cannot be cut over processes on Windows";
  return nullptr;
}
#else
Ranks* Ranks::open(uint32_t rank, uint32_t ranks, const char** complaint) {
  static Ranks* group = nullptr;  // kernels are created one after another
  if (group != nullptr) {
    if (group->rank_ == rank && group->ranks() == ranks) return group;
    *complaint = "this process is another rank";
    return nullptr;
  }
  const char* path = getenv("CARRYALL_RANKS");
  if (path == nullptr) {
    *complaint = "this graph is a part of a model: open the whole model with tensor_parallel";
    return nullptr;
  }
  const int file = ::open(path, O_RDWR | O_CLOEXEC);
  struct stat facts;
  const bool known = file >= 0 && fstat(file, &facts) == 0 && facts.st_size >= 64;
  void* memory = known ? mmap(nullptr, static_cast<size_t>(facts.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                       : MAP_FAILED;
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) {
    *complaint = "the memory of the ranks cannot be mapped";
    return nullptr;
  }
  RanksHeader* header = static_cast<RanksHeader*>(memory);
  const uint64_t size = 64 + uint64_t{128} * ranks + 2 * header->capacity * ranks;
  if (header->magic != kRanksMagic || header->ranks != ranks || rank >= ranks ||
      size != static_cast<uint64_t>(facts.st_size)) {
    munmap(memory, static_cast<size_t>(facts.st_size));
    *complaint = "the memory of the ranks is for another model or version";
    return nullptr;
  }
  group = new (std::nothrow) Ranks;
  if (group == nullptr) {
    *complaint = "out of memory";
    return nullptr;
  }
  unsigned char* start = static_cast<unsigned char*>(memory);
  group->header_ = header;
  group->places_ = reinterpret_cast<RankPlace*>(start + 64);
  group->buffers_ = start + 64 + 128 * ranks;
  group->rank_ = rank;
  return group;
}
#endif

const char* Ranks::add(uint64_t number, int64_t rows, const RankRows& x, const RankRows& y) {
  const int64_t room = static_cast<int64_t>(header_->capacity / sizeof(float));
  const int64_t columns = smaller(x.width, room), step = columns == 0 ? rows : room / columns;
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = smaller(step, rows - first);
    for (int64_t begin = 0; begin < x.width; begin += columns) {
      const int64_t width = smaller(columns, x.width - begin);
      const auto bytes = static_cast<size_t>(width) * sizeof(float);
      float* shared = reinterpret_cast<float*>(own());
      for (int64_t i = 0; i < count; i++) memcpy(shared + i * width, x.data + (first + i) * x.step + begin, bytes);
      if (const char* complaint = meet(number << 40 ^ static_cast<uint64_t>(rows * x.width))) return complaint;
      for (uint32_t rank = 0; rank < header_->ranks; rank++) {
        const float* part = reinterpret_cast<const float*>(of(rank));
        for (int64_t i = 0; i < count; i++) {
          float* sum = y.data + (first + i) * y.step + begin;
          if (rank == 0) memcpy(sum, part + i * width, bytes);
          else for (int64_t k = 0; k < width; k++) sum[k] += part[i * width + k];
        }
      }
    }
  }
  return nullptr;
}

const char* Ranks::join(uint64_t number, int64_t rows, const RankRows& x, const RankRows& y) {
  // A buffer begins with the width of the part, in 16 bytes.
  const int64_t step = static_cast<int64_t>((header_->capacity - 16) / sizeof(float)) / y.width;
  if (step == 0) return "the rows are longer than the memory of the ranks";
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = smaller(step, rows - first);
    float* shared = reinterpret_cast<float*>(own() + 16);
    memcpy(own(), &x.width, sizeof x.width);
    for (int64_t i = 0; i < count; i++)
      memcpy(shared + i * x.width, x.data + (first + i) * x.step, static_cast<size_t>(x.width) * sizeof(float));
    if (const char* complaint = meet(number << 40 ^ static_cast<uint64_t>(rows))) return complaint;
    int64_t offset = 0;
    for (uint32_t rank = 0; rank < header_->ranks; rank++) {
      int64_t width;
      memcpy(&width, of(rank), sizeof width);
      if (width <= 0 || width > y.width - offset) return "the parts of the ranks are longer than the whole";
      const float* part = reinterpret_cast<const float*>(of(rank) + 16);
      for (int64_t i = 0; i < count; i++)
        memcpy(y.data + (first + i) * y.step + offset, part + i * width, static_cast<size_t>(width) * sizeof(float));
      offset += width;
    }
    if (offset != y.width) return "the parts of the ranks are shorter than the whole";
  }
  return nullptr;
}

const char* Ranks::meet(uint64_t operation) {
  const uint64_t round = ++round_;
  places_[rank_].operation[round % 2] = operation;
  places_[rank_].arrived.store(round, std::memory_order_release);
  for (uint32_t rank = 0; rank < header_->ranks; rank++) {
    if (const char* complaint = wait(rank, round)) return complaint;
    if (places_[rank].operation[round % 2] != operation) {
      snprintf(message_, sizeof message_, "rank %u runs another operator or size than rank %u", rank, rank_);
      return message_;
    }
  }
  return nullptr;
}

const char* Ranks::wait(uint32_t rank, uint64_t round) {
  const std::atomic<uint64_t>& arrived = places_[rank].arrived;
  if (arrived.load(std::memory_order_acquire) >= round) return nullptr;
  const Clock::time_point begun = Clock::now();
  const std::chrono::milliseconds patience(header_->patience);
  while (arrived.load(std::memory_order_acquire) < round) {
    const Clock::duration waited = Clock::now() - begun;
    if (header_->ended.load(std::memory_order_relaxed) != 0) return "another rank has ended";
    if (waited > patience) {
      snprintf(message_, sizeof message_, "rank %u did not arrive within %llu ms", rank,
               static_cast<unsigned long long>(header_->patience));
      return message_;
    }
    pause_for(waited);
  }
  return nullptr;
}

}  // namespace carryall
