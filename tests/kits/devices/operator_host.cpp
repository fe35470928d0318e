// A host for the operators of the CPU kernels that is not onnxruntime: it has the few entries of its C API that the
// kernels use, and threads of its own. So the operators run under every sanitizer and on emulated processors.
//
//   operator_host LIBRARY < calls > answers
//
// A call: name, threads, copies, attributes (name, kind, value), inputs (type, shape, bytes). Copies run at the same
// time on one kernel, share their inputs except KV caches, and must give equal results. An answer: 0 and the
// outputs (number; shape, floats), or 1 and a message. See operator_host.py.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ort_api.h"

using namespace carryall;

struct OrtStatus {
  std::string message;
};

struct OrtTensorTypeAndShapeInfo {
  int type;
  std::vector<int64_t> shape;
};

struct OrtValue {
  int type = 0;  // 0 is an absent input
  std::vector<int64_t> shape;
  void* data = nullptr;  // of exactly the tensor's size, so that the address sanitizer sees its end
  size_t bytes = 0;

  OrtValue() = default;
  OrtValue(const OrtValue& other) : type(other.type), shape(other.shape) {
    allocate(other.bytes);
    if (bytes > 0) memcpy(data, other.data, bytes);
  }
  OrtValue& operator=(const OrtValue&) = delete;
  ~OrtValue() { free(data); }
  void allocate(size_t size) {
    bytes = size;
    data = type == 0 ? nullptr : malloc(size > 0 ? size : 1);
  }
};

struct OrtKernelInfo {
  std::map<std::string, int64_t> integers;
  std::map<std::string, float> floats;
};

struct OrtKernelContext {
  std::vector<const OrtValue*> inputs;
  std::vector<std::unique_ptr<OrtValue>> outputs;
  int threads = 1;
};

struct OrtCustomOpDomain {
  std::vector<const OrtCustomOp*> operators;
};

struct OrtSessionOptions {
  OrtCustomOpDomain* domain = nullptr;
};

namespace {

OrtStatus* fail(const std::string& message) { return new OrtStatus{message}; }

size_t elements(const std::vector<int64_t>& shape) {
  size_t all = 1;
  for (int64_t one : shape) all *= static_cast<size_t>(one);
  return all;
}

template <class Value>
OrtStatus* find(const std::map<std::string, Value>& attributes, const char* name, Value* value) {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return fail(std::string("there is no attribute ") + name);
  *value = found->second;
  return nullptr;
}

OrtStatus* parallel_for(const OrtKernelContext* context, void (*task)(void*, size_t), size_t total, size_t, void* job) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < total; i = next++) task(job, i);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < context->threads; i++) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  return nullptr;
}

OrtStatus* create_output(OrtKernelContext* context, size_t index, const int64_t* dimensions, size_t rank, OrtValue** value) {
  while (context->outputs.size() <= index) context->outputs.push_back(std::make_unique<OrtValue>());
  OrtValue& made = *context->outputs[index];
  made.type = kFloat;
  made.shape.assign(dimensions, dimensions + rank);
  made.allocate(elements(made.shape) * sizeof(float));
  *value = &made;
  return nullptr;
}

const OrtApi* api_table() {
  static void* table[300] = {};
  const auto set = [](Entry entry, auto function) { table[entry] = reinterpret_cast<void*>(+function); };
  set(kCreateStatus, [](int, const char* message) { return fail(message); });
  set(kCreateCustomOpDomain, [](const char*, OrtCustomOpDomain** made) -> OrtStatus* {
    *made = new OrtCustomOpDomain;
    return nullptr;
  });
  set(kCustomOpDomainAdd, [](OrtCustomOpDomain* domain, const OrtCustomOp* op) -> OrtStatus* {
    domain->operators.push_back(op);
    return nullptr;
  });
  set(kAddCustomOpDomain, [](OrtSessionOptions* options, OrtCustomOpDomain* domain) -> OrtStatus* {
    options->domain = domain;
    return nullptr;
  });
  set(kGetTensorMutableData, [](OrtValue* value, void** data) -> OrtStatus* {
    *data = value->data;
    return nullptr;
  });
  set(kGetTensorTypeAndShape, [](const OrtValue* value, OrtTensorTypeAndShapeInfo** info) -> OrtStatus* {
    *info = new OrtTensorTypeAndShapeInfo{value->type, value->shape};
    return nullptr;
  });
  set(kReleaseTensorTypeAndShapeInfo, [](OrtTensorTypeAndShapeInfo* info) { delete info; });
  set(kGetTensorElementType, [](const OrtTensorTypeAndShapeInfo* info, int* type) -> OrtStatus* {
    *type = info->type;
    return nullptr;
  });
  set(kGetDimensionsCount, [](const OrtTensorTypeAndShapeInfo* info, size_t* rank) -> OrtStatus* {
    *rank = info->shape.size();
    return nullptr;
  });
  set(kGetDimensions, [](const OrtTensorTypeAndShapeInfo* info, int64_t* dimensions, size_t rank) -> OrtStatus* {
    if (rank > 0) memcpy(dimensions, info->shape.data(), rank * sizeof(int64_t));
    return nullptr;
  });
  set(kGetTensorShapeElementCount, [](const OrtTensorTypeAndShapeInfo* info, size_t* count) -> OrtStatus* {
    *count = elements(info->shape);
    return nullptr;
  });
  set(kKernelInfoGetAttributeInt64, [](const OrtKernelInfo* info, const char* name, int64_t* value) {
    return find(info->integers, name, value);
  });
  set(kKernelInfoGetAttributeFloat, [](const OrtKernelInfo* info, const char* name, float* value) {
    return find(info->floats, name, value);
  });
  set(kKernelContextGetInputCount, [](const OrtKernelContext* context, size_t* count) -> OrtStatus* {
    *count = context->inputs.size();
    return nullptr;
  });
  set(kKernelContextGetInput, [](const OrtKernelContext* context, size_t index, const OrtValue** value) -> OrtStatus* {
    const OrtValue* found = context->inputs[index];
    *value = found->type == 0 ? nullptr : found;
    return nullptr;
  });
  set(kKernelContextGetOutput, create_output);
  set(kKernelContextParallelFor, parallel_for);
  return reinterpret_cast<const OrtApi*>(table);
}

// The little-endian numbers, strings and arrays of calls and answers.
template <class Value>
Value read_value() {
  Value value;
  if (fread(&value, sizeof value, 1, stdin) != 1) exit(ferror(stdin) ? 3 : 0);
  return value;
}

void read_bytes(void* data, size_t size) {
  if (size > 0 && fread(data, 1, size, stdin) != size) exit(3);
}

std::string read_text() {
  std::string text(read_value<uint32_t>(), 0);
  read_bytes(&text[0], text.size());
  return text;
}

void write_bytes(const void* data, size_t size) { fwrite(data, 1, size, stdout); }

void write_number(uint32_t number) { write_bytes(&number, sizeof number); }

struct Call {
  std::string name;
  uint32_t threads, copies;
  OrtKernelInfo info;
  std::vector<std::unique_ptr<OrtValue>> inputs;
};

void read_call(Call* call) {
  call->name = read_text();
  call->threads = read_value<uint32_t>();
  call->copies = read_value<uint32_t>();
  for (uint32_t left = read_value<uint32_t>(); left > 0; left--) {
    const std::string name = read_text();
    if (read_value<uint32_t>() == 0) call->info.integers[name] = read_value<int64_t>();
    else call->info.floats[name] = static_cast<float>(read_value<double>());
  }
  for (uint32_t left = read_value<uint32_t>(); left > 0; left--) {
    auto value = std::make_unique<OrtValue>();
    value->type = static_cast<int>(read_value<uint32_t>());
    value->shape.resize(read_value<uint32_t>());
    for (int64_t& one : value->shape) one = read_value<int64_t>();
    value->allocate(static_cast<size_t>(read_value<uint64_t>()));
    read_bytes(value->data, value->bytes);
    call->inputs.push_back(std::move(value));
  }
}

// What onnxruntime refuses before it calls a kernel: inputs that are missing or of another type.
OrtStatus* check_types(const OrtCustomOp* op, const Call& call) {
  const size_t count = op->GetInputTypeCount(op);
  const bool variadic = op->GetInputCharacteristic(op, count - 1) == kVariadic;
  if (call.inputs.size() > count && !variadic) return fail("too many inputs");
  for (size_t i = 0; i < count || i < call.inputs.size(); i++) {
    const size_t place = i < count ? i : count - 1;
    const bool absent = i >= call.inputs.size() || call.inputs[i]->type == 0;
    const int type = op->GetInputType(op, place);
    if (absent && op->GetInputCharacteristic(op, place) == kRequired) return fail("a required input is missing");
    if (!absent && type != kAnyType && call.inputs[i]->type != type) return fail("an input has another type");
  }
  return nullptr;
}

OrtStatus* run_copy(const OrtCustomOp* op, void* kernel, const Call& call, OrtKernelContext* context) {
  std::vector<std::unique_ptr<OrtValue>> own;
  context->threads = static_cast<int>(call.threads);
  for (const auto& input : call.inputs) {
    const bool cache = input->type == kUint8 && input->shape.size() == 4;
    if (cache) own.push_back(std::make_unique<OrtValue>(*input));
    context->inputs.push_back(cache ? own.back().get() : input.get());
  }
  return op->KernelComputeV2(kernel, context);
}

bool equal(const std::vector<std::unique_ptr<OrtValue>>& some, const std::vector<std::unique_ptr<OrtValue>>& others) {
  if (some.size() != others.size()) return false;
  for (size_t i = 0; i < some.size(); i++)
    if (some[i]->bytes != others[i]->bytes || memcmp(some[i]->data, others[i]->data, some[i]->bytes) != 0) return false;
  return true;
}

OrtStatus* run_call(const OrtCustomOp* op, const Call& call, OrtKernelContext* first) {
  if (OrtStatus* status = check_types(op, call)) return status;
  void* kernel = nullptr;
  if (OrtStatus* status = op->CreateKernelV2(op, api_table(), &call.info, &kernel)) return status;
  std::vector<OrtKernelContext> contexts(call.copies - 1);
  std::vector<OrtStatus*> results(call.copies);
  std::vector<std::thread> others;
  for (size_t i = 0; i < contexts.size(); i++)
    others.emplace_back([&, i] { results[i] = run_copy(op, kernel, call, &contexts[i]); });
  OrtStatus* status = run_copy(op, kernel, call, first);
  for (std::thread& other : others) other.join();
  op->KernelDestroy(kernel);
  for (size_t i = 0; i < contexts.size() && status == nullptr; i++)
    if (results[i] != nullptr || !equal(contexts[i].outputs, first->outputs))
      status = fail("runs at the same time gave different results");
  for (OrtStatus* each : results) delete each;
  return status;
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  using Register = OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*);
  const auto enter = reinterpret_cast<Register>(dlsym(library, "RegisterCustomOps"));
  const OrtApiBase base = {[](uint32_t) { return api_table(); }, [] { return "1.17.0"; }};
  OrtSessionOptions options;
  if (enter == nullptr || enter(&options, &base) != nullptr) return 2;
  for (;;) {
    Call call;
    read_call(&call);
    const OrtCustomOp* op = nullptr;
    for (const OrtCustomOp* each : options.domain->operators)
      if (call.name == each->GetName(each) && each->GetExecutionProviderType(each) == nullptr) op = each;
    OrtKernelContext context;
    OrtStatus* status = op == nullptr ? fail("there is no operator " + call.name) : run_call(op, call, &context);
    write_number(status != nullptr);
    if (status != nullptr) {
      write_number(static_cast<uint32_t>(status->message.size()));
      write_bytes(status->message.data(), status->message.size());
    } else {
      write_number(static_cast<uint32_t>(context.outputs.size()));
      for (const auto& output : context.outputs) {
        write_number(static_cast<uint32_t>(output->shape.size()));
        write_bytes(output->shape.data(), output->shape.size() * sizeof(int64_t));
        write_bytes(output->data, output->bytes);
      }
    }
    fflush(stdout);
    delete status;
  }
}
