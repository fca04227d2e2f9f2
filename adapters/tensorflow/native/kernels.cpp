#include "kernels.h"

#include <bit>
#include <string>
#include <vector>

#include "call.h"
#include "delegated.h"
#include "queues.h"

namespace multiring::tensorflow {
namespace {

/* Reads attributes of a node; the first that is missing fails the construction. */
class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction)
      : construction_(construction), status_(api.TF_NewStatus()) {}
  ~Attributes() { api.TF_DeleteStatus(status_); }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;

  int64_t number(const char* name) {
    int64_t value = 0;
    api.TF_OpKernelConstruction_GetAttrInt64(construction_, name, &value, status_);
    check();
    return value;
  }

  // TensorFlow's own floating attributes have 32 bits, so these carry the bits of a double.
  double real(const char* name) { return std::bit_cast<double>(number(name)); }

  std::vector<std::string> texts(const char* name) {
    int32_t count = 0, length = 0;
    api.TF_OpKernelConstruction_GetAttrSize(construction_, name, &count, &length, status_);
    if (!check() || count <= 0) return {};
    const auto room = static_cast<size_t>(count);
    std::vector<char*> starts(room);
    std::vector<size_t> lengths(room);
    std::string storage(static_cast<size_t>(length), '\0');
    api.TF_OpKernelConstruction_GetAttrStringList(construction_, name, starts.data(), lengths.data(), count,
                                                  storage.data(), storage.size(), status_);
    std::vector<std::string> values;
    if (!check()) return values;
    for (size_t k = 0; k < room; ++k) values.emplace_back(starts[k], lengths[k]);
    return values;
  }

  std::string text(const char* name) {
    int32_t count = 0, length = 0;
    api.TF_OpKernelConstruction_GetAttrSize(construction_, name, &count, &length, status_);
    if (!check()) return "";
    std::string value(static_cast<size_t>(length), '\0');
    api.TF_OpKernelConstruction_GetAttrString(construction_, name, value.data(), value.size(), status_);
    check();
    return value;
  }

 private:
  bool check() {
    if (api.TF_GetCode(status_) == kOk) return true;
    api.TF_OpKernelConstruction_Failure(construction_, status_);
    return false;
  }

  TF_OpKernelConstruction* construction_;
  TF_Status* status_;
};

template <mr_kind kind>
void* create(TF_OpKernelConstruction* construction) {
  Attributes attributes(construction);
  auto* settings = new Settings;
  settings->kind = kind;
  settings->communicator = attributes.number("communicator");
  settings->name = attributes.text("tensor_name");
  settings->priority = attributes.number("priority");
  if constexpr (kind == MR_ALLREDUCE || kind == MR_REDUCE_SCATTER) {
    settings->op = attributes.number("reduce_op");
    settings->prescale = attributes.real("prescale_bits");
    settings->postscale = attributes.real("postscale_bits");
  }
  if constexpr (kind == MR_ALLREDUCE) settings->labels = attributes.texts("labels");
  if constexpr (kind == MR_ALLREDUCE || kind == MR_ALLGATHER) settings->steps = attributes.number("N");
  if constexpr (kind == MR_BROADCAST) settings->root = attributes.number("root");
  return settings;
}

void compute(void* settings, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  Call::start(*static_cast<const Settings*>(settings), context, done);
}

void destroy(void* settings) { delete static_cast<Settings*>(settings); }

CreateFunction creator(mr_kind kind) {
  switch (kind) {
    case MR_ALLREDUCE:
      return create<MR_ALLREDUCE>;
    case MR_REDUCE_SCATTER:
      return create<MR_REDUCE_SCATTER>;
    case MR_ALLGATHER:
      return create<MR_ALLGATHER>;
    case MR_BROADCAST:
      return create<MR_BROADCAST>;
    case MR_ALLTOALL:
      return create<MR_ALLTOALL>;
    case MR_BARRIER:
      return create<MR_BARRIER>;
    default:
      return nullptr;
  }
}

// Asynchronous like the others, which saves a second way to build kernels.
void count_step(void* settings, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto& of = *static_cast<const Settings*>(settings);
  TF_Status* status = api.TF_NewStatus();
  TF_Tensor* output = api.TF_AllocateOutput(context, 0, kInt64, nullptr, 0, sizeof(int64_t), status);
  if (api.TF_GetCode(status) == kOk) {
    *static_cast<int64_t*>(api.TF_TensorData(output)) = next_step(of.communicator, of.name);
    api.TF_DeleteTensor(output);
  } else {
    api.TF_OpKernelContext_Failure(context, status);
  }
  api.TF_DeleteStatus(status);
  api.TF_RunAsyncOpKernelDoneCallback(done);
}

void* create_delegated(TF_OpKernelConstruction* construction) {
  Attributes attributes(construction);
  return new DelegatedSettings{attributes.number("communicator"), attributes.text("tensor_name"),
                               attributes.text("asked"), attributes.number("same_shapes") != 0};
}

void compute_delegated(void* settings, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  DelegatedCall::start(*static_cast<const DelegatedSettings*>(settings), context, done);
}

void destroy_delegated(void* settings) { delete static_cast<DelegatedSettings*>(settings); }

std::string add_kernel(const char* op, CreateFunction create, ComputeFunction compute,
                       DeleteFunction destroy) {
  TF_Status* status = api.TF_NewStatus();
  TF_KernelBuilder* builder = api.TF_NewAsyncKernelBuilder(op, "CPU", create, compute, destroy);
  api.TF_RegisterKernelBuilder(op, builder, status);
  const std::string message = api.TF_GetCode(status) == kOk ? "" : api.TF_Message(status);
  api.TF_DeleteStatus(status);
  return message;
}

}  // namespace

std::string register_kernel(const char* op, mr_kind kind) {
  const CreateFunction create = creator(kind);
  if (create == nullptr) return std::string("multiring has no kernel for ") + op;
  return add_kernel(op, create, compute, destroy);
}

std::string register_other_kernel(const char* op) {
  if (op == std::string("MultiringStep")) return add_kernel(op, creator(MR_BARRIER), count_step, destroy);
  return add_kernel(op, create_delegated, compute_delegated, destroy_delegated);
}

}  // namespace multiring::tensorflow
