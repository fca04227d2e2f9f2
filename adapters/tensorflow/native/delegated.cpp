/* An op whose work a function of the process does, such as one in Python. */
#include "delegated.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "tensors.h"

namespace multiring::tensorflow {
namespace {

std::atomic<Delegate> delegate{nullptr};

}  // namespace

void DelegatedCall::start(const DelegatedSettings& settings, TF_OpKernelContext* context,
                          TF_AsyncOpKernelDoneCallback* done) {
  auto* call = new DelegatedCall(settings, context);
  const bool moved = done_can_be_moved;
  if (moved) call->done_ = std::move(*reinterpret_cast<Done*>(done));
  const Delegate function = delegate.load();
  if (function == nullptr) {
    call->fail(kFailedPrecondition, "multiring: a delegated operation in a process without a delegate");
    call->end();
  } else if (!call->prepare()) {
    call->end();
  } else {
    // Where it does not wait here, the call may be gone when this returns.
    function(call, settings.communicator, settings.name.c_str(), settings.asked.c_str(),
             static_cast<int32_t>(call->tensors_.size()), call->tensors_.data());
  }
  if (moved) return;
  call->finished_.acquire();
  delete call;
  api.TF_RunAsyncOpKernelDoneCallback(done);
}

DelegatedCall::DelegatedCall(const DelegatedSettings& settings, TF_OpKernelContext* context)
    : settings_(settings), context_(context), status_(api.TF_NewStatus()) {}

DelegatedCall::~DelegatedCall() {
  for (TF_Tensor* tensor : held_) api.TF_DeleteTensor(tensor);
  api.TF_DeleteStatus(status_);
}

bool DelegatedCall::prepare() {
  const int count = api.TF_NumInputs(context_);
  shapes_.reserve(static_cast<size_t>(count));  // the tensors point into it
  for (int index = 0; index < count; ++index) {
    HostTensor tensor{};
    if (settings_.same_shapes) {
      if (!add_output_like(context_, index, held_, status_, &tensor.input, &tensor.output)) return check();
    } else {
      TF_Tensor* input = nullptr;
      api.TF_GetInput(context_, index, &input, status_);
      if (!check()) return false;
      held_.push_back(input);
      tensor.input = data_of(input);
    }
    const std::vector<int64_t>& shape = shapes_.emplace_back(dims_of(held_.back()));
    tensor.type = api.TF_TensorType(held_.back());
    tensor.dims = static_cast<int32_t>(shape.size());
    tensor.shape = shape.data();
    tensors_.push_back(tensor);
  }
  return true;
}

void DelegatedCall::finish(int code, const char* message, int count, const HostTensor* outputs) {
  if (code != kOk) {
    fail(code, message);
  } else {
    take_outputs(count, outputs);
  }
  end();
}

bool DelegatedCall::take_outputs(int count, const HostTensor* outputs) {
  for (int index = 0; index < count; ++index) {
    const HostTensor& from = outputs[index];
    size_t bytes = api.TF_DataTypeSize(from.type);
    for (int axis = 0; axis < from.dims; ++axis) bytes *= static_cast<size_t>(from.shape[axis]);
    TF_Tensor* output =
        api.TF_AllocateOutput(context_, index, from.type, from.shape, from.dims, bytes, status_);
    if (!check()) return false;
    if (bytes != 0) std::memcpy(data_of(output), from.input, bytes);
    api.TF_DeleteTensor(output);
  }
  return true;
}

bool DelegatedCall::check() {
  if (api.TF_GetCode(status_) == kOk) return true;
  api.TF_OpKernelContext_Failure(context_, status_);
  return false;
}

void DelegatedCall::fail(int code, const char* message) {
  api.TF_SetStatus(status_, code, message);
  api.TF_OpKernelContext_Failure(context_, status_);
}

void DelegatedCall::end() {
  if (!done_) {
    finished_.release();
    return;
  }
  Done done = std::move(done_);
  delete this;
  api.TF_RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done));
}

}  // namespace multiring::tensorflow

#define MULTIRING_EXPORT extern "C" __attribute__((visibility("default")))

/* Makes this function do the work of delegated ops. Called by the Python part. */
MULTIRING_EXPORT void multiring_tensorflow_set_delegate(multiring::tensorflow::Delegate function) {
  multiring::tensorflow::delegate.store(function);
}

/* Ends a call that the delegate was given: with a code of TensorFlow's that is not 0 and a message, or with
 * outputs, whose memory is copied. Outputs of the shapes of the inputs are not given here. */
MULTIRING_EXPORT void multiring_tensorflow_finish_delegated(
    void* call, int32_t code, const char* message, int32_t count,
    const multiring::tensorflow::HostTensor* outputs) {
  static_cast<multiring::tensorflow::DelegatedCall*>(call)->finish(code, message, count, outputs);
}
