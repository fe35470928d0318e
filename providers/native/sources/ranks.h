// Memory that the processes of one model share, through which they add up and join tensors.
//
// The process that starts them makes the file and names it in CARRYALL_RANKS. Its layout, in bytes:
//
//   header                        64
//   a place for each rank         128
//   two buffers for each rank     capacity each
//
// Rounds are numbered from 1. In round s a rank writes buffer s % 2, then states s as arrived, and reads the buffers of
// others once they have arrived too. A rank that arrived in s has read all of s - 1, so that all may write the buffer of
// s - 1 again in s + 1: one wait a round is enough.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace carryall {

constexpr int64_t kMostRanks = 1024;
constexpr uint32_t kRanksMagic = 0x4b4e5231;  // "1RNK"

struct RanksHeader {
  uint32_t magic, ranks;
  uint64_t capacity;           // bytes of a buffer
  uint64_t patience;           // milliseconds that a rank waits for the others
  std::atomic<uint32_t> ended;  // not 0: a rank has ended, so that the others need not wait
};

struct RankPlace {
  std::atomic<uint64_t> arrived;  // the last round that the rank has written
  uint64_t operation[2];          // what it computes in an even and an odd round
  uint64_t padding[13];
};

static_assert(sizeof(RanksHeader) <= 64 && sizeof(RankPlace) == 128, "the layout is that of ranks_memory.py");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share the counters");

// Floats in memory: `width` of a row, `step` from one row to the next.
struct RankRows {
  float* data;
  int64_t width, step;
};

// The ranks of this process: one model, so one group.
class Ranks {
 public:
  // Returns the group, or null and a complaint.
  static Ranks* open(uint32_t rank, uint32_t ranks, const char** complaint);

  // Adds the rows x of all ranks in the order of ranks, so that y is equal to the bit in all of them; y is as wide as x.
  // Operators have a `number`, the same in all ranks. Returns a complaint if a rank does not come, or runs another one.
  const char* add(uint64_t number, int64_t rows, const RankRows& x, const RankRows& y);
  // Puts the columns x of all ranks side by side; y is as wide as all of them.
  const char* join(uint64_t number, int64_t rows, const RankRows& x, const RankRows& y);

  // The buffer of this rank for the next round.
  unsigned char* own() { return buffer(rank_, round_ + 1); }
  // Begins the next round with what is in the own buffer, and waits for the others; a complaint if one does not come.
  // `operation` must be the same in all ranks.
  const char* meet(uint64_t operation);
  // The buffer of a rank of the current round.
  const unsigned char* of(uint32_t rank) { return buffer(rank, round_); }
  uint32_t ranks() const { return header_->ranks; }

 private:
  unsigned char* buffer(uint32_t rank, uint64_t round) {
    return buffers_ + (2 * rank + round % 2) * header_->capacity;
  }
  const char* wait(uint32_t rank, uint64_t round);

  RanksHeader* header_ = nullptr;
  RankPlace* places_ = nullptr;
  unsigned char* buffers_ = nullptr;
  uint32_t rank_ = 0;
  uint64_t round_ = 0;
  char message_[160] = {};
};

}  // namespace carryall
