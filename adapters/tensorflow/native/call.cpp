#include "call.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "queues.h"
#include "tensors.h"

namespace multiring::tensorflow {
namespace {

constexpr int kMaxDims = 8;  // of mr_operation

int dtype_of(int type) {
  static constexpr std::pair<int, int> kKnown[] = {
      {kBool, MR_BOOL},      {kInt8, MR_INT8},           {kUint8, MR_UINT8},          {kInt16, MR_INT16},
      {kUint16, MR_UINT16},  {kInt32, MR_INT32},         {kUint32, MR_UINT32},        {kInt64, MR_INT64},
      {kUint64, MR_UINT64},  {kHalf, MR_FLOAT16},        {kBfloat16, MR_BFLOAT16},    {kFloat, MR_FLOAT32},
      {kDouble, MR_FLOAT64}, {kComplex64, MR_COMPLEX64}, {kComplex128, MR_COMPLEX128}};
  const auto* found = std::ranges::find(kKnown, type, &std::pair<int, int>::first);
  return found != std::end(kKnown) ? found->second : -1;
}

bool splits_rows(mr_kind kind) { return kind == MR_REDUCE_SCATTER || kind == MR_ALLTOALL; }

}  // namespace

void Call::start(const Settings& settings, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  Call* call = new Call(settings, context);
  if (done_can_be_moved) {
    call->done_ = std::move(*reinterpret_cast<Done*>(done));
    // After a submission that was accepted, the call belongs to the queue's thread and may be gone already.
    if (!call->prepare() || !call->submit()) call->finish();
    return;
  }
  if (call->prepare() && call->submit()) call->finished_.acquire();
  delete call;
  api.TF_RunAsyncOpKernelDoneCallback(done);
}

Call::Call(const Settings& settings, TF_OpKernelContext* context)
    : settings_(settings), context_(context), status_(api.TF_NewStatus()) {}

Call::~Call() {
  if (running_) end_run(settings_.communicator, settings_.name);
  for (TF_Tensor* tensor : held_) api.TF_DeleteTensor(tensor);
  api.TF_DeleteStatus(status_);
}

void Call::finish() {
  Done done = std::move(done_);
  delete this;  // who waits may use the name and write to the outputs
  api.TF_RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done));
}

bool Call::fail(int code, const mr_error& error) {
  char text[sizeof error.message + 64];
  mr_error_text(&error, text, sizeof text);
  api.TF_SetStatus(status_, code, text);
  api.TF_OpKernelContext_Failure(context_, status_);
  return false;
}

bool Call::refuse(const std::string& message, int code) {
  mr_error error = MR_ERROR_INIT;
  error.status = MR_USAGE;
  std::snprintf(error.tensor, sizeof error.tensor, "%s", settings_.name.c_str());
  if (queue_ != nullptr)
    mr_queue_keep(queue_, &error, message.c_str());
  else
    mr_error_set_message(&error, message.c_str());
  return fail(code, error);
}

// After a call of TensorFlow that sets the status.
bool Call::check() {
  if (api.TF_GetCode(status_) == kOk) return true;
  api.TF_OpKernelContext_Failure(context_, status_);
  return false;
}

bool Call::prepare() {
  queue_ = find_queue(settings_.communicator);
  if (queue_ == nullptr) {
    return refuse(
        "'" + settings_.name + "' belongs to communicator " + std::to_string(settings_.communicator) +
            ", which this process does not have: a function that was saved in another process has to be "
            "traced anew, after multiring.init()",
        kFailedPrecondition);
  }
  const int inputs = api.TF_NumInputs(context_) - (settings_.kind == MR_ALLTOALL ? 1 : 0) -
                     static_cast<int>(settings_.steps);
  operations_.reserve(static_cast<size_t>(inputs));
  shapes_.reserve(static_cast<size_t>(inputs));  // the operations point into it
  for (int index = 0; index < inputs; ++index) {
    if (!add_tensor(index)) return false;
  }
  if (settings_.steps > 0 && !take_step(inputs)) return false;
  return settings_.kind != MR_ALLTOALL || take_splits();
}

bool Call::add_tensor(int index) {
  TF_Tensor* input = nullptr;
  api.TF_GetInput(context_, index, &input, status_);
  if (!check()) return false;
  held_.push_back(input);
  const std::vector<int64_t> dims = dims_of(input);
  if (splits_rows(settings_.kind) && dims.empty()) {
    return refuse("'" + settings_.name + "' is a scalar; it needs a first dimension to be split over ranks");
  }
  std::vector<uint64_t>& shape = shapes_.emplace_back(dims.begin(), dims.end());
  if (shape.size() > kMaxDims) {  // rows stay whole, so the other dimensions may count as one
    shape = {shape[0], std::accumulate(shape.begin() + 1, shape.end(), uint64_t{1}, std::multiplies<>())};
  }
  mr_operation operation = MR_OPERATION_INIT;
  operation.kind = settings_.kind;
  operation.dtype = dtype_of(api.TF_TensorType(input));
  operation.op = static_cast<int>(settings_.op);
  operation.root = static_cast<int>(settings_.root);
  operation.prescale = settings_.prescale;
  operation.postscale = settings_.postscale;
  const auto position = static_cast<size_t>(index);
  operation.name = (position < settings_.labels.size() ? settings_.labels[position] : settings_.name).c_str();
  operation.dims = static_cast<int>(shape.size());
  operation.shape = shape.data();
  operation.input = data_of(input);
  if (!add_output(index, operation, dims)) return false;
  operations_.push_back(operation);
  return true;
}

bool Call::add_output(int index, mr_operation& operation, std::vector<int64_t> dims) {
  if (mr_output_of(settings_.kind) == MR_OUTPUT_JOINED) return true;  // the extent is not known yet
  TF_Tensor* output = nullptr;
  const int rank = static_cast<int>(dims.size());
  if (mr_output_of(settings_.kind) == MR_OUTPUT_BLOCK) {
    const int64_t size = mr_queue_size(queue_), own = mr_queue_rank(queue_);
    dims[0] = dims[0] / size + (own < dims[0] % size ? 1 : 0);
    const int type = api.TF_TensorType(held_.back());
    const size_t bytes = dims[0] == 0 ? 0 : api.TF_TensorByteSize(held_.back());
    output = api.TF_AllocateOutput(context_, index, type, dims.data(), rank, bytes, status_);
    if (!check()) return false;
  } else {
    api.TF_DeleteTensor(held_.back());
    held_.pop_back();
    void* target = nullptr;
    if (!add_output_like(context_, index, held_, status_, &operation.input, &target)) return check();
    operation.output = target;
    operation.output_bytes = api.TF_TensorByteSize(held_.back());
    return true;
  }
  held_.push_back(output);
  operation.output = data_of(output);
  operation.output_bytes = api.TF_TensorByteSize(output);
  return true;
}

// The last input of an alltoall: rows for each rank, or nothing for parts as equal as possible.
bool Call::take_splits() {
  TF_Tensor* tensor = nullptr;
  api.TF_GetInput(context_, 1, &tensor, status_);
  if (!check()) return false;
  held_.push_back(tensor);
  const size_t count = api.TF_TensorByteSize(tensor) / sizeof(int64_t);
  const int64_t* rows = static_cast<const int64_t*>(data_of(tensor));
  splits_.assign(rows, rows + count);
  const uint64_t size = static_cast<uint64_t>(mr_queue_size(queue_)), total = shapes_[0][0];
  if (count == 0) {
    for (uint64_t k = 0; k < size; ++k) splits_.push_back(total / size + (k < total % size ? 1 : 0));
  }
  uint64_t left = total;  // a sum could wrap
  bool fits = splits_.size() == size;
  for (const uint64_t part : splits_) {  // those below 0 are larger than any total here
    fits = fits && part <= left;
    left -= std::min(left, part);
  }
  if (!fits || left > 0) {
    return refuse("splits of '" + settings_.name + "' have to be " + std::to_string(size) +
                  " numbers of at least 0 that add up to its " + std::to_string(total) + " rows");
  }
  operations_[0].splits = splits_.data();
  return true;
}

bool Call::take_step(int index) {
  TF_Tensor* tensor = nullptr;
  api.TF_GetInput(context_, index, &tensor, status_);
  if (!check()) return false;
  if (api.TF_TensorByteSize(tensor) == sizeof step_) std::memcpy(&step_, data_of(tensor), sizeof step_);
  api.TF_DeleteTensor(tensor);
  return true;
}

bool Call::submit() {
  const bool alone = mr_queue_size(queue_) == 1;
  running_ = !alone && begin_run(settings_.communicator, settings_.name);
  if (!alone && !running_) {
    const std::string message =
        "'" + settings_.name + "' was called on rank " + std::to_string(mr_queue_rank(queue_)) +
        " while another call of it was running, so ranks may reach the two in different "
        "order; call it from one thread and not in parallel, or give each of its uses a "
        "name or a communicator of its own";
    mr_queue_abort(queue_, message.c_str());
    return refuse(message);
  }
  mr_error error;
  mr_submission submission = MR_SUBMISSION_INIT;
  submission.name = settings_.name.c_str();
  submission.operations = operations_.data();
  submission.count = static_cast<int>(operations_.size());
  submission.priority = static_cast<int>(settings_.priority);
  submission.step = step_;
  submission.done = &Call::completed;
  submission.context = this;
  return mr_queue_submit(queue_, &submission, &error) == MR_OK || fail(mr_status_code(error.status), error);
}

void Call::completed(void* context, const mr_error* error, mr_work* const* works) {
  Call* call = static_cast<Call*>(context);
  if (error != nullptr) {
    call->fail(mr_status_code(error->status), *error);
  } else if (mr_output_of(call->settings_.kind) == MR_OUTPUT_JOINED) {
    call->take_result(works[0]);
  }
  if (call->done_) {
    call->finish();
  } else {
    call->finished_.release();
  }
}

// Copies what the core has allocated, now that its extent is known, to outputs.
bool Call::take_result(const mr_work* work) {
  size_t bytes = 0;
  std::vector<uint64_t> rows(static_cast<size_t>(mr_queue_size(queue_)));
  const void* data = mr_work_result(work, &bytes, rows.data());
  std::vector<int64_t> dims = dims_of(held_[0]);
  if (dims.empty()) dims.push_back(0);
  dims[0] = static_cast<int64_t>(std::accumulate(rows.begin(), rows.end(), uint64_t{0}));
  const std::vector<int64_t> extent{static_cast<int64_t>(rows.size())};
  return copy_output(0, api.TF_TensorType(held_[0]), dims, data, bytes) &&
         copy_output(1, kInt64, extent, rows.data(), rows.size() * sizeof(int64_t));
}

bool Call::copy_output(int index, int type, const std::vector<int64_t>& dims, const void* data,
                       size_t bytes) {
  TF_Tensor* output = api.TF_AllocateOutput(context_, index, type, dims.data(), static_cast<int>(dims.size()),
                                            bytes, status_);
  if (!check()) return false;
  held_.push_back(output);
  if (bytes != 0) std::memcpy(data_of(output), data, bytes);
  return true;
}

}  // namespace multiring::tensorflow
