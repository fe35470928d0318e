// The configuration of AMX's tile registers. Registers 0 to 3 hold results, 4 and 5 rows of the first operand, 6 and 7
// those of the second.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace carryall {
namespace {

constexpr int64_t kRegisterRows = 16;  // of a tile register

struct Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Keeps stores in front of tile loads, of which GCC 12 does not know that they read memory.
inline void written(const void* data) { __asm__ volatile("" : : "r"(data) : "memory"); }

// Rows of the first operand, and so of the results, and bytes of such a row: 4 for each row of the second operand.
inline void configure(int64_t rows, int64_t bytes) {
  Configuration wanted;
  for (int i = 0; i < 8; i++) {
    wanted.column_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? bytes : 64);
    wanted.rows[i] = static_cast<uint8_t>(i >= 6 ? bytes / 4 : rows);
  }
  written(&wanted);
  _tile_loadconfig(&wanted);
}

}  // namespace
}  // namespace carryall
