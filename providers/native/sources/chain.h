// A chain of operators on the rows of a batch, computed in one parallel section.
//
// onnxruntime begins and ends a parallel section for each operator, which takes longer than most operators of a decoding
// step. Here the threads enter once and go through phases together. A phase is a list of tasks; the thread that ends the
// last of them prepares the next phase. Threads wait for tasks that others have begun, never for a thread to arrive, so
// any number of threads suffices. A thread whose task another program interrupts holds up the others. They sleep then: time that
// they do not use is theirs later, and a thread that only yields loses its turn each time.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>

#include "linear.h"
#include "ranks.h"

namespace carryall {

// Rows of floats in memory.
struct Values {
  float* data = nullptr;
  int64_t width = 0, step = 0;  // floats of a row; from one row to the next
  CARRYALL_INLINE float* row(int64_t index) const { return data + index * step; }
};

enum class StepKind : int64_t { add = 0, norm = 1, gate = 2, part = 3, linear = 4, attention = 5, multiply = 6, center = 7, activate = 8, near_attention = 9, sum = 10, join = 11 };

struct Step {
  StepKind kind = StepKind::add;
  Values out, x, other;           // other: the second summand or factor
  const float* vector = nullptr;  // the bias of a sum or product, or nullptr; the weight of a norm
  const float* bias = nullptr;    // of a norm with a mean, or nullptr
  float epsilon = 0;              // of a norm
  Activation activation = Activation::gelu;
  int64_t group = 0;              // floats that a norm normalizes together
  Weights weights;                // of a product
  bool rounds = true;             // whether the product rounds or splits x; else the product before it has
  Attention attention;
  bool writes = true;             // whether the attention writes keys and values
  Ranks* meeting = nullptr;       // the ranks over which x is added up or joined
  uint64_t number = 0;            // of that operator
};

constexpr int64_t kMostRanges = 64;                  // of the tasks of a phase
constexpr int64_t kMostChainRows = int64_t{1} << 20;

class ChainRun {
 public:
  // `steps` are valid, each for `rows` rows; `memory` has the bytes of rows_bytes().
  ChainRun(const Kernels& kernels, const Step* steps, int64_t count, int64_t rows, void* memory);
  ~ChainRun();
  ChainRun(const ChainRun&) = delete;
  ChainRun& operator=(const ChainRun&) = delete;
  static int64_t rows_bytes(const Step* steps, int64_t count, int64_t rows);  // of rounded rows
  static void work(void* run, size_t);      // called by any number of threads at once
  const char* complaint() const { return failed_ ? complaint_ : nullptr; }

 private:
  enum class Kind { none, rows, multiply, attend, meet };
  // The tasks [next, end) of a range: next in the low 32 bits, end in the high ones. A thread takes those of its range,
  // then those of others.
  struct alignas(128) Range {
    std::atomic<uint64_t> tasks{0};
  };

  struct Ahead {
    const Weights* weights = nullptr;
    int64_t asked = 0;  // bytes of this thread's range
  };

  void advance();                 // to the next phase with tasks for several threads, or to the end
  bool prepare();                 // the next phase; returns false at the end
  void meet();                    // the other ranks, which this thread does alone
  void publish(int64_t tasks);
  void announce();                // that the number of the phase has changed
  void wait(uint64_t number, int64_t range, int64_t ranges, Ahead* ahead);
  void sleep(uint64_t number);
  const Weights* next_weights() const;
  bool take_tasks(int64_t range); // returns whether this thread has ended the phase
  void run_task(int64_t task);
  void run_rows(int64_t first_row, int64_t last_row) const;
  void run_rows(const Step& step, int64_t first_row, int64_t last_row) const;
  int64_t row_floats() const;

  const Kernels& kernels_;
  const Step* steps_;
  const int64_t count_, rows_;
  void* memory_;
  int64_t next_ = 0;      // the step that comes next
  bool entered_ = false;  // whether the rows of step `next_` are rounded or written

  // The phase; changed by the thread that has ended its last task.
  Kind kind_ = Kind::none;
  int64_t first_ = 0, last_ = 0;  // of the kind `rows`: steps, the last of which only rounds or writes rows
  int64_t task_rows_ = 1, tasks_ = 0;
  Job job_{};
  AttentionJob* attention_ = nullptr;
  alignas(AttentionJob) unsigned char attention_memory_[sizeof(AttentionJob)];

  std::atomic<const Weights*> ahead_{nullptr};  // of the next product
  const char* complaint_ = "out of memory for attention";
  std::atomic<bool> failed_{false}, ended_{false};
  std::atomic<int64_t> joined_{0}, ranges_{0};
  alignas(128) std::atomic<uint64_t> number_{0};  // grows with every phase
  alignas(128) std::atomic<int64_t> done_{0};     // tasks of the phase
  std::atomic<int64_t> sleepers_{0};
  std::mutex lock_;
  std::condition_variable changed_;
  Range all_[kMostRanges];
};

}  // namespace carryall
