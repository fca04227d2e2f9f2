#include "device/nccl.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "device/driver.h"

namespace multiring::nccl {
namespace {

std::string_view text_of(const char* variable) {
  const char* const set = std::getenv(variable);
  return set != nullptr ? set : "";
}

std::string fill(const SharedLibrary& library, Library* table) {
  FunctionFinder find(library);
  find("ncclGetVersion", &table->get_version);
  find("ncclGetErrorString", &table->error_string);
  find("ncclGetLastError", &table->last_error);
  find("ncclGetUniqueId", &table->unique_id);
  find("ncclCommInitRankConfig", &table->init_rank);
  find("ncclCommGetAsyncError", &table->async_error);
  find("ncclCommAbort", &table->abort);
  find("ncclGroupStart", &table->group_start);
  find("ncclGroupEnd", &table->group_end);
  find("ncclAllReduce", &table->allreduce);
  find("ncclReduceScatter", &table->reduce_scatter);
  find("ncclReduce", &table->reduce);
  find("ncclAllGather", &table->allgather);
  find("ncclBroadcast", &table->broadcast);
  find("ncclSend", &table->send);
  find("ncclRecv", &table->receive);
  return find.missing();
}

}  // namespace

std::string Library::load(const SharedLibrary& library) {
  *this = {};
  const std::string missing = fill(library, this);
  if (!missing.empty()) return "has no function " + missing + ": a newer one is needed";
  if (get_version(&version) != kSuccess) return "does not tell its version";
  if (version < kMinVersion) return "version " + version_text(version) + ": 2.17 or newer is needed";
  library.keep();
  return {};
}

const Library* Library::find(std::string* why) {
  static Library library;
  static std::string reason;
  static bool usable = false;
  static std::once_flag once;
  std::call_once(once, [] {
    // It counts more than `Config`, and a call that blocks has no deadline.
    const std::string_view blocking = text_of("NCCL_COMM_BLOCKING");
    if (!blocking.empty() && blocking != "0") {
      reason = "NCCL_COMM_BLOCKING is set, with which its calls may wait for ever";
      return;
    }
    std::string no_driver;
    const cuda::Driver* const driver = cuda::Driver::find(&no_driver);
    const bool is_hip = driver != nullptr && driver->is_hip;
    const std::string names[] = {is_hip ? "librccl.so.1" : "libnccl.so.2"};
    const auto refuse = [&](const SharedLibrary& found) -> std::string {
      // Of what RCCL depends on. Streams of one HIP mean nothing to another one.
      void* const its = is_hip ? found.find("hipGetDevice") : nullptr;
      if (its != nullptr && its != reinterpret_cast<void*>(driver->get_device))
        return "it uses another HIP than this process";
      return library.load(found);
    };
    const std::vector<std::string> sites = SharedLibrary::known_sites();
    usable = SharedLibrary::open(SharedLibrary::candidates(names, "nvidia/nccl/lib", sites), refuse, &reason)
                 .has_value();
  });
  if (usable) return &library;
  *why = reason;
  return nullptr;
}

std::string version_text(int version) {
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  const int minor = version >= 10000 ? version / 100 % 100 : version / 100 % 10;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

std::optional<int> dtype_code(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kUInt8:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kUInt32:
      return 3;
    case DType::kInt64:
      return 4;
    case DType::kUInt64:
      return 5;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
      return 9;
    default:
      return std::nullopt;
  }
}

std::optional<int> op_code(const Reduction& reduction, DType dtype) {
  if (reduction.prescale != 1.0 || reduction.postscale != 1.0) return std::nullopt;
  switch (reduction.op) {
    case ReduceOp::kSum:
      return 0;
    case ReduceOp::kProduct:
      return 1;
    // Of floating-point numbers NCCL does not promise that a NaN stays.
    case ReduceOp::kMax:
      return is_floating(dtype) ? std::nullopt : std::optional(2);
    case ReduceOp::kMin:
      return is_floating(dtype) ? std::nullopt : std::optional(3);
    case ReduceOp::kAverage:  // of integers it is no sum that is divided once
      return is_floating(dtype) ? std::optional(4) : std::nullopt;
    default:
      return std::nullopt;
  }
}

Communicator::Communicator(const Library& library, std::shared_ptr<Devices> devices, int device)
    : library_(library), devices_(std::move(devices)), device_(device), process_(::getpid()) {
  const Devices::Current current(*devices_, device_);
  stream_ = devices_->take_stream(device_);
}

Communicator::~Communicator() {
  if (process_ != ::getpid()) return;  // a child of a fork has no NCCL
  try {
    if (abort(kAbortSeconds)) devices_->release_stream(device_, stream_);
  } catch (const DeviceError&) {  // the device has failed, or the driver has ended: so has what NCCL had
  }
}

void Communicator::connect(int size, int rank, const UniqueId& id) {
  size_ = size;
  rank_ = rank;
  const Devices::Current current(*devices_, device_);
  Config config;
  const Result result = library_.init_rank(&comm_, size, id, rank, &config);
  if (result != kInProgress) check(result, "ncclCommInitRankConfig");
}

bool Communicator::abort(double seconds) {
  if (comm_ == nullptr) return !is_abandoned_;
  const Deadline deadline = Deadline::after(seconds);
  std::promise<void> done;
  const std::future<void> ended = done.get_future();
  // It waits for threads of NCCL, and for kernels of the whole device, which may never end.
  const auto run = [abort = library_.abort, comm = std::exchange(comm_, nullptr), devices = devices_,
                    device = device_](std::promise<void> finished) {
    try {
      const Devices::Current current(*devices, device);
      abort(comm);
    } catch (const DeviceError&) {  // the device has failed: so has what NCCL had
    }
    finished.set_value();
  };
  is_abandoned_ = true;  // unless it ends
  try {
    std::thread(run, std::move(done)).detach();
  } catch (const std::system_error&) {  // the process may have no more threads
    return false;
  }
  is_abandoned_ = ended.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready ||
                  !devices_->reaches_end(device_, stream_, deadline.remaining());
  return !is_abandoned_;
}

bool Communicator::is_ready() {
  Result state = kSuccess;
  check(library_.async_error(comm_, &state), "ncclCommGetAsyncError");
  if (state == kInProgress) return false;
  check(state, "an operation of NCCL");
  return true;
}

Result Communicator::ask(const Call& call, int dtype, int op) {
  const auto& [function, input, output, count, peer] = call;
  switch (function) {
    case Function::kAllreduce:
      return library_.allreduce(input, output, count, dtype, op, comm_, stream_);
    case Function::kReduceScatter:
      return library_.reduce_scatter(input, output, count, dtype, op, comm_, stream_);
    case Function::kReduce:
      return library_.reduce(input, output, count, dtype, op, peer, comm_, stream_);
    case Function::kAllgather:
      return library_.allgather(input, output, count, dtype, comm_, stream_);
    case Function::kBroadcast:
      return library_.broadcast(input, output, count, dtype, peer, comm_, stream_);
    case Function::kSend:
      return library_.send(input, count, dtype, peer, comm_, stream_);
    case Function::kReceive:
      return library_.receive(output, count, dtype, peer, comm_, stream_);
  }
  return kSuccess;
}

// In a group NCCL launches them together, however small they are, and none waits for another one.
void Communicator::begin(std::span<const Call> calls, int dtype, int op) {
  static constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduceScatter", "ncclReduce",
                                           "ncclAllGather", "ncclBroadcast",     "ncclSend",
                                           "ncclRecv"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(Function::kReceive) + 1);
  const Devices::Current current(*devices_, device_);
  check(library_.group_start(), "ncclGroupStart");
  Result result = kSuccess;
  const char* name = "";
  for (const Call& call : calls) {
    name = kNames[static_cast<std::size_t>(call.function)];
    result = ask(call, dtype, op);
    if (result != kSuccess && result != kInProgress) break;
  }
  const Result ended = library_.group_end();  // which has to be called all the same
  if (result != kInProgress) check(result, name);
  if (ended != kInProgress) check(ended, "ncclGroupEnd");
}

void Communicator::check(Result result, const char* function) const {
  if (result == kSuccess) return;
  const char* const text = library_.error_string(result);
  const char* const last = comm_ != nullptr ? library_.last_error(comm_) : nullptr;
  throw DeviceError(ErrorKind::kInternal,
                    cuda::on(function, device_) + " failed: " + (text != nullptr ? text : "unknown error") +
                        " (" + std::to_string(result) + "), NCCL " + version_text(library_.version) +
                        (last != nullptr && *last != '\0' ? std::string(": ") + last : std::string()) +
                        ". NCCL_DEBUG=WARN tells more; MULTIRING_NCCL=off does without NCCL.");
}

}  // namespace multiring::nccl
