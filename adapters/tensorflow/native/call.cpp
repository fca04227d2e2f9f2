#include "call.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "queues.h"

namespace multiring::tensorflow {
namespace {

constexpr int kMaxDims = 8;  // of mr_operation

int dtype_of(int type) {
  switch (type) {
    case kBool:
      return MR_BOOL;
    case kInt8:
      return MR_INT8;
    case kUint8:
      return MR_UINT8;
    case kInt16:
      return MR_INT16;
    case kUint16:
      return MR_UINT16;
    case kInt32:
      return MR_INT32;
    case kUint32:
      return MR_UINT32;
    case kInt64:
      return MR_INT64;
    case kUint64:
      return MR_UINT64;
    case kHalf:
      return MR_FLOAT16;
    case kBfloat16:
      return MR_BFLOAT16;
    case kFloat:
      return MR_FLOAT32;
    case kDouble:
      return MR_FLOAT64;
    default:
      return -1;
  }
}

int code_of(mr_status status) {
  switch (status) {
    case MR_OK:
      return kOk;
    case MR_USAGE:
      return kInvalidArgument;
    case MR_MISMATCH:
      return kFailedPrecondition;
    case MR_TIMEOUT:
      return kDeadlineExceeded;
    case MR_PEER_LOST:
      return kUnavailable;
    case MR_ABORTED:
      return kAborted;
    default:
      return kInternal;
  }
}

const char* kind_of(mr_status status) {
  switch (status) {
    case MR_USAGE:
      return "UsageError: ";
    case MR_MISMATCH:
      return "MismatchError: ";
    case MR_TIMEOUT:
      return "TimeoutError: ";
    case MR_PEER_LOST:
      return "PeerLostError: ";
    case MR_ABORTED:
      return "AbortedError: ";
    default:
      return "InternalError: ";
  }
}

std::string text_of(mr_status status, const mr_error* error) {
  return std::string("multiring: ") + kind_of(status) + (error == nullptr ? "" : error->message);
}

bool splits_rows(mr_kind kind) { return kind == MR_REDUCE_SCATTER || kind == MR_ALLTOALL; }

std::vector<int64_t> dims_of(const TF_Tensor* tensor) {
  std::vector<int64_t> dims(static_cast<size_t>(api.TF_NumDims(tensor)));
  for (size_t k = 0; k < dims.size(); ++k) dims[k] = api.TF_Dim(tensor, static_cast<int>(k));
  return dims;
}

// Tensors without elements may have no memory; to the core, a null pointer means that there is no array.
char nothing;

void* data_of(const TF_Tensor* tensor) {
  void* data = api.TF_TensorData(tensor);
  return data == nullptr ? &nothing : data;
}

constexpr size_t kFaultInFrom = size_t{1} << 20;
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14
#endif

// Large memory that TensorFlow has just got from the system has no pages yet. They are made here, on one of
// its many threads, and not by the queue's only one, for which all ranks wait. Whether it works does not
// matter.
void fault_in(void* data, size_t bytes) {
  if (bytes < kFaultInFrom) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (start + page - 1) / page * page, end = (start + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
}

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

bool Call::fail(int code, const std::string& message) {
  api.TF_SetStatus(status_, code, message.c_str());
  api.TF_OpKernelContext_Failure(context_, status_);
  return false;
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
    return fail(
        kFailedPrecondition,
        "multiring: UsageError: '" + settings_.name + "' belongs to communicator " +
            std::to_string(settings_.communicator) +
            ", which this process does not have: a function that was saved in another process has to be "
            "traced anew, after multiring.init()");
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
    return fail(kInvalidArgument, "multiring: UsageError: '" + settings_.name +
                                      "' is a scalar; it needs a first dimension to be split over ranks");
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
  operation.priority = static_cast<int>(settings_.priority);
  operation.prescale = settings_.prescale;
  operation.postscale = settings_.postscale;
  const auto place = static_cast<size_t>(index);
  operation.name = (place < settings_.labels.size() ? settings_.labels[place] : settings_.name).c_str();
  operation.dims = static_cast<int>(shape.size());
  operation.shape = shape.data();
  operation.input = data_of(input);
  if (!add_output(index, operation, dims)) return false;
  operations_.push_back(operation);
  return true;
}

bool Call::add_output(int index, mr_operation& operation, std::vector<int64_t> dims) {
  if (settings_.kind == MR_ALLGATHER || settings_.kind == MR_ALLTOALL)
    return true;  // the extent is not known yet
  TF_Tensor* output = nullptr;
  const int rank = static_cast<int>(dims.size());
  if (settings_.kind == MR_REDUCE_SCATTER) {
    const int64_t size = mr_queue_size(queue_), own = mr_queue_rank(queue_);
    dims[0] = dims[0] / size + (own < dims[0] % size ? 1 : 0);
    const int type = api.TF_TensorType(held_.back());
    const size_t bytes = dims[0] == 0 ? 0 : api.TF_TensorByteSize(held_.back());
    output = api.TF_AllocateOutput(context_, index, type, dims.data(), rank, bytes, status_);
    if (!check()) return false;
  } else {
    // TensorFlow hands the input's memory over only if nobody else holds it.
    api.TF_DeleteTensor(held_.back());
    held_.pop_back();
    int forwarded = -1;
    output = api.TF_ForwardInputOrAllocateOutput(context_, &index, 1, index, dims.data(), rank, &forwarded,
                                                 status_);
    if (!check()) return false;
    if (forwarded < 0) {
      TF_Tensor* input = nullptr;
      api.TF_GetInput(context_, index, &input, status_);
      if (!check()) {
        api.TF_DeleteTensor(output);
        return false;
      }
      held_.push_back(input);
      operation.input = data_of(input);
    } else {
      operation.input = data_of(output);
    }
  }
  held_.push_back(output);
  operation.output = data_of(output);
  operation.output_bytes = api.TF_TensorByteSize(output);
  if (operation.output != operation.input) fault_in(operation.output, operation.output_bytes);
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
    return fail(kInvalidArgument, "multiring: UsageError: splits of '" + settings_.name + "' have to be " +
                                      std::to_string(size) + " numbers of at least 0 that add up to its " +
                                      std::to_string(total) + " rows");
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
    return fail(kInvalidArgument, "multiring: UsageError: " + message);
  }
  mr_error error{};
  const mr_status status = mr_queue_submit(
      queue_, settings_.name.c_str(), operations_.data(), static_cast<int>(operations_.size()),
      static_cast<int>(settings_.priority), step_, &Call::completed, this, &error);
  return status == MR_OK || fail(code_of(status), text_of(status, &error));
}

void Call::completed(void* context, mr_status status, const mr_error* error, mr_work* const* works) {
  Call* call = static_cast<Call*>(context);
  if (status != MR_OK) {
    call->fail(code_of(status), text_of(status, error));
  } else if (call->settings_.kind == MR_ALLGATHER || call->settings_.kind == MR_ALLTOALL) {
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
