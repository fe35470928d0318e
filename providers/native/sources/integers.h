// Arithmetic of sizes. In an anonymous namespace, because every source is compiled with its own flags.
#pragma once
#include <cstdint>

namespace carryall {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
inline int64_t parts(int64_t all, int64_t step) { return (all + step - 1) / step; }

}  // namespace
}  // namespace carryall
