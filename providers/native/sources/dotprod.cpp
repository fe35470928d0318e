// ARM dot products of bytes (FEAT_DotProd): 8 rows a pass.
#include "neon_dots.h"

namespace carryall {

const Kernels kDotprod = {"dotprod", has_dotprod, quantize, multiply_neon<Dotprod>, &kNeonAttention, round_portable, sweep_portable};

}  // namespace carryall
