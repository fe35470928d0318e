#include "recurrent.h"

#include <new>

#include "integers.h"
#include "kernels.h"

namespace carryall {
namespace {

constexpr int64_t kPiece = 32;      // tokens of a row, even: pairs begin as they do without pieces
constexpr int64_t kPrepared = 8;    // tokens of a task
constexpr int64_t kTiles = 4;       // of a task
constexpr int64_t kChannels = 256;  // of a task

}  // namespace

const char* DeltaRule::complaint() const {
  if (heads < 1 || key_heads < 1 || key_size < 1 || value_size < 1) return "a size is not positive";
  if (heads % key_heads != 0) return "the heads are no multiple of those of keys";
  if (value_size % 16 != 0) return "heads of values are no multiple of 16 elements";
  return nullptr;
}

const char* Convolution::complaint() const {
  return channels < 1 || taps < 1 ? "a size is not positive" : nullptr;
}

const char* complaint_of_rows(const int32_t* begins, const int32_t* places, int64_t rows, int64_t tokens, int64_t states) {
  if (begins[0] != 0 || begins[rows] != tokens) return "the rows do not begin and end with the tokens";
  for (int64_t row = 0; row < rows; row++) {
    if (begins[row] > begins[row + 1]) return "the rows are not in order";
    if (places[row] < 0 || places[row] >= states) return "a row names a state that does not exist";
    for (int64_t other = 0; other < row; other++)
      if (places[other] == places[row]) return "two rows name one state";
  }
  return nullptr;
}

DeltaJob::DeltaJob(const DeltaRule& rule, const Kernels& kernels)
    : rule_(rule), kernels_(kernels.attention->recurrent), longest_(0), memory_(nullptr), tokens_{} {
  for (int64_t row = 0; row < rule.rows; row++) longest_ = larger(longest_, rule.begins[row + 1] - rule.begins[row]);
  rule_.piece = smaller(kPiece, longest_);
  const int64_t of_rows = rule.rows * rule.heads, of_slots = of_rows * rule_.piece;
  const int64_t sizes[] = {rule.by_key ? of_slots * kKeyVectors * rule.key_size : 0, of_slots, of_slots * 3,
                           of_rows * rule.key_size, of_rows, rule.rows};
  float** parts[] = {&tokens_.vectors, &tokens_.factors, &tokens_.products, &tokens_.held_keys, &tokens_.held_factors, &tokens_.held};
  int64_t all = 0;
  for (int64_t size : sizes) all += size;
  memory_ = new (std::nothrow) float[static_cast<size_t>(all)];
  if (memory_ == nullptr) return;
  float* next = memory_;
  for (size_t i = 0; i < 6; i++) {
    *parts[i] = next;
    next += sizes[i];
  }
}

DeltaJob::~DeltaJob() { delete[] memory_; }

size_t DeltaJob::pieces() const { return static_cast<size_t>(parts(longest_, rule_.piece)); }

size_t DeltaJob::prepare_tasks() const { return static_cast<size_t>(rule_.rows * parts(rule_.piece, kPrepared)); }

size_t DeltaJob::delta_tasks() const { return static_cast<size_t>(rule_.rows * rule_.heads * parts(rule_.tiles(), kTiles)); }

void DeltaJob::prepare(void* job, size_t index) {
  const DeltaJob& j = *static_cast<DeltaJob*>(job);
  const int64_t tasks = parts(j.rule_.piece, kPrepared), task = static_cast<int64_t>(index), row = task / tasks;  // of a row
  const int64_t first = j.rule_.first(row) + task % tasks * kPrepared;
  j.kernels_.prepare(j.rule_, row, first, smaller(first + kPrepared, j.rule_.last(row)), j.tokens_);
}

void DeltaJob::delta(void* job, size_t index) {
  const DeltaJob& j = *static_cast<DeltaJob*>(job);
  const int64_t tasks = parts(j.rule_.tiles(), kTiles), task = static_cast<int64_t>(index);  // of a head
  const int64_t head = task / tasks % j.rule_.heads, row = task / tasks / j.rule_.heads, tile = task % tasks * kTiles;
  j.kernels_.delta(j.rule_, row, head, tile, smaller(tile + kTiles, j.rule_.tiles()), j.tokens_);
}

size_t ConvolutionJob::tasks() const {
  return static_cast<size_t>(convolution->rows * ((convolution->channels + kChannels - 1) / kChannels));
}

void ConvolutionJob::convolve(void* job, size_t index) {
  const ConvolutionJob& j = *static_cast<ConvolutionJob*>(job);
  const int64_t parts = (j.convolution->channels + kChannels - 1) / kChannels, task = static_cast<int64_t>(index);
  const int64_t first = task % parts * kChannels, last = first + kChannels;
  const int64_t channels = j.convolution->channels;
  if (j.convolution->begins[task / parts] == j.convolution->begins[task / parts + 1]) return;
  j.kernels->convolve(*j.convolution, task / parts, first, last < channels ? last : channels);
}

}  // namespace carryall
