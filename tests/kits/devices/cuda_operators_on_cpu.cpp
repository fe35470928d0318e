// A library of the operators of carryall's CUDA kernels, for onnxruntime's CPU provider and the emulator's driver.
#include <new>

#include "cuda_operators.h"

extern "C" CARRYALL_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace carryall;
  static OrtCustomOp operators[kCudaOperators];
  static OrtCustomOpDomain* domain = nullptr;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (domain == nullptr) {
    cuda_operators(operators);
    if (OrtStatus* status = call<OrtStatus*, const char*, OrtCustomOpDomain**>(api, kCreateCustomOpDomain, "carryall", &domain))
      return status;
    for (const OrtCustomOp& each : operators)
      if (OrtStatus* status = call<OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*>(api, kCustomOpDomainAdd, domain, &each))
        return status;
  }
  return call<OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*>(api, kAddCustomOpDomain, options, domain);
}
