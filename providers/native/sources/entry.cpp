// Functions for Python: facts of the library, and the operators without onnxruntime, which the tests call.
#include <cstdio>
#include <cstring>

#include "gguf_blocks.h"
#include "linear.h"
#include "recurrent.h"
#include "ort_api.h"

using namespace carryall;

namespace {

int complain(const char* what, char* message, int64_t size) {
  snprintf(message, static_cast<size_t>(size), "%s", what);
  return 1;
}

}  // namespace

extern "C" {

CARRYALL_EXPORT int64_t carryall_layout_version() { return kLayoutVersion; }

// The instruction set that is used now; empty if CARRYALL_KERNELS_ISA names none of this processor.
CARRYALL_EXPORT const char* carryall_isa() {
  const Kernels* kernels = choose_kernels(nullptr);
  return kernels == nullptr ? "" : kernels->name;
}

// Uses an instruction set from now on, unless CARRYALL_KERNELS_ISA names one; returns 1 if this processor lacks it.
CARRYALL_EXPORT int carryall_prefer_isa(const char* isa) { return prefer_kernels(isa) ? 0 : 1; }

// The name of instruction set `index` that this processor supports, the fastest first; empty after the last one.
CARRYALL_EXPORT const char* carryall_supported_isa(int64_t index) {
  for (const Kernels* const* each = kAllKernels; *each != nullptr; each++)
    if ((*each)->supported() && index-- == 0) return (*each)->name;
  return "";
}

// Whether the instruction set holds keys and values of heads of `size` in pairs, see attention.h; 0 if there is none.
CARRYALL_EXPORT int carryall_stores_pairs(const char* isa, int64_t size, int64_t block, int64_t cache_type) {
  AttentionSizes sizes;
  sizes.size = size;
  sizes.block = block;
  sizes.cache = static_cast<CacheType>(cache_type);
  const Kernels* kernels = choose_kernels(isa);
  return kernels != nullptr && kernels->attention->paired(sizes);
}

// Whether the instruction set multiplies split weights as bfloat16, see split_products.h; 0 if there is none.
CARRYALL_EXPORT int carryall_splits_floats(const char* isa) {
  const Kernels* kernels = choose_kernels(isa);
  return kernels != nullptr && kernels->split != nullptr;
}

// Computes y [count, outputs] from x [count, inputs] in tasks of row_step rows and tile_step tiles; returns 0, or 1
// and a message.
CARRYALL_EXPORT int carryall_linear(const char* isa, const float* x, int64_t count, const uint8_t* data, int64_t bytes,
                                    const float* bias, int64_t inputs, int64_t outputs, int64_t bits, int64_t block,
                                    int64_t offsets, int64_t group, int64_t row_step, int64_t tile_step, float* y,
                                    char* message, int64_t size) {
  const Weights weights{data, inputs, outputs, bits, block, static_cast<Offsets>(offsets), group};
  if (const char* wrong = weights.complaint()) return complain(wrong, message, size);
  if (bytes != weights.bytes()) return complain("the weights have a wrong number of bytes", message, size);
  const Kernels* kernels = choose_kernels(isa);
  if (kernels == nullptr) return complain("there is no such instruction set", message, size);
  if (count < 1 || row_step < 1 || tile_step < 1) return complain("a size is not positive", message, size);
  const Workspace workspace(weights, count);
  if (!workspace.valid()) return complain("out of memory", message, size);
  Job job{kernels, &weights, {x, inputs}, bias, {y, outputs}, count, workspace.rows(), row_step, tile_step};
  for (size_t task = 0; task < job.quantize_tasks(); task++) quantize_task(&job, task);
  for (size_t task = job.multiply_tasks(); task > 0; task--) multiply_task(&job, task - 1);
  return 0;
}

// The bytes of a tile, and of a row in a GGUF file; -1 for sizes that no GGUF type has.
CARRYALL_EXPORT int64_t carryall_stored_bytes(int64_t inputs, int64_t bits, int64_t block, int64_t offsets, int64_t group,
                                              int64_t* row) {
  const Weights weights{nullptr, inputs, 1, bits, block, static_cast<Offsets>(offsets), group};
  if (weights.complaint() != nullptr || !weights.halves()) return -1;
  *row = stored_row_bytes(weights);
  return weights.tile_bytes();
}

// Packs tiles [first, last) from the addresses of rows in a GGUF file; returns -1, or an output whose scale is no number.
CARRYALL_EXPORT int64_t carryall_pack_stored(const uint8_t* const* rows, int64_t inputs, int64_t outputs, int64_t bits,
                                             int64_t block, int64_t offsets, int64_t group, int64_t first, int64_t last,
                                             uint8_t* tiles) {
  return pack_stored(Weights{nullptr, inputs, outputs, bits, block, static_cast<Offsets>(offsets), group}, rows, first, last, tiles);
}

// Writes row `index` of tiles [inputs].
CARRYALL_EXPORT void carryall_read_row(const uint8_t* data, int64_t inputs, int64_t outputs, int64_t bits, int64_t block,
                                       int64_t offsets, int64_t group, int64_t index, float* y) {
  read_row(Weights{data, inputs, outputs, bits, block, static_cast<Offsets>(offsets), group}, index, y);
}

// Sizes of carryall_attention: those of AttentionSizes, then those of Attention.
struct AttentionCall {
  int64_t heads, kv_heads, size, block, window, rotary, interleaved, cache_type;
  float scale, softcap;
  const float *query, *key, *value;
  uint8_t *keys, *values;
  const int32_t *past, *begins, *table;
  const float *cosines, *sines, *sinks, *slopes;
  const int64_t* positions;
  const int32_t* ahead;
  int64_t blocks, rows, table_width, tokens, angles;
  float* output;
};

// Writes new tokens into the caches and attends to them; fewer items than `separate` are cut into parts. Returns 0, or
// 1 and a message.
CARRYALL_EXPORT int carryall_attention(const char* isa, const AttentionCall* from, int64_t separate, char* message,
                                       int64_t size) {
  AttentionSizes sizes{from->heads,  from->kv_heads,    from->size,
                             from->block,  from->window,      from->rotary,
                             from->interleaved, CacheType::float32, from->scale, from->softcap, 0, from->keys == from->values};
  sizes.set_cache(from->cache_type);
  if (const char* wrong = sizes.complaint()) return complain(wrong, message, size);
  const Kernels* kernels = choose_kernels(isa);
  if (kernels == nullptr) return complain("there is no such instruction set", message, size);
  const Attention attention{sizes, from->query, from->key, from->value, sizes.heads * sizes.size,
                            sizes.kv_heads * sizes.size, sizes.kv_heads * sizes.size, sizes.heads * sizes.size, from->keys, from->values, from->blocks, from->past,
                            from->begins, from->table, from->rows, from->table_width, from->tokens, from->cosines,
                            from->sines, from->positions, from->angles, from->sinks, from->slopes,
                            from->ahead,  nullptr, from->output};
  if (!attention.check(message, static_cast<size_t>(size))) return 1;
  AttentionJob job(attention, *kernels->attention, separate);
  if (!job.valid()) return complain("out of memory", message, size);
  for (size_t task = job.write_tasks(); task > 0; task--) AttentionJob::write(&job, task - 1);
  for (size_t task = job.attend_tasks(); task > 0; task--) AttentionJob::attend(&job, task - 1);
  for (size_t item = 0; item < job.finish_tasks(); item++) AttentionJob::finish(&job, item);
  return 0;
}

// The inputs of carryall_delta_rule, in the order of DeltaRule.
struct DeltaCall {
  int64_t heads, key_heads, key_size, value_size, by_key, bfloat16, rows, tokens, states_count;
  float scale;
  const float *query, *key, *value, *decay, *beta;
  float* states;
  const int32_t *begins, *places;
  float* output;
};

// Computes the delta rule of all rows; returns 0, or 1 and a message.
CARRYALL_EXPORT int carryall_delta_rule(const char* isa, const DeltaCall* from, char* message, int64_t size) {
  const DeltaRule rule{from->heads,  from->key_heads, from->key_size, from->value_size,   from->by_key != 0, from->bfloat16 != 0,
                       from->scale,  from->query,     from->key,      from->value,        from->decay,
                       from->beta,   from->states,    from->begins,   from->places,       from->rows,
                       from->tokens, from->states_count, from->output, 0, 0};
  if (const char* wrong = rule.complaint()) return complain(wrong, message, size);
  if (const char* wrong = complaint_of_rows(rule.begins, rule.places, rule.rows, rule.tokens, rule.states_count))
    return complain(wrong, message, size);
  const Kernels* kernels = choose_kernels(isa);
  if (kernels == nullptr) return complain("there is no such instruction set", message, size);
  DeltaJob job(rule, *kernels);
  if (!job.valid()) return complain("out of memory", message, size);
  for (size_t piece = 0; piece < job.pieces(); piece++) {
    job.start(piece);
    for (size_t task = 0; task < job.prepare_tasks(); task++) DeltaJob::prepare(&job, task);
    for (size_t task = job.delta_tasks(); task > 0; task--) DeltaJob::delta(&job, task - 1);
  }
  return 0;
}

struct ConvolutionCall {
  int64_t channels, taps, silu, rows, tokens, states_count;
  const float *x, *weights, *bias;
  float* states;
  const int32_t *begins, *places;
  float* output;
};

// Computes the convolution of all rows; returns 0, or 1 and a message.
CARRYALL_EXPORT int carryall_convolution(const char* isa, const ConvolutionCall* from, char* message, int64_t size) {
  const Convolution convolution{from->channels, from->taps,   from->silu != 0, from->x,     from->weights,
                                from->bias,     from->states, from->begins,    from->places, from->rows,
                                from->tokens,   from->states_count, from->output};
  if (const char* wrong = convolution.complaint()) return complain(wrong, message, size);
  if (const char* wrong = complaint_of_rows(convolution.begins, convolution.places, convolution.rows,
                                            convolution.tokens, convolution.states_count))
    return complain(wrong, message, size);
  const Kernels* kernels = choose_kernels(isa);
  if (kernels == nullptr) return complain("there is no such instruction set", message, size);
  ConvolutionJob job{&convolution, &kernels->attention->recurrent};
  for (size_t task = job.tasks(); task > 0; task--) ConvolutionJob::convolve(&job, task - 1);
  return 0;
}

}  // extern "C"
