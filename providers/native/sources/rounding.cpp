#define CARRYALL_LANES 4
#include "kernels.h"
#include "linear.h"
#include "ort_api.h"
#include "rounding_lanes.h"

namespace carryall {

Outcome round_portable(const Rounding& rounding, int64_t first, int64_t last) { return Lanes::round(rounding, first, last); }
void sweep_portable(const Sweep& sweep, int64_t first, int64_t last) { Lanes::sweep(sweep, first, last); }

}  // namespace carryall

// Rounds outputs [first, last) with an instruction set, null for the one in use; returns an Outcome.
extern "C" CARRYALL_EXPORT int64_t carryall_round(const char* isa, const carryall::Rounding* rounding, int64_t first, int64_t last) {
  using namespace carryall;
  const Kernels* kernels = choose_kernels(isa);
  if (kernels == nullptr || !rounding->is_supported() || first < 0 || last > rounding->outputs)
    return static_cast<int64_t>(Outcome::unsupported);
  return static_cast<int64_t>(kernels->round(*rounding, first, last));
}

// Sweeps outputs [first, last) of a panel with an instruction set, null for the one in use; returns an Outcome.
extern "C" CARRYALL_EXPORT int64_t carryall_sweep(const char* isa, const carryall::Sweep* sweep, int64_t first, int64_t last) {
  using namespace carryall;
  const Kernels* kernels = choose_kernels(isa);
  if (kernels == nullptr || !sweep->is_supported() || first < 0 || last > sweep->outputs)
    return static_cast<int64_t>(Outcome::unsupported);
  kernels->sweep(*sweep, first, last);
  return static_cast<int64_t>(Outcome::done);
}
