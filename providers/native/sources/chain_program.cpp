#include "chain_program.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace carryall {
namespace {

constexpr int64_t kMostRegisters = 1 << 12, kMostSteps = 1 << 14;

// The floats between registers, so that each begins on a line.
int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

// The floats from one row of a register to the next. Rows a multiple of 4,096 bytes apart share a set of a first-level cache,
// which holds 8 to 12 lines, and products write 16 rows at a time.
int64_t row_step(int64_t width) { return width % 1024 == 0 ? width + 16 : width; }

}  // namespace

Program::Program(const Tensor* inputs, int64_t count, Ranks* group)
    : inputs_(inputs + 1), inputs_count_(count - 1), group_(group) {
  if (inputs[0].type != kInt64 || inputs[0].rank != 1) return;
  at_ = static_cast<const int64_t*>(inputs[0].data);
  end_ = at_ + inputs[0].elements;
}

Program::~Program() { free(memory_); }

const char* Program::read_header() {
  const int64_t version = next(), weights = next(), caches = next();
  if (short_) return "the program is not a vector of int64";
  if (version != kChainVersion || weights != kLayoutVersion || caches != kCacheLayout) {
    snprintf(message_, sizeof message_,
             "the chain has layout version %lld, its weights %lld, caches %lld; these kernels read versions %lld, %lld, %lld",
             static_cast<long long>(version), static_cast<long long>(weights), static_cast<long long>(caches),
             static_cast<long long>(kChainVersion), static_cast<long long>(kLayoutVersion),
             static_cast<long long>(kCacheLayout));
    return message_;
  }
  lead_ = next();
  registers_ = next();
  outputs_ = next();
  count_ = next();
  if (registers_ < 1 || registers_ > kMostRegisters || outputs_ < 1 || outputs_ > registers_ || count_ < 1 ||
      count_ > kMostSteps || end_ - at_ < registers_)
    return "the program has a wrong number of registers, outputs or steps";
  widths_ = at_;
  at_ += registers_;
  for (int64_t i = 0; i < registers_; i++)
    if (widths_[i] == 0 || widths_[i] > 2 * kLargest || widths_[i] < (i < outputs_ ? 1 : -2 * kLargest))
      return "a register of the program has a wrong width";
  const Tensor* lead = input(lead_);
  if (lead == nullptr || lead->type != kFloat || lead->rank < 1 || lead->dimensions[lead->rank - 1] < 1)
    return "the first rows are not an input of floats";
  rows_ = lead->elements / lead->dimensions[lead->rank - 1];
  return rows_ > kMostChainRows ? "there are more than 2^20 rows" : nullptr;
}

int64_t Program::register_bytes() const {
  int64_t floats = 0;
  for (int64_t i = outputs_; i < registers_; i++) floats += widths_[i] > 0 ? padded(row_step(widths_[i]) * rows_) : 0;
  return floats * static_cast<int64_t>(sizeof(float));
}

void Program::place(float* const* outputs, void* memory) {
  const auto values = sizeof(Values) * static_cast<size_t>(registers_);
  const auto steps = sizeof(Step) * static_cast<size_t>(count_);
  memory_ = malloc(values + steps + static_cast<size_t>(registers_));
  if (memory_ == nullptr) return;
  steps_ = static_cast<Step*>(memory_);
  values_ = reinterpret_cast<Values*>(static_cast<char*>(memory_) + steps);
  written_ = reinterpret_cast<bool*>(static_cast<char*>(memory_) + steps + values);
  float* free_floats = static_cast<float*>(memory);
  for (int64_t i = 0; i < registers_; i++) {
    const int64_t width = widths_[i] < 0 ? -widths_[i] : widths_[i];
    const int64_t step = i < outputs_ ? width : row_step(width);
    new (values_ + i) Values{i < outputs_ ? outputs[i] : widths_[i] < 0 ? nullptr : free_floats, width, step};
    if (i >= outputs_ && widths_[i] > 0) free_floats += padded(step * rows_);
    written_[i] = false;
  }
}

const char* Program::read_steps() {
  if (memory_ == nullptr) return "out of memory for a chain";
  for (int64_t i = 0; i < count_; i++) {
    const char* wrong = read_step(new (steps_ + i) Step);
    if (short_) return "the program ends within a step";
    if (wrong != nullptr) return wrong;
  }
  for (int64_t i = 0; i < outputs_; i++)
    if (!written_[i]) return "no step of the program writes an output";
  return at_ == end_ ? nullptr : "the program goes on behind its last step";
}

int64_t Program::next() {
  if (at_ < end_) return *at_++;
  short_ = true;
  return kAbsent;
}

float Program::next_float() {
  const auto bits = static_cast<uint32_t>(next());
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

const Tensor* Program::input(int64_t value) const {
  const bool given = value >= 0 && value < inputs_count_ && inputs_[value].data != nullptr;
  return given ? inputs_ + value : nullptr;
}

// An input of `length` floats, nullptr if it is none.
const Tensor* Program::floats(int64_t value, int64_t length) const {
  const Tensor* found = input(value);
  return found != nullptr && found->type == kFloat && found->elements == length ? found : nullptr;
}

bool Program::rows_of(int64_t value, Values* found) const {
  if (value < 0) {
    const int64_t index = -1 - value;
    if (value == kAbsent || index >= registers_ || !written_[index]) return false;
    *found = values_[index];
    return true;
  }
  const Tensor* tensor = input(value);
  if (tensor == nullptr || tensor->type != kFloat || tensor->rank < 1) return false;
  const int64_t width = tensor->dimensions[tensor->rank - 1];
  *found = {static_cast<float*>(tensor->data), width, width};
  return width > 0 && tensor->elements == width * rows_;
}

// Sets an optional vector as long as the result.
bool Program::read_bias(int64_t value, Step* step) const {
  if (value == kAbsent) return true;
  const Tensor* vector = floats(value, step->out.width);
  if (vector != nullptr) step->vector = static_cast<const float*>(vector->data);
  return vector != nullptr;
}

const char* Program::read_step(Step* step) {
  const int64_t kind = next(), out = next(), x = next(), index = -1 - out;
  if (kind < 0 || kind > static_cast<int64_t>(StepKind::join)) return "the program has an unknown step";
  step->kind = static_cast<StepKind>(kind);
  if (out >= 0 || out == kAbsent || index >= registers_) return "a step of the program has no register for its result";
  if (!rows_of(x, &step->x)) return "a step of the program reads no rows";
  step->out = values_[index];
  if ((widths_[index] < 0) != (step->kind == StepKind::part)) return "a step of the program writes a wrong kind of register";
  const char* wrong = step->kind == StepKind::linear      ? read_linear(step, x)
                      : step->kind == StepKind::attention ? read_attention(step, x, kNear)
                      : step->kind == StepKind::near_attention ? read_attention(step, x, kAttentionInputs)
                                                          : read_simple(step, out, x);
  written_[index] = true;
  if (out == rounded_) rounded_ = kAbsent;
  return wrong;
}

const char* Program::read_simple(Step* step, int64_t out, int64_t x) {
  const int64_t width = step->out.width;
  switch (step->kind) {
    case StepKind::add: {
      const int64_t other = next(), bias = next();
      if (step->x.width != width || !rows_of(other, &step->other) || step->other.width != width)
        return "the summands of a sum have other widths";
      return read_bias(bias, step) ? nullptr : "the bias of a sum has a wrong length";
    }
    case StepKind::norm: {
      const Tensor* weight = input(next());
      step->epsilon = next_float();
      if (weight == nullptr || weight->type != kFloat || weight->elements < 1 || width % weight->elements != 0)
        return "the weight of a norm has a wrong length";
      step->vector = static_cast<const float*>(weight->data);
      step->group = weight->elements;
      return step->x.width == width ? nullptr : "a norm has rows of another width";
    }
    case StepKind::multiply:
      return step->x.width == width && rows_of(next(), &step->other) && step->other.width == width
                 ? nullptr
                 : "the factors of a product of rows have other widths";
    case StepKind::center: {
      const Tensor* weight = floats(next(), width);
      const int64_t bias = next();
      const Tensor* added = bias == kAbsent ? weight : floats(bias, width);
      step->epsilon = next_float();
      if (weight == nullptr || added == nullptr || step->x.width != width) return "a norm has rows, weight or bias of another width";
      step->vector = static_cast<const float*>(weight->data);
      if (bias != kAbsent) step->bias = static_cast<const float*>(added->data);
      return nullptr;
    }
    case StepKind::activate: {
      const int64_t function = next();
      if (function < 0 || function > static_cast<int64_t>(Activation::quick_gelu)) return "the program has an unknown activation function";
      step->activation = static_cast<Activation>(function);
      return step->x.width == width ? nullptr : "an activation function has rows of another width";
    }
    case StepKind::gate:
      return step->x.width == 2 * width && out != x ? nullptr : "a gate has rows of another width";
    case StepKind::sum:
    case StepKind::join: return read_meeting(step);
    default: {
      const int64_t first = next();
      if (first < 0 || first > step->x.width - width || out == x) return "a part is not within its rows";
      step->out = {step->x.data + first, width, step->x.step};
      values_[-1 - out] = step->out;
      return nullptr;
    }
  }
}

const char* Program::read_linear(Step* step, int64_t x) {
  const Tensor* tiles = input(next());
  const int64_t bias = next();
  Weights& w = step->weights;
  w.inputs = next();
  w.outputs = next();
  w.bits = next();
  w.block = next();
  w.group = next();
  w.offsets = static_cast<Offsets>(next());
  if (short_) return nullptr;
  if (const char* wrong = w.complaint()) return wrong;
  if (tiles == nullptr || tiles->type != kUint8 || tiles->elements != w.bytes())
    return "the weights of a product have a wrong number of bytes";
  if (step->x.width != w.inputs || step->out.width != w.outputs) return "a product has rows of another width";
  w.data = static_cast<const uint8_t*>(tiles->data);
  if (!read_bias(bias, step)) return "the bias of a product does not have one value for each output";
  const bool alike = rounding_ != nullptr && rounding_->block == w.block && rounding_->share() == w.share() && rounding_->splits() == w.splits() &&
                     (!w.splits() || rounding_->row_parts() == w.row_parts());
  step->rounds = x != rounded_ || !alike;
  rounded_ = x;
  rounding_ = &w;
  return nullptr;
}

const char* Program::read_meeting(Step* step) {
  step->number = static_cast<uint64_t>(next());
  step->meeting = group_;
  if (group_ == nullptr) return "the program needs other ranks, which the chain does not name";
  return step->kind == StepKind::sum ? (step->x.width == step->out.width ? nullptr : "ranks add rows of another width")
                                     : (step->x.width <= step->out.width ? nullptr : "ranks join rows that are wider than the whole");
}

const char* Program::read_attention(Step* step, int64_t query, size_t inputs) {
  step->kind = StepKind::attention;
  int64_t values[kAttentionInputs] = {query};
  for (size_t i = kKey; i < kAttentionInputs; i++) values[i] = i < inputs ? next() : kAbsent;
  Attention& a = step->attention;
  AttentionSizes& s = a.sizes;
  s.heads = next();
  s.kv_heads = next();
  s.size = next();
  s.block = next();
  s.window = next();
  s.rotary = next();
  s.interleaved = next();
  s.set_cache(next());
  s.scale = next_float();
  s.softcap = next_float();
  step->writes = next() == 0;
  if (short_) return nullptr;
  if (const char* wrong = s.complaint()) return wrong;
  if (const char* wrong = read_tokens(step, values)) return wrong;
  Tensor found[kAttentionInputs];
  for (size_t i = kKeys; i < kAttentionInputs; i++) {
    const Tensor* tensor = input(values[i]);
    if (tensor == nullptr) continue;
    if (tensor->type != attention_type(i)) return "an input of attention has a wrong type";
    found[i] = *tensor;
  }
  if (const char* wrong = read_cache(found, &a)) return wrong;
  if (const char* wrong = read_optional(found, &a)) return wrong;
  return check_tables(a);
}

// Sets query, key, value and tokens, and the place of the result.
const char* Program::read_tokens(Step* step, const int64_t* values) const {
  Attention& a = step->attention;
  const int64_t query = a.sizes.heads * a.sizes.size, kv = a.sizes.kv_heads * a.sizes.size;
  const bool none = values[kKey] == kAbsent && values[kValue] == kAbsent, packed = none && step->writes;
  if (step->x.width != (packed ? query + 2 * kv : query) || step->out.width != query || step->out.data == step->x.data)
    return "attention has rows of another width";
  a.tokens = rows_;
  a.query = step->x.data;
  a.query_step = a.key_step = a.value_step = step->x.step;
  a.output_step = step->out.step;
  a.output = step->out.data;
  if (packed) {
    a.key = a.query + query;
    a.value = a.key + kv;
  }
  if (none) return nullptr;
  Values key, value;
  if (!step->writes || !rows_of(values[kKey], &key) || !rows_of(values[kValue], &value) || key.width != kv ||
      value.width != kv)
    return "key or value does not have all KV heads of each token";
  a.key = key.data;
  a.value = value.data;
  a.key_step = key.step;
  a.value_step = value.step;
  return nullptr;
}

// Checks lengths, block tables and positions, unless those of the attention before were the same.
const char* Program::check_tables(const Attention& a) {
  const Attention* before = checked_;
  checked_ = &a;
  const bool same = before != nullptr && before->past == a.past && before->begins == a.begins && before->table == a.table &&
                    before->rows == a.rows && before->table_width == a.table_width && before->blocks == a.blocks &&
                    before->sizes.block == a.sizes.block && (before->sizes.rotary > 0) == (a.sizes.rotary > 0) &&
                    before->positions == a.positions && before->angles == a.angles && before->ahead == a.ahead &&
                    before->slopes == a.slopes && (before->near_keys == nullptr) == (a.near_keys == nullptr);
  return same || a.check(message_, sizeof message_) ? nullptr : message_;
}

}  // namespace carryall
