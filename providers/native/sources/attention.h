// Attention on a KV cache in blocks, cut into tasks.
//
// The new tokens of all rows (sequences) lie one after another; row r has tokens [begins[r], begins[r + 1]), at the
// positions after its past[r] tokens in the cache. Block table[r][i] holds its positions from i * block on.
//
// Cache layout, version 2, [blocks, kv_heads, block, row_bytes] bytes. 16 positions are a group, of 16 * row_bytes:
//   keys    float32 or bfloat16 [width, 16];  int8: 16 float32 scales, then [width / 4, 16, 4]
//   values  float32 or bfloat16 [16, width];  int8: 16 float32 scales, then [width / 16, 4, 16, 4]
// `width` is the head size, rounded up to a multiple of 16. The last axis of int8 keys are elements, that of values
// positions; a byte is a value plus 128. Keys are transformed before they are rounded, see attention_quads.h.
//
// If both caches are the same memory (`one`), keys of float32 or bfloat16 are stored as values, and are the values too.
//
// Kernels whose `paired` says so hold float32 and bfloat16 otherwise, in tiles of 16 lines of 16 pairs of bfloat16. A
// float is a high tile and a low one behind it, whose sum it is, with an error of 2^-17:
//   keys    of 16 positions: [width / 32] tiles; lines are elements i and i + 16, columns positions. 16 elements behind them are a
//           tile of 8 lines, elements i and i + 8: with rounded queries (AMX)
//   values  of 32 positions: [width / 16] tiles; lines are positions i and i + 16, columns elements
#pragma once
#include <cstddef>
#include <cstdint>

#include "layout.h"
#include "recurrent.h"

namespace carryall {

constexpr int64_t kCacheLayout = 2;
constexpr int64_t kGroupPositions = 16;
constexpr int64_t kPairPositions = 32;       // of a tile of pairs of values
constexpr int64_t kTilePositions = 64;       // scores computed at a time
constexpr int64_t kPartPositions = 256;      // a partial softmax; parts begin at multiples of it
constexpr int64_t kSeparate = 16;             // fewer items than this are cut into parts
constexpr int64_t kItemQueries = 48;         // queries that share the keys and values they read; AMX takes more
constexpr int64_t kLargestHead = 640;
constexpr int64_t kWideHead = 320;           // wider heads have half as many queries, so that these fit into the stack

enum class CacheType : int64_t { float32 = 0, bfloat16 = 1, int8 = 2 };

struct AttentionSizes {
  int64_t heads = 0, kv_heads = 0, size = 0, block = 0;
  int64_t window = 0;          // positions that a token sees, itself included; 0 for all
  int64_t rotary = 0;          // elements of a head that are rotated
  int64_t interleaved = 0;     // whether elements 2 i and 2 i + 1 are rotated together, not i and i + rotary / 2
  CacheType cache = CacheType::float32;
  float scale = 1, softcap = 0;
  int64_t reach = 0;           // the largest distance that has a bias of its own; 0 without biases
  bool one = false;            // whether keys are stored as values, which they are too
  bool rounds_queries = false;  // whether queries are rounded as keys are: to 8 bits, not to 16; to bfloat16, not to two of them

  // Sets both from the attribute cache_type, of which 3 and 4 are an int8 and a bfloat16 cache with rounded queries.
  CARRYALL_INLINE void set_cache(int64_t type) {
    rounds_queries = type == 3 || type == 4;
    cache = type == 3 ? CacheType::int8 : type == 4 ? CacheType::bfloat16 : static_cast<CacheType>(type);
  }
  CARRYALL_INLINE int64_t shared() const { return heads / kv_heads; }  // heads that share keys and values
  CARRYALL_INLINE int64_t width() const { return (size + 15) / 16 * 16; }
  CARRYALL_INLINE int64_t row_bytes() const {
    return cache == CacheType::float32 ? 4 * width() : cache == CacheType::bfloat16 ? 2 * width() : width() + 4;
  }
  CARRYALL_INLINE int64_t group_bytes() const { return kGroupPositions * row_bytes(); }
  CARRYALL_INLINE int64_t block_bytes() const { return kv_heads * block * row_bytes(); }

  const char* complaint() const;  // what is wrong with the sizes, nullptr if nothing is
};

// Groups, steps or positions [first, last).
struct Range {
  int64_t first, last;
};

struct Attention {
  AttentionSizes sizes;
  const float *query = nullptr, *key = nullptr, *value = nullptr;  // of the first token
  int64_t query_step = 0, key_step = 0, value_step = 0, output_step = 0;  // floats from one token to the next
  uint8_t *keys = nullptr, *values = nullptr;                      // caches
  int64_t blocks = 0;                                              // of a cache
  const int32_t *past = nullptr, *begins = nullptr, *table = nullptr;
  int64_t rows = 0, table_width = 0, tokens = 0;
  const float *cosines = nullptr, *sines = nullptr;  // [angles, rotary / 2]
  const int64_t* positions = nullptr;                // [tokens], rows of the angles; not read without rotary
  int64_t angles = 0;
  const float* sinks = nullptr;  // [heads], scores of a position without value; or nullptr
  const float* slopes = nullptr;  // [heads], what a score loses for each position of distance (ALiBi); or nullptr
  const int32_t* ahead = nullptr;  // [tokens], positions behind a token that it sees too; or nullptr
  const float* near = nullptr;     // [heads, 2 * reach + 1], added to the scores by distance of key and query, which counts as at most
                                   // `reach` (relative positions, arXiv:1910.10683); or nullptr
  float* output = nullptr;       // [tokens, heads, size]
  // Keys that queries are multiplied by, and queries that keys are multiplied by, of each distance from -reach on (disentangled
  // attention, arXiv:2006.03654), [heads, near_groups, size, 16]: both products are added to the scores; or nullptr. Then rows have
  // no past tokens, and heads do not share keys.
  const float *near_keys = nullptr, *near_queries = nullptr;
  int64_t near_groups = 0;
  bool whole = false;  // whether every token sees all past positions of its row, and no others

  // Writes what is wrong with lengths, block tables and positions; returns false if something is.
  bool check(char* message, size_t length) const;
  // The positions that any of tokens [oldest, newest] of a row sees. Neither end falls from a token to the next.
  CARRYALL_INLINE Range seen(int64_t row, int64_t oldest, int64_t newest) const {
    if (whole) return {0, past[row]};
    const int64_t from = past[row] + oldest, to = past[row] + newest + 1;
    const int64_t first = sizes.window == 0 || from < sizes.window ? 0 : from - sizes.window + 1;
    return {first, ahead == nullptr ? to : to + ahead[begins[row] + newest]};
  }
  CARRYALL_INLINE uint8_t* group(uint8_t* cache, int64_t row, int64_t head, int64_t position) const {
    const int64_t block = table[row * table_width + position / sizes.block];
    return cache + block * sizes.block_bytes() + head * sizes.block * sizes.row_bytes() +
           position % sizes.block / kGroupPositions * sizes.group_bytes();
  }
};

// Queries [first, first + count) of a row and a KV head; query i is of token i / shared() and head i % shared().
struct AttentionItem {
  int64_t row, head, first, count;
  int64_t first_part, last_part;  // that any of its queries sees
  float* states;                  // of its parts, if they are separate tasks: count * (width + 2) floats each
  const AttentionItem* after;     // of the next task, which the same thread takes most of the time; or nullptr
};

struct AttentionTask {
  int64_t item, first_part, last_part;
};

// What is between the products of an expert: see gate.h.
struct Gate {
  float alpha, beta, limit;
};

// An activation function: gelu by the error function or by tanh (arXiv:1606.08415), x * sigmoid(x), max(0, x), or
// x * sigmoid(1.702 x).
enum class Activation : int64_t { gelu = 0, gelu_tanh = 1, silu = 2, relu = 3, quick_gelu = 4 };

struct AttentionKernels {
  // Writes keys and values of tokens [first, last) into the caches.
  void (*write)(const Attention& attention, int64_t first, int64_t last);
  // Computes parts of an item: its outputs if these are all of its parts, else their states.
  void (*attend)(const Attention& attention, const AttentionItem& item, int64_t first_part, int64_t last_part);
  // Computes outputs from the states of all parts.
  void (*finish)(const Attention& attention, const AttentionItem& item);
  // See gate.h.
  void (*exponentials)(const float* x, int64_t count, float shift, float* y);
  void (*gate)(const Gate& by, const float* g, const float* u, int64_t count, float* y);
  // See rows.h.
  void (*add)(const float* a, const float* b, const float* bias, int64_t count, float* y);
  void (*normalize)(const float* x, const float* weight, int64_t count, float epsilon, float* y);
  void (*multiply)(const float* a, const float* b, int64_t count, float* y);
  void (*center)(const float* x, const float* weight, const float* bias, int64_t count, float epsilon, float* y);
  void (*activate)(Activation kind, const float* x, int64_t count, float* y);
  int64_t (*item_queries)(const AttentionSizes& sizes);  // the most of an item
  bool (*paired)(const AttentionSizes& sizes);           // whether the cache holds pairs
  RecurrentKernels recurrent;
  // Computes columns of tiles [first_tile, last_tile) of y for rows [first_row, last_row) of x; see float_products.h.
  void (*products)(const Weights& weights, Inputs x, const float* bias, int64_t first_row, int64_t last_row,
                   int64_t first_tile, int64_t last_tile, Outputs y);
};

extern const AttentionKernels kPortableAttention, kAvx2Attention, kAvx512Attention, kAvx512Bf16Attention,
    kAmxAttention, kNeonAttention;

// Makes room for `attend` on the stack of the main thread, which must call this before it runs tasks; returns false
// without room. Other threads have their stacks whole.
bool reserve_stack();

// One run. First all `write` tasks, then all `attend` tasks, then all `finish` tasks.
class AttentionJob {
 public:
  // `separate` makes every part a task, if the items are fewer than that.
  AttentionJob(const Attention& attention, const AttentionKernels& kernels, int64_t separate);
  ~AttentionJob();
  AttentionJob(const AttentionJob&) = delete;
  AttentionJob& operator=(const AttentionJob&) = delete;
  bool valid() const { return memory_ != nullptr; }
  size_t write_tasks() const { return static_cast<size_t>((attention_.tokens + write_step_ - 1) / write_step_); }
  size_t attend_tasks() const { return static_cast<size_t>(tasks_count_); }
  size_t finish_tasks() const { return separated_ ? static_cast<size_t>(items_count_) : 0; }
  static void write(void* job, size_t index);
  static void attend(void* job, size_t index);
  static void finish(void* job, size_t index);

 private:
  void place_items(AttentionItem* items, int64_t* parts) const;

  const Attention& attention_;
  const AttentionKernels& kernels_;
  int64_t write_step_ = 1, items_count_ = 0, tasks_count_ = 0;
  bool separated_ = false;
  void* memory_ = nullptr;
  AttentionItem* items_ = nullptr;
  AttentionTask* tasks_ = nullptr;
};

}  // namespace carryall
