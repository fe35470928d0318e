// An operator of onnxruntime that another operator calls, on the provider and the stream of the other.
//
// It has no graph: types of its inputs are unknown to it, and defaults of attributes are not set.
#pragma once
#include <cstring>

#include "ort_kernel.h"

namespace carryall {

class NestedOperator {
 public:
  explicit NestedOperator(const OrtApi* api) : api_(api) {}
  NestedOperator(const NestedOperator&) = delete;
  NestedOperator& operator=(const NestedOperator&) = delete;
  ~NestedOperator() {
    if (op_ != nullptr) call<void, OrtOp*>(api_, kReleaseOp, op_);
    for (int i = 0; i < count_; i++) call<void, OrtOpAttr*>(api_, kReleaseOpAttr, attributes_[i]);
  }

  bool exists() const { return op_ != nullptr; }

  OrtStatus* set(const char* name, int64_t value) { return add(name, &value, kInteger); }
  OrtStatus* set(const char* name, float value) { return add(name, &value, kReal); }
  OrtStatus* set(const char* name, const char* value) { return add(name, value, kText, static_cast<int>(strlen(value))); }

  // Finds the operator; `types` are those of its type constraints.
  template <int kTypes>
  OrtStatus* find(const OrtKernelInfo* info, const char* name, const char* (&names)[kTypes], const int (&types)[kTypes],
                  int inputs, int outputs) {
    return call<OrtStatus*, const OrtKernelInfo*, const char*, const char*, int, const char**, const int*, int,
                const OrtOpAttr* const*, int, int, int, OrtOp**>(api_, kCreateOp, info, name, "com.microsoft", 1, names, types,
                                                                kTypes, attributes_, count_, inputs, outputs, &op_);
  }

  OrtStatus* run(const OrtKernelContext* context, const OrtValue* const* inputs, int input_count, OrtValue* const* outputs,
                 int output_count) const {
    return call<OrtStatus*, const OrtKernelContext*, const OrtOp*, const OrtValue* const*, int, OrtValue* const*, int>(
        api_, kInvokeOp, context, op_, inputs, input_count, outputs, output_count);
  }

 private:
  static constexpr int kMost = 16;
  enum Kind : int { kInteger = 1, kReal = 3, kText = 5 };  // of OrtOpAttrType

  OrtStatus* add(const char* name, const void* value, Kind kind, int length = 1) {
    if (count_ == kMost) return failure(api_, kFail, "an operator has too many attributes");
    CARRYALL_TRY((call<OrtStatus*, const char*, const void*, int, int, OrtOpAttr**>(api_, kCreateOpAttr, name, value, length, kind,
                                                                                   attributes_ + count_)));
    count_++;
    return nullptr;
  }

  const OrtApi* api_;
  OrtOp* op_ = nullptr;
  OrtOpAttr* attributes_[kMost] = {};
  int count_ = 0;
};

// An input as the value that nested operators take; null if it is absent.
inline OrtStatus* input_value(const OrtApi* api, const OrtKernelContext* context, size_t index, const OrtValue** value) {
  return call<OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**>(api, kKernelContextGetInput, context, index,
                                                                            value);
}

// An output as a value, and its memory.
inline OrtStatus* output_value(const OrtApi* api, OrtKernelContext* context, size_t index, const int64_t* dimensions,
                               size_t rank, OrtValue** value, void** data) {
  CARRYALL_TRY((call<OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>(
      api, kKernelContextGetOutput, context, index, dimensions, rank, value)));
  return call<OrtStatus*, OrtValue*, void**>(api, kGetTensorMutableData, *value, data);
}

}  // namespace carryall
