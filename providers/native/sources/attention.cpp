#include "attention.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "integers.h"
#endif

namespace carryall {
namespace {

constexpr int64_t kWriteWork = 16 << 10;  // smallest number of floats of a `write` task
constexpr int64_t kMostPositions = int64_t{1} << 30;

bool wrong(char* message, size_t length, const char* what, int64_t row, int64_t found, int64_t limit) {
  snprintf(message, length, what, static_cast<long long>(row), static_cast<long long>(found),
           static_cast<long long>(limit));
  return false;
}

#if defined(__linux__)
constexpr size_t kStackBytes = 1 << 20;  // `attend` takes up to 750 kB

[[gnu::noinline]] void touch_stack() {
  volatile char pages[kStackBytes];
  for (size_t i = kStackBytes; i > 4096; i -= 4096) pages[i - 1] = 0;  // downwards, as a stack grows
}
#endif

}  // namespace

#if defined(__linux__)
// The stack of the main thread grows when it is used. Where the limit of addresses forbids that (ulimit -v), the kernel
// ends the process; so it grows here, after a look for room. Returns false without room.
bool reserve_stack() {
  static std::atomic<bool> reserved{false};  // not thread_local: its memory, taken at the first use, may be missing too
  if (reserved || syscall(SYS_gettid) != getpid()) return true;
  void* room = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return false;
  munmap(room, kStackBytes);
  touch_stack();
  return reserved = true;
}
#else
bool reserve_stack() { return true; }
#endif

const char* AttentionSizes::complaint() const {
  if (heads < 1 || heads > 4096 || kv_heads < 1 || heads % kv_heads != 0)
    return "num_heads is not a multiple of kv_num_heads, or not in [1, 4096]";
  if (size < 1 || size > kLargestHead) return "head_size is not in [1, 640]";
  if (block < 16 || block > 4096 || block % 16 != 0) return "block_size is not a multiple of 16 in [16, 4096]";
  if (window < 0 || window > kMostPositions) return "window is not in [0, 2^30]";
  if (rotary < 0 || rotary > size || rotary % 2 != 0) return "rotary_dim is not an even number up to head_size";
  if (interleaved != 0 && interleaved != 1) return "interleaved is not 0 or 1";
  const int64_t kind = static_cast<int64_t>(cache);
  if (kind < 0 || kind > 2) return "cache_type is not 0 to 4";
  if (one && cache == CacheType::int8) return "one cache for keys and values holds no int8";
  if (!std::isfinite(scale)) return "scale is not finite";
  if (!(softcap >= 0) || !std::isfinite(softcap)) return "softcap is negative or not finite";
  return nullptr;
}

bool Attention::check(char* message, size_t length) const {
  const std::unique_ptr<uint8_t, void (*)(void*)> written(
      static_cast<uint8_t*>(calloc(static_cast<size_t>(blocks / 8 + 1), 1)), free);  // a bit for each block
  if (written == nullptr) return wrong(message, length, "out of memory for block tables", 0, 0, 0);
  if (rows < 1 ? tokens != 0 : begins[0] != 0 || begins[rows] != tokens)
    return wrong(message, length, "the rows do not begin at 0 and end at the number of tokens: %lld rows, %lld tokens",
                 rows, tokens, 0);
  for (int64_t r = 0; r < rows; r++) {
    if (begins[r + 1] < begins[r] || begins[r + 1] > tokens)
      return wrong(message, length, "row %lld ends at token %lld, not in order or beyond %lld", r, begins[r + 1], tokens);
    if (past[r] < 0 || past[r] > kMostPositions)
      return wrong(message, length, "row %lld has %lld past tokens, not in [0, %lld]", r, past[r], kMostPositions);
    if (near_keys != nullptr && past[r] != 0)
      return wrong(message, length, "row %lld has %lld past tokens; keys by distance are those of new tokens only", r, past[r], 0);
    if (begins[r + 1] == begins[r]) continue;
    if (whole && past[r] == 0)
      return wrong(message, length, "row %lld has tokens and none of the encoder's rows", r, 0, 0);
    const int64_t used = parts(past[r] + (whole ? 0 : begins[r + 1] - begins[r]), sizes.block);
    if (used > table_width)
      return wrong(message, length, "row %lld needs %lld blocks; its table has %lld", r, used, table_width);
    for (int64_t i = 0; i < used; i++) {
      const int64_t id = table[r * table_width + i];
      if (id < 0 || id >= blocks)
        return wrong(message, length, "row %lld has block %lld; the cache has %lld blocks", r, id, blocks);
      if (whole || i < past[r] / sizes.block) continue;
      uint8_t* marks = written.get() + id / 8;
      if (*marks >> id % 8 & 1)
        return wrong(message, length, "row %lld writes block %lld, which is written already", r, id, 0);
      *marks = static_cast<uint8_t>(*marks | 1 << id % 8);
    }
  }
  if (ahead != nullptr && slopes != nullptr) return wrong(message, length, "ahead and slopes exclude each other", 0, 0, 0);
  for (int64_t r = 0; ahead != nullptr && r < rows; r++)
    for (int64_t t = begins[r], last = 0; t < begins[r + 1]; t++) {
      const int64_t end = t + ahead[t] + 1;
      if (end <= t || end < last || end > begins[r + 1])
        return wrong(message, length, "token %lld sees up to token %lld: beyond its row, or not as far as one before", t, end, 0);
      last = end;
    }
  for (int64_t t = 0; sizes.rotary > 0 && t < tokens; t++)
    if (positions[t] < 0 || positions[t] >= angles)
      return wrong(message, length, "token %lld has position %lld; the rotary tables have %lld", t, positions[t], angles);
  return true;
}

AttentionJob::AttentionJob(const Attention& attention, const AttentionKernels& kernels, int64_t separate)
    : attention_(attention), kernels_(kernels) {
  const AttentionSizes& sizes = attention.sizes;
  if (!reserve_stack()) return;
  write_step_ = larger(1, kWriteWork / (sizes.kv_heads * sizes.size));
  for (int64_t r = 0; r < attention.rows; r++)
    items_count_ += sizes.kv_heads *
                    parts((attention.begins[r + 1] - attention.begins[r]) * sizes.shared(), kernels.item_queries(sizes));
  auto* items = static_cast<AttentionItem*>(malloc(sizeof(AttentionItem) * static_cast<size_t>(items_count_ + 1)));
  if (items == nullptr) return;
  int64_t all = 0, floats = 0;
  place_items(items, &all);
  separated_ = items_count_ < separate && all > items_count_;
  tasks_count_ = separated_ ? all : items_count_;
  if (separated_)
    for (int64_t i = 0; i < items_count_; i++)
      floats += items[i].count * (sizes.width() + 2) * (items[i].last_part - items[i].first_part);
  const size_t task_bytes = sizeof(AttentionTask) * static_cast<size_t>(tasks_count_ + 1);
  memory_ = malloc(task_bytes + sizeof(float) * static_cast<size_t>(floats));
  items_ = items;
  tasks_ = static_cast<AttentionTask*>(memory_);
  if (memory_ == nullptr) return;
  float* states = reinterpret_cast<float*>(static_cast<char*>(memory_) + task_bytes);
  int64_t task = 0;
  for (int64_t i = items_count_ - 1; i >= 0; i--) {  // the last queries of a row see most positions
    AttentionItem& item = items[i];
    item.after = i > 0 ? items + i - 1 : nullptr;
    if (!separated_) {
      tasks_[task++] = {i, item.first_part, item.last_part};
      continue;
    }
    item.states = states;
    states += item.count * (sizes.width() + 2) * (item.last_part - item.first_part);
    for (int64_t part = item.first_part; part < item.last_part; part++) tasks_[task++] = {i, part, part + 1};
  }
}

AttentionJob::~AttentionJob() {
  free(memory_);
  free(items_);
}

void AttentionJob::place_items(AttentionItem* items, int64_t* all) const {
  const AttentionSizes& sizes = attention_.sizes;
  const int64_t most = kernels_.item_queries(sizes);
  AttentionItem* next = items;
  for (int64_t r = 0; r < attention_.rows; r++) {
    const int64_t queries = (attention_.begins[r + 1] - attention_.begins[r]) * sizes.shared();
    for (int64_t head = 0; head < sizes.kv_heads; head++)  // whose keys and values then stay in the second-level cache
      for (int64_t first = 0; first < queries; first += most) {
        const int64_t count = smaller(most, queries - first);
        const Range seen = attention_.seen(r, first / sizes.shared(), (first + count - 1) / sizes.shared());
        const int64_t last = (seen.last - 1) / kPartPositions + 1;
        *next = {r, head, first, count, seen.first / kPartPositions, last, nullptr, nullptr};
        *all += next->last_part - next->first_part;
        next++;
      }
  }
}

void AttentionJob::write(void* job, size_t index) {
  const AttentionJob& j = *static_cast<const AttentionJob*>(job);
  const int64_t first = static_cast<int64_t>(index) * j.write_step_;
  j.kernels_.write(j.attention_, first, smaller(first + j.write_step_, j.attention_.tokens));
}

void AttentionJob::attend(void* job, size_t index) {
  const AttentionJob& j = *static_cast<const AttentionJob*>(job);
  const AttentionTask& task = j.tasks_[index];
  j.kernels_.attend(j.attention_, j.items_[task.item], task.first_part, task.last_part);
}

void AttentionJob::finish(void* job, size_t index) {
  const AttentionJob& j = *static_cast<const AttentionJob*>(job);
  j.kernels_.finish(j.attention_, j.items_[index]);
}

}  // namespace carryall
