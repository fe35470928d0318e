#include "attention_avx512.h"

#include <type_traits>

#include "quads_avx512.h"

namespace carryall {

const AttentionKernels kAvx512Attention = attention_kernels<Vector, OfRows<Vector, Avx512Quads>>();

}  // namespace carryall
