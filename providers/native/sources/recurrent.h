// Layers with a recurrent state: linear attention by the gated delta rule, and short convolutions.
//
// The new tokens of all rows (sequences) lie one after another; row r has tokens [begins[r], begins[r + 1]) and the state
// `places[r]`, which is read and written in place. All operations on a token of a row are the same in the same order,
// however its text is cut into runs, whatever rows are beside it and however many threads there are. The chunked form of the
// delta rule, which is faster on matrix units, does not have this property.
//
// Layout of states, version 1:
//   delta rule   float32 [places, heads, value_size / 16, key_size, 16]
//   convolution  float32 [places, taps - 1, channels], the oldest input first
#pragma once
#include <cstddef>
#include <cstdint>

namespace carryall {

constexpr int64_t kStateLayout = 1;

// S = exp(decay) S + k d^T with d = beta (v - (exp(decay) S)^T k); output = scale S^T q (arXiv:2412.06464, equation 10).
// Without beta d = v: the recurrence of Mamba2 (arXiv:2405.21060).
struct DeltaRule {
  int64_t heads = 0, key_heads = 0;  // heads of values; heads of queries and keys, each for heads / key_heads of them
  int64_t key_size = 0, value_size = 0;
  bool by_key = false;  // whether each element of a key has its own decay
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

  const char* complaint() const;  // what is wrong with the sizes, null if nothing
  int64_t tiles() const { return value_size / 16; }
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
  // Computes factors e^decay and the products q k of tokens [first, last): [tokens, heads] each, or [tokens, heads *
  // key_size] factors.
  void (*prepare)(const DeltaRule& rule, int64_t first, int64_t last, float* factors, float* products);
  // Computes tiles [tile, end) of 16 elements of the values of one head of a row, for all of its tokens.
  void (*delta)(const DeltaRule& rule, int64_t row, int64_t head, int64_t tile, int64_t end, const float* factors,
                const float* products);
  // Computes channels [first, last) of a row; `first` is a multiple of 16.
  void (*convolve)(const Convolution& convolution, int64_t row, int64_t first, int64_t last);
};

// The rows of a run: checks that begins and places are in order and that no two rows share a place; null if they are.
const char* complaint_of_rows(const int32_t* begins, const int32_t* places, int64_t rows, int64_t tokens, int64_t states);

struct Kernels;

// One run of the delta rule. First all `prepare` tasks, then all `delta` tasks.
class DeltaJob {
 public:
  DeltaJob(const DeltaRule& rule, const Kernels& kernels);
  ~DeltaJob();
  DeltaJob(const DeltaJob&) = delete;
  DeltaJob& operator=(const DeltaJob&) = delete;
  bool valid() const { return factors_ != nullptr; }
  size_t prepare_tasks() const;
  size_t delta_tasks() const;
  static void prepare(void* job, size_t index);
  static void delta(void* job, size_t index);

 private:
  const DeltaRule& rule_;
  const RecurrentKernels& kernels_;
  float *factors_, *products_;
};

// One run of a convolution.
struct ConvolutionJob {
  const Convolution* convolution;
  const RecurrentKernels* kernels;
  size_t tasks() const;
  static void convolve(void* job, size_t index);
};

}  // namespace carryall
