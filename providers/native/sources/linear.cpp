#include "linear.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace carryall {
namespace {

constexpr int64_t kRowBytes = 384 << 10;   // quantized rows of a task, which stay in the second-level cache
constexpr int64_t kTaskWork = 64 << 10;    // smallest number of products of a task; starting one takes about 1 us
constexpr int64_t kMostTasks = 128;        // of one kind
constexpr int64_t kMostRows = 256;         // of a task: rows and outputs that one task reads and writes stay near
constexpr int64_t kManyTiles = 16;         // of a task: read the rows again less often, if enough tasks remain
constexpr int64_t kEnoughTasks = 32;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
int64_t parts(int64_t all, int64_t step) { return (all + step - 1) / step; }

}  // namespace

Workspace::Workspace(const Weights& weights, int64_t count) {
  // Tasks begin at any row, so that the last group of 16 may begin just before the end.
  const int64_t rows = count + kRowGroup;
  const int64_t values = parts(rows * weights.width(), kLine) * kLine, blocks = weights.blocks();
  const int64_t shared = weights.group > 0 ? weights.group : weights.bits == 4 ? kSharedScale : 1;
  const int64_t share = larger(1, shared / weights.block), shares = parts(blocks, share);
  memory_ = malloc(static_cast<size_t>(values + rows * (2 * shares + blocks) * 4 + kLine));
  const auto start = (reinterpret_cast<uintptr_t>(memory_) + kLine - 1) / kLine * kLine;
  rows_.values = reinterpret_cast<int8_t*>(start);
  rows_.scales = reinterpret_cast<float*>(start + static_cast<uintptr_t>(values));
  rows_.sums = reinterpret_cast<int32_t*>(start + static_cast<uintptr_t>(values + rows * shares * 4));
  rows_.starts = rows_.sums + rows * blocks;
  rows_.width = weights.width();
  rows_.blocks = blocks;
  rows_.shares = shares;
  rows_.share = share;
  if (memory_ == nullptr) return;
  // Arithmetic on whatever the memory held may be very slow (denormal numbers).
  memset(rows_.scales + count * shares, 0, static_cast<size_t>(kRowGroup * shares) * sizeof(float));
  memset(rows_.sums + count * blocks, 0, static_cast<size_t>(kRowGroup * blocks) * sizeof(int32_t));
}

Workspace::~Workspace() { free(memory_); }

void Job::plan_quantize() { row_step = larger(parts(count, kMostTasks), parts(kTaskWork, rows.width)); }

void Job::plan_multiply() {
  const int64_t pieces = larger(parts(count, kMostRows), parts(count * rows.width, kRowBytes));
  row_step = parts(parts(count, pieces), kRowGroup) * kRowGroup;
  const int64_t tile_work = smaller(row_step, count) * kColumns * rows.width, tiles = weights->tiles();
  const int64_t most = larger(1, kMostTasks / pieces), enough = pieces * tiles / kEnoughTasks;
  tile_step = larger(larger(parts(tiles, most), parts(kTaskWork, tile_work)), smaller(enough, kManyTiles));
  if (count >= kRowGroup) tile_step = parts(tile_step, 2) * 2;  // AMX computes two at a time
}

void quantize_task(void* job, size_t index) {
  const Job& j = *static_cast<const Job*>(job);
  const int64_t first = static_cast<int64_t>(index) * j.row_step;
  for (int64_t row = first; row < smaller(first + j.row_step, j.count); row++)
    j.kernels->quantize(j.x + row * j.weights->inputs, j.weights->inputs, j.weights->block, j.rows, row);
}

void multiply_task(void* job, size_t index) {
  const Job& j = *static_cast<const Job*>(job);
  const int64_t steps = parts(j.weights->tiles(), j.tile_step), i = static_cast<int64_t>(index);
  const int64_t row = i / steps * j.row_step, tile = i % steps * j.tile_step;
  j.kernels->multiply(*j.weights, j.rows, j.bias, row, smaller(row + j.row_step, j.count), tile,
                      smaller(tile + j.tile_step, j.weights->tiles()), j.y);
}

void read_row(const Weights& w, int64_t index, float* y) {
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
