#include "linear.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "gguf_blocks.h"
#include "integers.h"

namespace carryall {
namespace {

constexpr int64_t kTaskWork = 64 << 10;    // smallest number of products of a task; starting one takes about 1 us
constexpr int64_t kMostTasks = 128;        // of one kind
constexpr int64_t kMostRows = 256;         // of a task: rows and outputs that one task reads and writes stay near
constexpr int64_t kManyTiles = 16;         // of a task: read the rows again less often, if enough tasks remain
constexpr int64_t kEnoughTasks = 32;

}  // namespace

int64_t Rows::bytes(const Weights& weights, int64_t count) {
  if (weights.splits())
    return parts(count, kRowGroup) * kRowGroup * place(weights, count, nullptr).width * 2 * weights.row_parts() + kLine;
  if (weights.floats()) return kLine;
  const Rows sizes = place(weights, count, nullptr);
  const int64_t rows = count + kRowGroup;
  return rows * sizes.step + rows * (2 * sizes.shares + sizes.blocks) * 4 + kLine;
}

Rows Rows::place(const Weights& weights, int64_t count, void* memory) {
  // Tasks begin at any row, so that the last group of 16 may begin just before the end.
  const int64_t rows = count + kRowGroup;
  Rows placed;
  placed.width = weights.width();
  // An odd number of lines: rows a power of 2 apart would share a few sets of the caches, and push each other out.
  placed.step = (parts(placed.width, kLine) | 1) * kLine;
  placed.blocks = weights.blocks();
  placed.share = weights.share() / weights.block;
  placed.shares = parts(placed.blocks, placed.share);
  if (weights.splits()) placed.width = parts(weights.inputs, kSplitStep) * kSplitStep;
  if (memory == nullptr || (weights.floats() && !weights.splits())) return placed;
  const auto start = (reinterpret_cast<uintptr_t>(memory) + kLine - 1) / kLine * kLine;
  placed.values = reinterpret_cast<int8_t*>(start);
  if (weights.splits()) return placed;
  placed.scales = reinterpret_cast<float*>(start + static_cast<uintptr_t>(rows * placed.step));
  placed.sums = reinterpret_cast<int32_t*>(placed.scales + rows * placed.shares);
  placed.starts = placed.sums + rows * placed.blocks;
  // Arithmetic on whatever the memory held may be very slow (denormal numbers).
  memset(placed.scales + count * placed.shares, 0, static_cast<size_t>(kRowGroup * placed.shares) * sizeof(float));
  memset(placed.sums + count * placed.blocks, 0, static_cast<size_t>(kRowGroup * placed.blocks) * sizeof(int32_t));
  return placed;
}

Workspace::Workspace(const Weights& weights, int64_t count)
    : memory_(malloc(static_cast<size_t>(Rows::bytes(weights, count)))) {
  if (memory_ != nullptr) rows_ = Rows::place(weights, count, memory_);
}

Workspace::~Workspace() { free(memory_); }

void Job::plan_quantize() { row_step = larger(parts(count, kMostTasks), parts(kTaskWork, rows.width)); }

void Job::plan_multiply() { plan_multiply(kTaskWork); }

void Job::plan_multiply(int64_t task_work) {
  const int64_t row_bytes = rows.width * (weights->splits() ? 4 : 1);
  const int64_t pieces = larger(parts(count, kMostRows), parts(count * row_bytes, kernels->row_bytes));
  row_step = parts(parts(count, pieces), kRowGroup) * kRowGroup;
  const int64_t tile_work = smaller(row_step, count) * kColumns * rows.width, tiles = weights->tiles();
  const int64_t most = larger(1, kMostTasks / pieces), enough = pieces * tiles / kEnoughTasks;
  tile_step = larger(larger(parts(tiles, most), parts(task_work, tile_work)), smaller(enough, kManyTiles));
  if (count >= kRowGroup || weights->floats()) tile_step = parts(tile_step, 2) * 2;  // AVX-512 computes two at a time
}

void quantize_task(void* job, size_t index) {
  const Job& j = *static_cast<const Job*>(job);
  const int64_t first = static_cast<int64_t>(index) * j.row_step;
  for (int64_t row = first; row < smaller(first + j.row_step, j.count); row++)
    j.kernels->prepare(*j.weights, j.x.row(row), j.rows, row);
}

void multiply_task(void* job, size_t index) {
  const Job& j = *static_cast<const Job*>(job);
  const int64_t steps = parts(j.weights->tiles(), j.tile_step), i = static_cast<int64_t>(index);
  const int64_t row = i / steps * j.row_step, tile = i % steps * j.tile_step;
  const int64_t last_row = smaller(row + j.row_step, j.count), last_tile = smaller(tile + j.tile_step, j.weights->tiles());
  if (!j.kernels->prepares(*j.weights)) return j.kernels->attention->products(*j.weights, j.x, j.bias, row, last_row, tile, last_tile, j.y);
  const auto multiply = j.weights->splits() ? j.kernels->multiply_split : j.kernels->multiply;
  multiply(*j.weights, j.rows, j.bias, row, last_row, tile, last_tile, j.y);
}

void silu_and_multiply(const AttentionKernels& vectors, const float* x, int64_t width, float* y) {
  constexpr int64_t kLanes = 16;  // of the function `gate`
  const Gate silu = {1, 0, INFINITY};
  const int64_t whole = width / kLanes * kLanes, rest = width - whole;
  vectors.gate(silu, x, x + width, whole, y);
  if (rest == 0) return;
  const size_t bytes = sizeof(float) * static_cast<size_t>(rest);
  float last[3][kLanes] = {};
  memcpy(last[0], x + whole, bytes);
  memcpy(last[1], x + width + whole, bytes);
  vectors.gate(silu, last[0], last[1], kLanes, last[2]);
  memcpy(y + whole, last[2], bytes);
}

namespace {

void read_float_row(const Weights& w, int64_t index, float* y) {
  if (w.splits()) {
    const uint8_t* tile = w.data + index / kColumns * w.tile_bytes() + index % kColumns * 4;
    for (int64_t k = 0; k < w.inputs; k++) y[k] = split_weight(tile, k, w.bits);
    return;
  }
  const int64_t bytes = w.bits / 8;
  const uint8_t* value = w.data + index / kColumns * w.tile_bytes() + index % kColumns * bytes;
  for (int64_t k = 0; k < w.inputs; k++, value += bytes * kColumns) {
    if (w.offsets == Offsets::float32) {
      memcpy(y + k, value, sizeof *y);
      continue;
    }
    uint16_t half;
    memcpy(&half, value, sizeof half);
    if (w.offsets == Offsets::float16) {
      y[k] = float_of_float16(half);
    } else {
      const uint32_t bits = static_cast<uint32_t>(half) << 16;
      memcpy(y + k, &bits, sizeof bits);
    }
  }
}

}  // namespace

void read_row(const Weights& w, int64_t index, float* y) {
  if (w.floats()) return read_float_row(w, index, y);
  if (w.halves()) return read_stored_row(w, index, y);
  const int64_t column = index % kColumns;
  const uint8_t* tile = w.data + index / kColumns * w.tile_bytes();
  const uint8_t *points = tile + w.points() + column, *multiples = tile + w.multiples() + column;
  for (int64_t b = 0; b < w.blocks(); b++) {
    const uint8_t* block = tile + b * w.block_bytes();
    const uint8_t* factors = w.group > 0 ? tile + w.group_scales() + b * w.block / w.group * kLine : block + w.value_bytes();
    factors += column * 4;
    float scale, minimum = 0;
    memcpy(&scale, factors, sizeof scale);
    if (w.group > 0) scale *= static_cast<float>(multiples[b * kColumns]);
    if (w.offsets == Offsets::minima) memcpy(&minimum, factors + kLine, sizeof minimum);
    const int zero = w.offsets == Offsets::zero_points ? points[b * kColumns]
                     : w.offsets == Offsets::minima    ? 0
                     : w.bits == 4                     ? 8
                                                       : 128;
    const int64_t start = b * w.block;
    for (int64_t k = 0; k < smaller(w.block, w.inputs - start); k++) {
      const int byte = w.bits == 4 ? block[k / 8 * kLine + column * 4 + k % 4] : block[k / 4 * kLine + column * 4 + k % 4];
      const int value = w.bits == 8 ? byte : k % 8 < 4 ? byte & 15 : byte >> 4;
      const float product = static_cast<float>(value - zero) * scale;
      y[start + k] = w.offsets == Offsets::minima ? product + minimum : product;
    }
  }
}

namespace {
std::atomic<const Kernels*> preferred{nullptr};
}

bool prefer_kernels(const char* isa) {
  const Kernels* kernels = choose_kernels(isa);
  if (kernels != nullptr) preferred = kernels;
  return kernels != nullptr;
}

const Kernels* choose_kernels(const char* isa) {
  if (isa == nullptr) isa = getenv("CARRYALL_KERNELS_ISA");
  if ((isa == nullptr || *isa == 0) && preferred != nullptr) return preferred;
  for (const Kernels* const* each = kAllKernels; *each != nullptr; each++) {
    if (isa != nullptr && *isa != 0 && strcmp(isa, (*each)->name) != 0) continue;
    if ((*each)->supported()) return *each;
  }
  return nullptr;
}

}  // namespace carryall
