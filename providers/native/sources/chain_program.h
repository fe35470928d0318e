// The program of a chain: its steps as numbers, and what they read.
//
// All values are rows, as many as input `lead` has. The program is
//   version, layout of weights, layout of KV caches, lead, number of registers, of outputs, of steps,
//   the width of each register, then the steps.
// The first registers are the outputs. A register of negative width has no memory: it is a part of another value.
// A value is the number of an input behind the program, or -1 - register, or kAbsent. A step is its kind and
//   add        out, x, other, bias
//   norm       out, x, weight, epsilon (bits of the float); the weight is as long as what is normalized together
//   gate       out, x: SiluAndMul
//   multiply   out, x, other
//   center     out, x, weight, bias, epsilon (bits of the float): LayerNormalization
//   activate   out, x, function (see attention.h)
//   part       out, x, first column
//   linear     out, x, weights, bias, inputs, outputs, bits, block_size, group_size, offsets (see layout.h)
//   attention  out, the 14 inputs of PagedAttention, num_heads, kv_num_heads, head_size, block_size, window, rotary_dim,
//              interleaved, cache_type, scale and softcap (bits of floats), reads_only
//   near_attention  the same with 17 inputs, the last of which are near, near_keys and near_queries
//   sum, join  out, x, number: AllReduce and AllGather (see ranks_operator.cpp)
#pragma once
#include "attention_inputs.h"
#include "chain.h"

namespace carryall {

constexpr int64_t kChainVersion = 5, kAbsent = INT64_MIN;

// Functions return what is wrong, nullptr if nothing is. They are called in the order read_header, place, read_steps.
class Program {
 public:
  // The program, and what the steps read; `group` are the ranks of this process, nullptr if it is alone.
  Program(const Tensor* inputs, int64_t count, Ranks* group);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const char* read_header();
  void place(float* const* outputs, void* memory);  // of register_bytes()
  const char* read_steps();

  const Tensor& lead() const { return inputs_[lead_]; }
  int64_t rows() const { return rows_; }
  int64_t outputs() const { return outputs_; }
  int64_t width(int64_t output) const { return widths_[output]; }
  int64_t register_bytes() const;
  const Step* steps() const { return steps_; }
  int64_t count() const { return count_; }

 private:
  int64_t next();
  float next_float();
  const Tensor* input(int64_t value) const;
  const Tensor* floats(int64_t value, int64_t length) const;
  bool rows_of(int64_t value, Values* found) const;
  bool read_bias(int64_t value, Step* step) const;
  const char* read_step(Step* step);
  const char* read_simple(Step* step, int64_t out, int64_t x);
  const char* read_linear(Step* step, int64_t x);
  const char* read_meeting(Step* step);
  const char* read_attention(Step* step, int64_t query, size_t inputs);
  const char* read_tokens(Step* step, const int64_t* values) const;
  const char* check_tables(const Attention& a);

  const Tensor* inputs_;  // behind the program
  const int64_t inputs_count_;
  Ranks* const group_;
  const int64_t *at_ = nullptr, *end_ = nullptr, *widths_ = nullptr;
  bool short_ = false;
  int64_t lead_ = 0, registers_ = 0, outputs_ = 0, count_ = 0, rows_ = 0;
  Values* values_ = nullptr;  // of the registers
  bool* written_ = nullptr;   // the registers that earlier steps have written
  Step* steps_ = nullptr;
  void* memory_ = nullptr;    // of the three
  const Weights* rounding_ = nullptr;  // of the last product that rounds
  int64_t rounded_ = kAbsent;          // the value that it rounds; kAbsent once that is overwritten
  const Attention* checked_ = nullptr;
  char message_[160] = {};
};

}  // namespace carryall
