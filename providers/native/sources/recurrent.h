// Layers with a recurrent state: linear attention by the gated delta rule, and short convolutions.
//
// The new tokens of all rows (sequences) lie one after another; row r has tokens [begins[r], begins[r + 1]) and the state
// `places[r]`, which is read and written in place. All operations on a token of a row are the same in the same order,
// however its text is cut into runs, whatever rows are beside it and however many threads there are. The chunked form of the
// delta rule, which is faster on matrix units, does not have this property.
//
// Tokens of the delta rule are computed in pairs, counted from the beginning of the text: both read one state, which is written
// once for both. A run that ends between the tokens of a pair leaves the first one beside the state (`HeldToken`).
//
// Layout of states, version 2:
//   delta rule   float32 [places, heads, DeltaRule::state_lines(), 16]: of each head [value_size / 16, key_size, 16] and a held token;
//                with `bfloat16` two elements of the first part in the place of one, rounded after each pair
//   convolution  float32 [places, taps - 1, channels], the oldest input first
#pragma once
#include <cstddef>
#include <cstdint>

namespace carryall {

constexpr int64_t kStateLayout = 2;
constexpr int64_t kKeyVectors = 5;  // of a token and head in DeltaTokens::vectors

// The token of a pair that a head's state does not contain yet; zeros where there is none.
struct HeldToken {
  float *key, *decay;  // [key_size]; [key_size] factors, or one for all
  float* d;            // [value_size]
  float* count;        // 1 or 0
};

// S = exp(decay) S + k d^T with d = beta (v - (exp(decay) S)^T k); output = scale S^T q (arXiv:2412.06464, equation 10).
// Without beta d = v: the recurrence of Mamba2 (arXiv:2405.21060).
struct DeltaRule {
  int64_t heads = 0, key_heads = 0;  // heads of values; heads of queries and keys, each for heads / key_heads of them
  int64_t key_size = 0, value_size = 0;
  bool by_key = false;  // whether each element of a key has its own decay
  bool bfloat16 = false;  // whether states are stored in bfloat16
  float scale = 1.0f;
  const float* query = nullptr;  // [tokens, key_heads * key_size]
  const float* key = nullptr;    // the same
  const float* value = nullptr;  // [tokens, heads * value_size]
  const float* decay = nullptr;  // [tokens, heads], or [tokens, heads * key_size]; logarithms
  const float* beta = nullptr;   // [tokens, heads], or null
  float* states = nullptr;
  const int32_t *begins = nullptr, *places = nullptr;  // [rows + 1], [rows]
  int64_t rows = 0, tokens = 0, states_count = 0;
  float* output = nullptr;  // [tokens, heads * value_size]
  int64_t from = 0, piece = 0;  // of each row, tokens [from, from + piece) are computed

  const char* complaint() const;  // what is wrong with the sizes, null if nothing
  int64_t first(int64_t row) const { return begins[row + 1] - begins[row] < from ? begins[row + 1] : begins[row] + from; }
  int64_t last(int64_t row) const { return begins[row + 1] - first(row) < piece ? begins[row + 1] : first(row) + piece; }
  int64_t slot(int64_t row, int64_t token) const { return row * piece + token - first(row); }  // of a token in DeltaTokens
  int64_t tiles() const { return value_size / 16; }
  int64_t key_lines() const { return (key_size + 15) / 16; }
  int64_t content_lines() const { return bfloat16 ? (tiles() * key_size + 1) / 2 : tiles() * key_size; }
  int64_t state_lines() const { return content_lines() + 2 * key_lines() + tiles() + 1; }
  float* state(int64_t row, int64_t head) const { return states + (places[row] * heads + head) * state_lines() * 16; }
  HeldToken held(int64_t row, int64_t head) const {
    float* key = state(row, head) + content_lines() * 16;
    float *decay = key + key_lines() * 16, *d = decay + key_lines() * 16;
    return {key, decay, d, d + value_size};
  }
};

// What is computed of the tokens of a piece before their states are read; "second" is said of the second token of a pair.
struct DeltaTokens {
  // With `by_key` [slots, heads, 5, key_size]: the key; key and query times all decays since the state; of a second token the decays of
  // both, and the first's key times the second's decays.
  float* vectors;
  float* factors;       // e^decay [slots, heads], without `by_key`
  float* products;      // [slots, heads, 3]: q k; of a second token also k k1 and q k1, with its decays, of the first's key k1
  float* held_keys;     // [rows, heads, key_size], without `by_key`
  float* held_factors;  // [rows, heads]: e^decay of held tokens
  float* held;          // [rows]: whether the state of a row holds a token
};

struct Convolution {
  int64_t channels = 0, taps = 0;
  bool silu = false;
  const float* x = nullptr;        // [tokens, channels]
  const float* weights = nullptr;  // [taps, channels], that of the newest input last
  const float* bias = nullptr;     // [channels], or null
  float* states = nullptr;
  const int32_t *begins = nullptr, *places = nullptr;
  int64_t rows = 0, tokens = 0, states_count = 0;
  float* output = nullptr;  // [tokens, channels]

  const char* complaint() const;
};

struct RecurrentKernels {
  // Prepares tokens [first, last) of a row.
  void (*prepare)(const DeltaRule& rule, int64_t row, int64_t first, int64_t last, const DeltaTokens& tokens);
  // Computes tiles [tile, end) of 16 elements of the values of one head of a row, for its tokens of the piece.
  void (*delta)(const DeltaRule& rule, int64_t row, int64_t head, int64_t tile, int64_t end, const DeltaTokens& tokens);
  // Computes channels [first, last) of a row; `first` is a multiple of 16.
  void (*convolve)(const Convolution& convolution, int64_t row, int64_t first, int64_t last);
};

// The rows of a run: checks that begins and places are in order and that no two rows share a place; null if they are.
const char* complaint_of_rows(const int32_t* begins, const int32_t* places, int64_t rows, int64_t tokens, int64_t states);

struct Kernels;

// One run of the delta rule, in pieces, so that all heads read keys and values of the same tokens while these are in the cache: those of
// a head lie pages apart, and more of them than a piece push each other out. Of each piece first all `prepare` tasks, then all `delta`
// tasks.
class DeltaJob {
 public:
  DeltaJob(const DeltaRule& rule, const Kernels& kernels);
  ~DeltaJob();
  DeltaJob(const DeltaJob&) = delete;
  DeltaJob& operator=(const DeltaJob&) = delete;
  bool valid() const { return memory_ != nullptr; }
  size_t pieces() const;
  void start(size_t piece) { rule_.from = static_cast<int64_t>(piece) * rule_.piece; }
  size_t prepare_tasks() const;
  size_t delta_tasks() const;
  static void prepare(void* job, size_t index);
  static void delta(void* job, size_t index);

 private:
  DeltaRule rule_;
  const RecurrentKernels& kernels_;
  int64_t longest_;  // tokens of a row
  float* memory_;
  DeltaTokens tokens_;
};

// One run of a convolution.
struct ConvolutionJob {
  const Convolution* convolution;
  const RecurrentKernels* kernels;
  size_t tasks() const;
  static void convolve(void* job, size_t index);
};

}  // namespace carryall
