#include "experts.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "integers.h"

namespace carryall {
namespace {

constexpr int64_t kPieceBytes = 384 << 10;  // quantized rows of a task, which stay in the second-level cache
constexpr int64_t kTasks = 64;              // of one product, about

int64_t piece_rows(const Weights& weights) {
  const int64_t bytes = weights.floats() ? static_cast<int64_t>(sizeof(float)) : 1;
  return larger(kRowGroup, kPieceBytes / (bytes * weights.width()));
}

}  // namespace

const char* ExpertSizes::complaint() const {
  if (experts < 1 || experts > kMostExperts) return "num_experts is not in [1, 4096]";
  if (per_token < 1 || per_token > experts) return "per_token is not in [1, num_experts]";
  if (normalize != 0 && normalize != 1) return "normalize is not 0 or 1";
  if (width < 1 || width > kLargest / 2) return "width is not in [1, 2^23]";
  if (group == nullptr ? width != out.inputs : width > out.inputs) return "what is between the products has another width";
  if (const char* wrong = in.complaint()) return wrong;
  if (const char* wrong = out.complaint()) return wrong;
  if (in.bits > 16 || out.bits > 16) return "the weights of experts have 32 bits, which no expert has";
  if (!std::isfinite(gate.alpha) || !std::isfinite(gate.beta)) return "alpha or beta is not finite";
  if (!(gate.limit > 0)) return "limit is not positive";
  if (gated != 0 && gated != 1) return "gated is not 0 or 1";
  const bool silu = activation == ExpertActivation::silu;
  if (!silu && activation != ExpertActivation::gelu_tanh && activation != ExpertActivation::squared_relu)
    return "the activation is unknown";
  if ((!silu || gated == 0) && (gate.alpha != 1 || gate.beta != 0 || gate.limit != INFINITY))
    return "alpha, beta and limit are for a gated SiLU only";
  return nullptr;
}

void ExpertSizes::activate(const AttentionKernels& kernels, float* entered) const {
  const int64_t count = padded();
  float* up = entered + count;
  if (activation == ExpertActivation::silu && gated != 0) return kernels.gate(gate, entered, up, count, entered);
  switch (activation) {
    case ExpertActivation::silu: kernels.activate(Activation::silu, entered, count, entered); break;
    case ExpertActivation::gelu_tanh: kernels.activate(Activation::gelu_tanh, entered, count, entered); break;
    case ExpertActivation::squared_relu:
      kernels.activate(Activation::relu, entered, count, entered);
      kernels.multiply(entered, entered, count, entered);
  }
  if (gated != 0) kernels.multiply(entered, up, count, entered);
}

ExpertsJob::ExpertsJob(const ExpertSizes& sizes, const Kernels& kernels, const Inputs& inputs, int64_t tokens, float* y)
    : sizes_(sizes), kernels_(kernels), inputs_(inputs), tokens_(tokens), copies_(tokens * sizes.per_token), y_(y),
      entering_(sizes.in, copies_), leaving_(sizes.out, copies_) {
  const auto copies = static_cast<size_t>(copies_), experts = static_cast<size_t>(sizes.experts + 1);
  const size_t integers = 3 * experts + 3 * copies;
  const int64_t joined = sizes.group == nullptr ? 0 : sizes.out.inputs, sorted = sizes.in.floats() ? sizes.hidden : 0;
  const size_t floats = copies * static_cast<size_t>(1 + sizes.in.outputs + sizes.out.outputs + joined + sorted);
  memory_ = malloc(integers * sizeof(int64_t) + floats * sizeof(float));
  if (memory_ == nullptr) return;
  begins_ = static_cast<int64_t*>(memory_);
  first_tasks_ = begins_ + experts;
  second_tasks_ = first_tasks_ + experts;
  chosen_ = second_tasks_ + experts;
  places_ = chosen_ + copies;
  sources_ = places_ + copies;
  shares_ = reinterpret_cast<float*>(sources_ + copies);
  entered_ = shares_ + copies;
  left_ = entered_ + copies * static_cast<size_t>(sizes.in.outputs);
  joined_ = left_ + copies * static_cast<size_t>(sizes.out.outputs);
  sorted_ = joined_ + copies * static_cast<size_t>(joined);
}

ExpertsJob::~ExpertsJob() { free(memory_); }

void ExpertsJob::route(void* job, size_t token) {
  const ExpertsJob& j = *static_cast<const ExpertsJob*>(job);
  const int64_t experts = j.sizes_.experts, count = j.sizes_.per_token, first = static_cast<int64_t>(token) * count;
  int64_t* chosen = j.chosen_ + first;
  float* shares = j.shares_ + first;
  if (j.inputs_.chosen != nullptr) {
    memcpy(chosen, j.inputs_.chosen + first, sizeof(int64_t) * static_cast<size_t>(count));
    memcpy(shares, j.inputs_.scores + first, sizeof(float) * static_cast<size_t>(count));
    return;
  }
  const float* scores = j.inputs_.scores + static_cast<int64_t>(token) * experts;
  bool taken[kMostExperts] = {};
  for (int64_t k = 0; k < count; k++) {
    int64_t best = -1;  // of equal scores the first one, as TopK; a NaN is below all
    for (int64_t e = 0; e < experts; e++)
      if (!taken[e] && (best < 0 || scores[e] > scores[best])) best = e;
    taken[best] = true;
    chosen[k] = best;
  }
  const float most = scores[chosen[0]];
  float all[kMostExperts], sum = 0;
  j.kernels_.attention->exponentials(scores, experts, most, all);
  for (int64_t k = 0; k < count; k++) shares[k] = all[chosen[k]];
  if (j.sizes_.normalize != 0) {
    for (int64_t k = 0; k < count; k++) sum += shares[k];
  } else {
    for (int64_t e = 0; e < experts; e++) sum += all[e];
  }
  for (int64_t k = 0; k < count; k++) shares[k] /= sum;
}

void ExpertsJob::sort() {
  const int64_t experts = sizes_.experts;
  memset(begins_, 0, sizeof(int64_t) * static_cast<size_t>(experts + 1));
  for (int64_t i = 0; i < copies_; i++) begins_[chosen_[i] + 1]++;
  for (int64_t e = 0; e < experts; e++) begins_[e + 1] += begins_[e];
  int64_t* next = first_tasks_;  // free until plan()
  memcpy(next, begins_, sizeof(int64_t) * static_cast<size_t>(experts));
  for (int64_t i = 0; i < copies_; i++) {
    places_[i] = next[chosen_[i]]++;
    sources_[places_[i]] = i / sizes_.per_token;
  }
  plan(sizes_.in, first_tasks_, &first_step_);
  plan(sizes_.out, second_tasks_, &second_step_);
}

// Sets the number of tasks before each expert's, and the tiles of a task.
void ExpertsJob::plan(const Weights& weights, int64_t* tasks, int64_t* tile_step) const {
  int64_t pieces = 0;
  for (int64_t e = 0; e < sizes_.experts; e++) pieces += parts(begins_[e + 1] - begins_[e], piece_rows(weights));
  *tile_step = larger(1, pieces * weights.tiles() / kTasks);
  tasks[0] = 0;
  for (int64_t e = 0; e < sizes_.experts; e++)
    tasks[e + 1] = tasks[e] + parts(begins_[e + 1] - begins_[e], piece_rows(weights)) * parts(weights.tiles(), *tile_step);
}

void ExpertsJob::multiply(const Weights& weights, const Rows& rows, carryall::Inputs floats, const float* bias,
                          const int64_t* tasks, int64_t tile_step, int64_t task, float* y) const {
  int64_t expert = 0, end = sizes_.experts;  // the last one whose tasks begin at or before this
  while (end - expert > 1) {
    const int64_t middle = (expert + end) / 2;
    (tasks[middle] <= task ? expert : end) = middle;
  }
  const int64_t steps = parts(weights.tiles(), tile_step), own = task - tasks[expert];
  const int64_t row = begins_[expert] + own / steps * piece_rows(weights), tile = own % steps * tile_step;
  Weights chosen = weights;
  chosen.data += expert * weights.bytes();
  const int64_t last_row = smaller(row + piece_rows(weights), begins_[expert + 1]);
  const int64_t last_tile = smaller(tile + tile_step, weights.tiles());
  const float* own_bias = bias == nullptr ? nullptr : bias + expert * weights.outputs;
  const Outputs results = {y, weights.outputs};
  if (weights.floats()) return kernels_.attention->products(chosen, floats, own_bias, row, last_row, tile, last_tile, results);
  kernels_.multiply(chosen, rows, own_bias, row, last_row, tile, last_tile, results);
}

void ExpertsJob::quantize(void* job, size_t copy) {
  const ExpertsJob& j = *static_cast<const ExpertsJob*>(job);
  const int64_t row = static_cast<int64_t>(copy), hidden = j.sizes_.hidden;
  const float* x = j.inputs_.x + j.sources_[row] * hidden;
  if (j.sizes_.in.floats()) memcpy(j.sorted_ + row * hidden, x, sizeof(float) * static_cast<size_t>(hidden));
  else j.kernels_.quantize(x, hidden, j.sizes_.in.block, j.entering_.rows(), row);
}

void ExpertsJob::enter(void* job, size_t task) {
  const ExpertsJob& j = *static_cast<const ExpertsJob*>(job);
  j.multiply(j.sizes_.in, j.entering_.rows(), {j.sorted_, j.sizes_.hidden}, j.inputs_.bias_in, j.first_tasks_, j.first_step_,
             static_cast<int64_t>(task), j.entered_);
}

void ExpertsJob::between(void* job, size_t copy) {
  const ExpertsJob& j = *static_cast<const ExpertsJob*>(job);
  const int64_t row = static_cast<int64_t>(copy);
  float* entered = j.entered_ + row * j.sizes_.in.outputs;
  j.sizes_.activate(*j.kernels_.attention, entered);
}

const char* ExpertsJob::meet() {
  if (sizes_.group == nullptr) return nullptr;
  const RankRows own = {entered_, sizes_.width, sizes_.in.outputs}, all = {joined_, sizes_.out.inputs, sizes_.out.inputs};
  return sizes_.group->join(sizes_.number, copies_, own, all);
}

// What down reads.
carryall::Inputs ExpertsJob::middle() const {
  return sizes_.group == nullptr ? carryall::Inputs{entered_, sizes_.in.outputs} : carryall::Inputs{joined_, sizes_.out.inputs};
}

void ExpertsJob::round(void* job, size_t copy) {
  const ExpertsJob& j = *static_cast<const ExpertsJob*>(job);
  const int64_t row = static_cast<int64_t>(copy);
  const carryall::Inputs x = j.middle();
  if (!j.sizes_.out.floats())
    j.kernels_.quantize(x.data + row * x.step, j.sizes_.out.inputs, j.sizes_.out.block, j.leaving_.rows(), row);
}

void ExpertsJob::leave(void* job, size_t task) {
  const ExpertsJob& j = *static_cast<const ExpertsJob*>(job);
  j.multiply(j.sizes_.out, j.leaving_.rows(), j.middle(), j.inputs_.bias_out, j.second_tasks_,
             j.second_step_, static_cast<int64_t>(task), j.left_);
}

void ExpertsJob::combine(void* job, size_t token) {
  const ExpertsJob& j = *static_cast<const ExpertsJob*>(job);
  const int64_t row = static_cast<int64_t>(token), width = j.sizes_.out.outputs, count = j.sizes_.per_token;
  float* y = j.y_ + row * width;
  memset(y, 0, sizeof(float) * static_cast<size_t>(width));
  for (int64_t i = row * count; i < (row + 1) * count; i++) {
    const float share = j.shares_[i], *from = j.left_ + j.places_[i] * width;
    for (int64_t k = 0; k < width; k++) y[k] += share * from[k];
  }
}

}  // namespace carryall
