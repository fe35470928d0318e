#define CARRYALL_LANES 16
#include "rounding_lanes.h"

namespace carryall {

Outcome round_avx512(const Rounding& rounding, int64_t first, int64_t last) { return Lanes::round(rounding, first, last); }
void sweep_avx512(const Sweep& sweep, int64_t first, int64_t last) { Lanes::sweep(sweep, first, last); }

}  // namespace carryall
