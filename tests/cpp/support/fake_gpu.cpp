#include "support/fake_gpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

namespace multiring::testing {
namespace {

constexpr std::size_t kDeviceBytes = std::size_t{64} << 20;
using cuda::kInvalidContext;
using cuda::kInvalidHandle;
constexpr cuda::Result kCaptureUnsupported = 900;

FakeGpu* current = nullptr;
thread_local std::vector<int> contexts;  // devices, the last one is current
thread_local int capture_mode = 0;

std::uintptr_t handle_of(cuda::Stream stream) { return reinterpret_cast<std::uintptr_t>(stream); }

cuda::Context context_of(int device) {
  return reinterpret_cast<cuda::Context>(static_cast<std::uintptr_t>(device) + 1);
}

}  // namespace

/// The functions of the table. Each takes the lock first.
struct FakeDriver {
  using Lock = std::lock_guard<std::recursive_mutex>;

  static cuda::Result init(unsigned) { return cuda::kSuccess; }
  static cuda::Result version(int* version) { return *version = 13000, cuda::kSuccess; }
  static cuda::Result name(cuda::Result error, const char** text) {
    *text = error == cuda::kOutOfMemory      ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == cuda::kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                             : "CUDA_ERROR_OTHER";
    return cuda::kSuccess;
  }
  static cuda::Result text(cuda::Result, const char** text) { return *text = "as injected", cuda::kSuccess; }
  static cuda::Result device_get(cuda::Device* device, int ordinal) {
    if (ordinal < 0 || ordinal >= FakeGpu::kDevices) return cuda::kInvalidValue;
    return *device = ordinal, cuda::kSuccess;
  }
  static cuda::Result retain(cuda::Context* context, cuda::Device device) {
    const Lock lock(current->mutex_);
    *context = context_of(device);
    return current->enter("primary_context_retain");
  }
  static cuda::Result push(cuda::Context context) {
    contexts.push_back(static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1);
    return cuda::kSuccess;
  }
  static cuda::Result pop(cuda::Context* context) {
    if (contexts.empty()) return kInvalidContext;
    *context = context_of(contexts.back());
    contexts.pop_back();
    return cuda::kSuccess;
  }
  static cuda::Result exchange_mode(int* mode) {
    std::swap(*mode, capture_mode);
    return cuda::kSuccess;
  }
  static cuda::Result attributes(unsigned, cuda::PointerAttribute*, void** values, cuda::Pointer pointer) {
    auto* const address = reinterpret_cast<std::byte*>(pointer);
    const bool ours =
        address >= current->addresses_ && address < current->addresses_ + FakeGpu::kDevices * kDeviceBytes;
    *static_cast<unsigned*>(values[0]) = ours ? unsigned{cuda::kDeviceMemory} : 0;
    *static_cast<unsigned*>(values[1]) = 0;
    if (ours)
      *static_cast<int*>(values[2]) =
          static_cast<int>(static_cast<std::size_t>(address - current->addresses_) / kDeviceBytes);
    return cuda::kSuccess;
  }
  static cuda::Result stream_create(cuda::Stream* stream, unsigned) {
    const Lock lock(current->mutex_);
    if (contexts.empty()) return kInvalidContext;
    *stream = reinterpret_cast<cuda::Stream>(current->make_stream(contexts.back()));
    return current->enter("stream_create");
  }
  static cuda::Result wait_event(cuda::Stream stream, cuda::Event event, unsigned) {
    const Lock lock(current->mutex_);
    if (const cuda::Result failure = in_context(stream, "stream_wait_event")) return failure;
    const auto& point = state(event).point;
    if (point != nullptr) current->enqueue(stream, {{}, point, {}});
    return cuda::kSuccess;
  }
  static cuda::Result is_capturing(cuda::Stream stream, int* status) {
    const Lock lock(current->mutex_);
    *status = current->stream_of(handle_of(stream)).capturing ? 1 : 0;
    return current->enter("stream_is_capturing");
  }
  static cuda::Result event_create(cuda::Event* event, unsigned) {
    const Lock lock(current->mutex_);
    if (contexts.empty()) return kInvalidContext;
    current->events_.push_back(std::make_unique<FakeGpu::EventState>());
    current->events_.back()->device = contexts.back();
    *event = reinterpret_cast<cuda::Event>(current->events_.back().get());
    return current->enter("event_create");
  }
  static cuda::Result record(cuda::Event event, cuda::Stream stream) {
    const Lock lock(current->mutex_);
    if (const cuda::Result failure = in_context(stream, "event_record")) return failure;
    FakeGpu::StreamState& where = current->stream_of(handle_of(stream));
    if (state(event).device != where.device) return kInvalidHandle;
    if (where.capturing) return kCaptureUnsupported;
    state(event).point = std::make_shared<FakeGpu::Point>();
    state(event).point->late = current->lateness_;
    state(event).point->stream = &where;
    current->enqueue(stream, {{}, {}, state(event).point});
    return cuda::kSuccess;
  }
  static cuda::Result query(cuda::Event event) {
    const Lock lock(current->mutex_);
    if (contexts.empty() || contexts.back() != state(event).device) return kInvalidContext;
    if (capture_mode != cuda::kCaptureRelaxed) return kCaptureUnsupported;
    if (const cuda::Result failure = current->enter("event_query")) return failure;
    const auto point = state(event).point;
    if (point == nullptr || point->done) return cuda::kSuccess;
    if (point->late-- > 0) return cuda::kNotReady;
    return current->reach(point) ? cuda::kSuccess : cuda::kNotReady;
  }
  static cuda::Result event_synchronize(cuda::Event event) {
    const Lock lock(current->mutex_);
    if (const cuda::Result failure = current->enter("event_synchronize")) return failure;
    const auto point = state(event).point;
    return point == nullptr || current->reach(point) ? cuda::kSuccess : kInvalidHandle;
  }
  static cuda::Result host_alloc(void** memory, std::size_t bytes, unsigned) {
    const Lock lock(current->mutex_);
    if (contexts.empty()) return kInvalidContext;
    if (const cuda::Result failure = current->enter("host_alloc")) return failure;
    *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::memset(*memory, 0xab, bytes);
    current->pinned_.insert(*memory);
    return cuda::kSuccess;
  }
  static cuda::Result host_free(void* memory) {
    const Lock lock(current->mutex_);
    if (contexts.empty() || current->pinned_.erase(memory) == 0) return kInvalidContext;
    std::free(memory);
    return current->enter("host_free");
  }
  static cuda::Result memory_alloc(cuda::Pointer* memory, std::size_t bytes) {
    const Lock lock(current->mutex_);
    if (contexts.empty()) return kInvalidContext;
    if (const cuda::Result failure = current->enter("memory_alloc")) return failure;
    *memory = reinterpret_cast<cuda::Pointer>(current->allocate(contexts.back(), bytes));
    return cuda::kSuccess;
  }
  static cuda::Result memory_free(cuda::Pointer memory) {
    const Lock lock(current->mutex_);
    if (contexts.empty()) return kInvalidContext;
    return current->blocks_.erase(reinterpret_cast<std::byte*>(memory)) == 1 ? current->enter("memory_free")
                                                                             : cuda::kInvalidValue;
  }
  static cuda::Result copy_down(void* to, cuda::Pointer from, std::size_t bytes, cuda::Stream stream) {
    return copy("copy_to_host", to, current->view(reinterpret_cast<void*>(from)), bytes, stream);
  }
  static cuda::Result copy_up(cuda::Pointer to, const void* from, std::size_t bytes, cuda::Stream stream) {
    return copy("copy_to_device", current->view(reinterpret_cast<void*>(to)), from, bytes, stream);
  }

 private:
  static FakeGpu::EventState& state(cuda::Event event) {
    return *reinterpret_cast<FakeGpu::EventState*>(event);
  }
  static cuda::Result in_context(cuda::Stream stream, const char* function) {
    if (contexts.empty() || contexts.back() != current->stream_of(handle_of(stream)).device)
      return kInvalidContext;
    return current->enter(function);
  }
  static cuda::Result copy(const char* function, void* to, const void* from, std::size_t bytes,
                           cuda::Stream stream) {
    const Lock lock(current->mutex_);
    if (const cuda::Result failure = in_context(stream, function)) return failure;
    current->enqueue(stream, {[=] { std::memcpy(to, from, bytes); }, {}, {}});
    return cuda::kSuccess;
  }
};

FakeGpu::FakeGpu() {
  const std::size_t bytes = kDevices * kDeviceBytes;
  file_ = ::memfd_create("fake_gpu", MFD_CLOEXEC);
  if (file_ < 0 || ::ftruncate(file_, static_cast<off_t>(bytes)) != 0) std::abort();
  void* const untouchable = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file_, 0);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (untouchable == MAP_FAILED || memory == MAP_FAILED) std::abort();
  addresses_ = static_cast<std::byte*>(untouchable);
  memory_ = static_cast<std::byte*>(memory);
  driver_ = {.init = FakeDriver::init,
             .driver_version = FakeDriver::version,
             .error_name = FakeDriver::name,
             .error_string = FakeDriver::text,
             .device_get = FakeDriver::device_get,
             .primary_context_retain = FakeDriver::retain,
             .context_push = FakeDriver::push,
             .context_pop = FakeDriver::pop,
             .exchange_capture_mode = FakeDriver::exchange_mode,
             .pointer_attributes = FakeDriver::attributes,
             .stream_create = FakeDriver::stream_create,
             .stream_wait_event = FakeDriver::wait_event,
             .stream_is_capturing = FakeDriver::is_capturing,
             .event_create = FakeDriver::event_create,
             .event_record = FakeDriver::record,
             .event_query = FakeDriver::query,
             .event_synchronize = FakeDriver::event_synchronize,
             .host_alloc = FakeDriver::host_alloc,
             .host_free = FakeDriver::host_free,
             .memory_alloc = FakeDriver::memory_alloc,
             .memory_free = FakeDriver::memory_free,
             .copy_to_host = FakeDriver::copy_down,
             .copy_to_device = FakeDriver::copy_up};
  current = this;
}

FakeGpu::~FakeGpu() {
  for (void* memory : pinned_) std::free(memory);
  ::munmap(addresses_, kDevices * kDeviceBytes);
  ::munmap(memory_, kDevices * kDeviceBytes);
  ::close(file_);
  current = nullptr;
}

std::byte* FakeGpu::allocate(int device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::size_t& used = used_[device];
  std::byte* const made = addresses_ + static_cast<std::size_t>(device) * kDeviceBytes + used;
  used += (bytes + 255) / 256 * 256 + 256;
  if (used > kDeviceBytes) std::abort();
  blocks_.insert(made);
  return made;
}

std::uintptr_t FakeGpu::make_stream(int device) {
  const std::lock_guard lock(mutex_);
  auto made = std::make_unique<StreamState>();
  made->device = device;
  const auto handle = reinterpret_cast<std::uintptr_t>(made.get());
  streams_[handle] = std::move(made);
  return handle;
}

FakeGpu::StreamState& FakeGpu::stream_of(std::uintptr_t handle) { return *streams_.at(handle); }

void FakeGpu::enqueue(cuda::Stream stream, Step step) {
  stream_of(handle_of(stream)).steps.push_back(std::move(step));
}

void FakeGpu::launch(std::uintptr_t stream, std::function<void()> kernel, bool ends) {
  const std::lock_guard lock(mutex_);
  stream_of(stream).steps.push_back({std::move(kernel), {}, {}, ends});
}

bool FakeGpu::reach(const std::shared_ptr<Point>& point) {
  while (!point->done) {
    std::deque<Step>& steps = point->stream->steps;
    if (!steps.front().ends) return false;
    if (steps.front().waits_for != nullptr && !reach(steps.front().waits_for)) return false;
    const Step step = std::move(steps.front());
    steps.pop_front();
    if (step.work) step.work();
    if (step.reaches != nullptr) step.reaches->done = true;
  }
  return true;
}

void FakeGpu::synchronize(std::uintptr_t stream) {
  const std::lock_guard lock(mutex_);
  auto end = std::make_shared<Point>();
  end->stream = &stream_of(stream);
  end->stream->steps.push_back({{}, {}, end});
  if (!reach(end)) std::abort();
}

void FakeGpu::set_capturing(std::uintptr_t stream, bool capturing) {
  const std::lock_guard lock(mutex_);
  stream_of(stream).capturing = capturing;
}

void FakeGpu::fail_next(const std::string& function, cuda::Result result) {
  const std::lock_guard lock(mutex_);
  failures_[function] = result;
}

int FakeGpu::calls(const std::string& function) {
  const std::lock_guard lock(mutex_);
  return calls_[function];
}

cuda::Result FakeGpu::enter(const char* function) {
  ++calls_[function];
  const auto found = failures_.find(function);
  if (found == failures_.end()) return cuda::kSuccess;
  const cuda::Result result = found->second;
  failures_.erase(found);
  return result;
}

}  // namespace multiring::testing
