// The largest logits of rows, and the log-sum-exps of all.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "linear.h"
#include "ort_api.h"

namespace carryall {
namespace {

constexpr int64_t kBlocks = 1024, kPart = 1024;
constexpr int64_t kLanes = 4, kSums = 4;  // every processor has registers of 4 floats; wider ones gain little here
constexpr float kMost = std::numeric_limits<float>::max();

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Mask __attribute__((vector_size(4 * kLanes)));

struct Candidate {
  float logit;
  int64_t token;
  // Of equal logits the lowest token comes first.
  bool operator<(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && token < other.token);
  }
};

// The `count` largest logits of a row. The row is cut into blocks; `count` blocks hold a logit that is not below the `count`-th
// largest maximum of a block, so what is below it is no candidate, and only those blocks are read again.
class Largest {
 public:
  Largest(const float* logits, int64_t size, int64_t count)
      : logits_(logits), size_(size), block_((size + kBlocks - 1) / kBlocks), count_(count) {}

  // Writes them in descending order. Returns false if a logit is infinite or none, or fewer are above -infinity.
  bool write(float* logits, int64_t* tokens) {
    float maxima[kBlocks], sorted[kBlocks] = {};
    int64_t blocks = 0;
    for (int64_t first = 0; first < size_; first += block_)
      if (!maximum(first, std::min(first + block_, size_), &maxima[blocks++])) return false;
    bound_ = -kMost;
    if (blocks >= count_) {
      std::copy(maxima, maxima + blocks, sorted);
      std::nth_element(sorted, sorted + count_ - 1, sorted + blocks, [](float a, float b) { return a > b; });
      bound_ = std::max(bound_, sorted[count_ - 1]);
    }
    for (int64_t i = 0; i < blocks; i++)
      if (maxima[i] >= bound_) gather(i * block_, std::min((i + 1) * block_, size_));
    if (kept_count_ < count_) return false;
    cut();
    std::sort(kept_, kept_ + count_);
    for (int64_t i = 0; i < count_; i++) {
      logits[i] = kept_[i].logit;
      tokens[i] = kept_[i].token;
    }
    return true;
  }

 private:
  static constexpr int64_t kRoom = 512;

  bool maximum(int64_t first, int64_t last, float* largest) const {
    Vector most = -std::numeric_limits<float>::infinity() - Vector{};
    Mask numbers = ~Mask{};
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) {
      Vector x;
      memcpy(&x, logits_ + i, sizeof x);
      most = x > most ? x : most;
      numbers &= x <= kMost;
    }
    for (; i < last; i++) {
      most[0] = logits_[i] > most[0] ? logits_[i] : most[0];
      numbers[0] &= logits_[i] <= kMost ? -1 : 0;
    }
    bool all = true;
    *largest = most[0];
    for (int64_t j = 0; j < kLanes; j++) {
      *largest = std::max(*largest, most[j]);
      all = all && numbers[j] != 0;
    }
    return all;
  }

  void gather(int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      if (logits_[i] < bound_) continue;
      kept_[kept_count_++] = {logits_[i], i};
      if (kept_count_ == kRoom) {
        cut();
        bound_ = std::nextafter(kept_[count_ - 1].logit, kMost);  // of equal logits the tokens before come first
      }
    }
  }

  void cut() {
    std::nth_element(kept_, kept_ + count_ - 1, kept_ + kept_count_);
    kept_count_ = count_;
  }

  const float* logits_;
  const int64_t size_, block_, count_;
  float bound_ = 0.0f;
  int64_t kept_count_ = 0;
  Candidate kept_[kRoom];
};

double log_sum_exp(const Kernels& kernels, const float* logits, int64_t size, float largest) {
  double total = 0.0;
  float part[kPart];
  for (int64_t first = 0; first < size; first += kPart) {
    const int64_t count = std::min(kPart, size - first);
    kernels.attention->exponentials(logits + first, count, largest, part);
    std::fill(part + count, part + kPart, 0.0f);
    Vector sums[kSums] = {}, x;  // one alone waits for each addition
    for (int64_t i = 0; i < kPart; i += kLanes * kSums)
      for (int64_t s = 0; s < kSums; s++) {
        memcpy(&x, part + i + s * kLanes, sizeof x);
        sums[s] += x;
      }
    const Vector sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int64_t j = 0; j < kLanes; j++) total += static_cast<double>(sum[j]);
  }
  return static_cast<double>(largest) + std::log(total);
}

}  // namespace
}  // namespace carryall

// Writes the `count` largest logits of each row in descending order and their tokens [rows, count]; at most 256, and fewer than
// `vocab_size`. `totals` [rows] are the log-sum-exps of all; of rows that are not `summed` an upper bound, and NaN of rows with a
// NaN, an infinity, or fewer logits above -infinity than `count`.
extern "C" CARRYALL_EXPORT void carryall_best_logits(const float* const* rows, int64_t count_of_rows, int64_t vocab_size, int64_t count,
                                                     const char* summed, float* logits, int64_t* tokens, double* totals) {
  using namespace carryall;
  const Kernels& kernels = *choose_kernels(nullptr);
  for (int64_t row = 0; row < count_of_rows; row++) {
    const float* x = rows[row];
    float *best = logits + row * count;
    if (!Largest(x, vocab_size, count).write(best, tokens + row * count)) {
      totals[row] = std::numeric_limits<double>::quiet_NaN();
    } else if (summed[row] != 0) {
      totals[row] = log_sum_exp(kernels, x, vocab_size, best[0]);
    } else {
      totals[row] = static_cast<double>(best[0]) + std::log(static_cast<double>(vocab_size));
    }
  }
}
