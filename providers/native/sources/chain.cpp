#include "chain.h"

#include <new>

#include "integers.h"

namespace carryall {
namespace {

constexpr int64_t kAlone = 4 << 10;     // floats of rows that one thread computes before another would have begun
constexpr int64_t kRowsWork = 8 << 10;  // smallest number of floats of a task on rows
constexpr int64_t kTaskWork = 16 << 10; // smallest number of products of a task: about 0.3 us; taking one takes 0.02 us
constexpr int64_t kAheadBytes = 256 << 10;  // of the next product that a waiting thread asks for: part of a second-level cache
constexpr int kAheadLines = 4;          // between two looks
constexpr int kSpins = 2000;            // 50 to 100 us; to wake a thread takes 50

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

bool is_product(const Step& step) { return step.kind == StepKind::linear; }
bool is_attention(const Step& step) { return step.kind == StepKind::attention; }
bool is_meeting(const Step& step) { return step.kind == StepKind::sum || step.kind == StepKind::join; }

}  // namespace

ChainRun::ChainRun(const Kernels& kernels, const Step* steps, int64_t count, int64_t rows, void* memory)
    : kernels_(kernels), steps_(steps), count_(count), rows_(rows), memory_(memory) {
  // Any thread may begin the attention; this one may be the main thread and compute it.
  for (int64_t i = 0; i < count && !failed_; i++) failed_ = is_attention(steps[i]) && !reserve_stack();
  advance();
}

ChainRun::~ChainRun() {
  if (attention_ != nullptr) attention_->~AttentionJob();
}

int64_t ChainRun::rows_bytes(const Step* steps, int64_t count, int64_t rows) {
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++)
    if (is_product(steps[i])) most = larger(most, Rows::bytes(steps[i].weights, rows));
  return most;
}

void ChainRun::work(void* run, size_t) {
  ChainRun& r = *static_cast<ChainRun*>(run);
  if (r.ended_.load(std::memory_order_acquire)) return;
  const int64_t own = r.joined_.fetch_add(1) % kMostRanges;
  Ahead ahead;
  while (true) {
    // Read before all that changes together with it, so that no change is slept through.
    const uint64_t number = r.number_.load(std::memory_order_acquire);
    if (r.ended_.load(std::memory_order_acquire)) return;
    const int64_t ranges = r.ranges_.load(std::memory_order_acquire);
    bool ended = false;
    for (int64_t i = 0; i < ranges && !ended; i++) ended = r.take_tasks((own + i) % ranges);
    if (!ended) r.wait(number, own % ranges, ranges, &ahead);
  }
}

// Waits until the phase, or one after it, has ended; meanwhile asks for weights of the next product.
void ChainRun::wait(uint64_t number, int64_t range, int64_t ranges, Ahead* ahead) {
  const Weights* next = ahead_.load(std::memory_order_relaxed);
  if (next != ahead->weights) *ahead = {next, 0};
  const int64_t first = next == nullptr ? 0 : next->tiles() * range / ranges * next->tile_bytes();
  const int64_t end = next == nullptr ? 0 : smaller(next->tiles() * (range + 1) / ranges * next->tile_bytes(), first + kAheadBytes);
  for (int spins = 0; spins < kSpins; spins++) {
    if (number_.load(std::memory_order_acquire) != number) return;
    for (int i = 0; i < kAheadLines && first + ahead->asked < end; i++, ahead->asked += kLine)
      __builtin_prefetch(next->data + first + ahead->asked, 0, 2);
    pause();
  }
  sleep(number);
}

void ChainRun::sleep(uint64_t number) {
  std::unique_lock<std::mutex> lock(lock_);
  sleepers_.fetch_add(1);
  changed_.wait(lock, [&] { return number_.load() != number; });
  sleepers_.fetch_sub(1);
}

// Either a sleeper sees the new number, or this sees the sleeper: both orders are the same for all threads.
void ChainRun::announce() {
  number_.fetch_add(1);
  if (sleepers_.load() == 0) return;
  const std::lock_guard<std::mutex> lock(lock_);
  changed_.notify_all();
}

bool ChainRun::take_tasks(int64_t range) {
  std::atomic<uint64_t>& tasks = all_[range].tasks;
  int64_t taken = 0;
  for (uint64_t seen = tasks.load(std::memory_order_acquire); static_cast<uint32_t>(seen) < seen >> 32; seen++) {
    seen = tasks.fetch_add(1, std::memory_order_acq_rel);
    if (static_cast<uint32_t>(seen) >= seen >> 32) break;
    run_task(static_cast<int64_t>(seen & 0xffffffff));
    taken++;
  }
  if (taken == 0) return false;
  const int64_t all = tasks_;  // of this phase, which cannot end before the next line
  if (done_.fetch_add(taken, std::memory_order_acq_rel) + taken < all) return false;
  advance();
  return true;
}

void ChainRun::advance() {
  while (prepare())
    if (kind_ == Kind::meet) meet();
    else if (kind_ != Kind::rows || (rows_ > 1 && rows_ * row_floats() > kAlone)) return publish(tasks_);
    else run_rows(0, rows_);
  ended_.store(true, std::memory_order_release);
  announce();
}

void ChainRun::meet() {
  const Step& step = steps_[next_ - 1];
  const RankRows x = {step.x.data, step.x.width, step.x.step}, out = {step.out.data, step.out.width, step.out.step};
  const char* complaint = step.kind == StepKind::sum ? step.meeting->add(step.number, rows_, x, out)
                                                     : step.meeting->join(step.number, rows_, x, out);
  if (complaint == nullptr) return;
  complaint_ = complaint;
  failed_ = true;
}

// Cuts the tasks into a range for each thread that has joined. The phase may end before this returns.
void ChainRun::publish(int64_t tasks) {
  const int64_t ranges = smaller(kMostRanges, larger(1, joined_.load(std::memory_order_relaxed)));
  done_.store(0, std::memory_order_relaxed);
  ranges_.store(ranges, std::memory_order_release);
  for (int64_t i = 0; i < ranges; i++) {
    const auto next = static_cast<uint64_t>(tasks * i / ranges), end = static_cast<uint64_t>(tasks * (i + 1) / ranges);
    all_[i].tasks.store(end << 32 | next, std::memory_order_release);
  }
  announce();
}

// The weights of the first product from step `next_` on, nullptr if there is none.
const Weights* ChainRun::next_weights() const {
  for (int64_t i = next_; i < count_; i++)
    if (is_product(steps_[i])) return &steps_[i].weights;
  return nullptr;
}

bool ChainRun::prepare() {
  if (failed_) return false;
  if (attention_ != nullptr) {
    for (size_t item = 0; item < attention_->finish_tasks(); item++) AttentionJob::finish(attention_, item);
    attention_->~AttentionJob();
    attention_ = nullptr;
  }
  if (!entered_) {
    first_ = last_ = next_;
    while (last_ < count_ && !is_product(steps_[last_]) && !is_attention(steps_[last_]) && !is_meeting(steps_[last_])) last_++;
    next_ = last_;
    entered_ = true;
    const Step* step = last_ < count_ ? steps_ + last_ : nullptr;
    const bool product = step != nullptr && is_product(*step), prepared = product && kernels_.prepares(step->weights);
    const bool rounds = prepared && step->rounds;
    if (rounds || (product && !prepared)) job_.rows = Rows::place(step->weights, rows_, memory_);
    if (first_ < last_ || rounds || (step != nullptr && is_attention(*step) && step->writes)) {
      kind_ = Kind::rows;
      task_rows_ = larger(1, kRowsWork / larger(1, row_floats()));
      tasks_ = parts(rows_, task_rows_);
      return true;
    }
  }
  if (next_ == count_) return false;
  const Step& step = steps_[next_++];
  entered_ = false;
  ahead_.store(next_weights(), std::memory_order_relaxed);
  if (is_meeting(step)) {
    kind_ = Kind::meet;
    return true;
  }
  if (is_product(step)) {
    kind_ = Kind::multiply;
    job_ = {&kernels_, &step.weights, {step.x.data, step.x.step}, step.vector, {step.out.data, step.out.step}, rows_, job_.rows};
    job_.plan_multiply(kTaskWork);
    tasks_ = static_cast<int64_t>(job_.multiply_tasks());
    return true;
  }
  kind_ = Kind::attend;
  attention_ = new (attention_memory_) AttentionJob(step.attention, *kernels_.attention, kSeparate);
  failed_ = !attention_->valid();
  tasks_ = static_cast<int64_t>(attention_->attend_tasks());
  return !failed_;
}

void ChainRun::run_task(int64_t task) {
  switch (kind_) {
    case Kind::multiply: return multiply_task(&job_, static_cast<size_t>(task));
    case Kind::attend: return AttentionJob::attend(attention_, static_cast<size_t>(task));
    default: return run_rows(task * task_rows_, smaller(rows_, (task + 1) * task_rows_));
  }
}

// The floats that the steps of a phase on rows read, of one row.
int64_t ChainRun::row_floats() const {
  int64_t floats = 0;
  for (int64_t i = first_; i <= last_ && i < count_; i++) floats += steps_[i].x.width;
  return floats;
}

void ChainRun::run_rows(int64_t first_row, int64_t last_row) const {
  for (int64_t i = first_; i <= last_ && i < count_; i++) run_rows(steps_[i], first_row, last_row);
}

void ChainRun::run_rows(const Step& step, int64_t first_row, int64_t last_row) const {
  const AttentionKernels& vectors = *kernels_.attention;
  if (is_attention(step)) {
    if (step.writes) vectors.write(step.attention, first_row, last_row);
    return;
  }
  for (int64_t row = first_row; row < last_row; row++) {
    const float* x = step.x.row(row);
    float* out = step.out.row(row);
    switch (step.kind) {
      case StepKind::add: vectors.add(x, step.other.row(row), step.vector, step.out.width, out); break;
      case StepKind::norm:
        for (int64_t i = 0; i < step.out.width; i += step.group)
          vectors.normalize(x + i, step.vector, step.group, step.epsilon, out + i);
        break;
      case StepKind::multiply: vectors.multiply(x, step.other.row(row), step.out.width, out); break;
      case StepKind::center: vectors.center(x, step.vector, step.bias, step.out.width, step.epsilon, out); break;
      case StepKind::activate: vectors.activate(step.activation, x, step.out.width, out); break;
      case StepKind::gate: silu_and_multiply(vectors, x, step.out.width, out); break;
      case StepKind::linear:
        if (step.rounds && kernels_.prepares(step.weights)) kernels_.prepare(step.weights, x, job_.rows, row);
        break;
      default: break;
    }
  }
}

}  // namespace carryall
