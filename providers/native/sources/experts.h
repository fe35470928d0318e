// A mixture of experts on quantized weights, or on weights of 16 bits, cut into tasks.
#pragma once
#include <cstddef>

#include "linear.h"
#include "ranks.h"

namespace carryall {

constexpr int64_t kMostExperts = 4096;

// Between the products: of the gate, which is the first product's whole result where experts have none.
enum class ExpertActivation : int64_t { silu = 0, gelu_tanh = 1, squared_relu = 2 };

struct ExpertSizes {
  int64_t experts = 0, per_token = 0, normalize = 0;
  int64_t hidden = 0, width = 0;  // of a token; of what is between the products
  Weights in, out;                // of one expert: padded() outputs of the gate, and of up behind it; those of down
  Ranks* group = nullptr;         // of which each has a part of the width, and of the outputs of down; or nullptr
  uint64_t number = 0;            // of what they join
  ExpertActivation activation = ExpertActivation::silu;
  int64_t gated = 1;              // whether the activation is multiplied by the result of up
  Gate gate = {1, 0, 0};          // of a gated SiLU

  // The outputs of gate and of up, each in whole tiles.
  CARRYALL_INLINE int64_t padded() const { return (width + kColumns - 1) / kColumns * kColumns; }
  void activate(const AttentionKernels& kernels, float* entered) const;  // the result is where the gate was
  const char* complaint() const;  // what is wrong with the sizes, nullptr if nothing is
};

// One run. The tasks of a kind may run in any order and at the same time; kinds follow each other in this order:
// route; then, after sort(): quantize, enter, between; then, after meet(): round, leave, combine.
class ExpertsJob {
 public:
  struct Inputs {
    const float* x;         // [tokens, hidden]
    const float* scores;    // [tokens, experts] logits, or with `chosen` [tokens, per_token] shares
    const int64_t* chosen;  // [tokens, per_token] experts of each token, or nullptr for those of the largest scores
    const float *bias_in, *bias_out;  // of all experts, or nullptr
  };

  // y [tokens, outputs].
  ExpertsJob(const ExpertSizes& sizes, const Kernels& kernels, const Inputs& inputs, int64_t tokens, float* y);
  ~ExpertsJob();
  ExpertsJob(const ExpertsJob&) = delete;
  ExpertsJob& operator=(const ExpertsJob&) = delete;
  bool valid() const { return memory_ != nullptr && entering_.valid() && leaving_.valid(); }

  static void route(void* job, size_t token);    // chooses a token's experts and their shares
  void sort();                                   // the copies of tokens by expert, then by token
  static void quantize(void* job, size_t copy);  // or copies the row, for weights that are floats
  static void enter(void* job, size_t task);     // the products of gate and up
  static void between(void* job, size_t copy);
  const char* meet();                            // joins what is between with that of the other ranks, or returns a complaint
  static void round(void* job, size_t copy);
  static void leave(void* job, size_t task);     // the products of down
  static void combine(void* job, size_t token);  // the weighted sum, in the order of the shares
  size_t tokens() const { return static_cast<size_t>(tokens_); }
  size_t copies() const { return static_cast<size_t>(copies_); }
  size_t enter_tasks() const { return static_cast<size_t>(first_tasks_[sizes_.experts]); }
  size_t leave_tasks() const { return static_cast<size_t>(second_tasks_[sizes_.experts]); }

 private:
  carryall::Inputs middle() const;
  void plan(const Weights& weights, int64_t* tasks, int64_t* tile_step) const;
  void multiply(const Weights& weights, const Rows& rows, carryall::Inputs floats, const float* bias, const int64_t* tasks,
                int64_t tile_step, int64_t task, float* y) const;

  const ExpertSizes& sizes_;
  const Kernels& kernels_;
  const Inputs inputs_;
  const int64_t tokens_, copies_;
  float* y_;
  const Workspace entering_, leaving_;
  int64_t first_step_ = 1, second_step_ = 1;
  void* memory_;
  // Of memory_.
  int64_t *begins_, *first_tasks_, *second_tasks_;  // [experts + 1], copies and tasks before an expert's
  int64_t *chosen_, *places_, *sources_;            // [copies]: expert, place among the sorted, token of a place
  float *shares_, *entered_, *left_;                // [copies], [copies, in.outputs], [copies, out.outputs]
  float *joined_, *sorted_;  // [copies, out.inputs], of ranks; [copies, hidden], rows by place, for weights that are floats
};

}  // namespace carryall
