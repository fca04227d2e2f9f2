#include "device/devices.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "base/deadline.h"

namespace multiring {
namespace {

/// Sizes that are pinned: four for each power of two, so that blocks serve again and little is unused.
std::size_t pinned_size(std::size_t bytes) {
  constexpr std::size_t kMin = 4096;
  if (bytes <= kMin) return kMin;
  const std::size_t step = std::bit_floor(bytes - 1) / 4;
  return (bytes + step - 1) / step * step;
}

}  // namespace

std::shared_ptr<Devices> Devices::of_process(std::string* why) {
  const cuda::Driver* const driver = cuda::Driver::find(why);
  if (driver == nullptr) return nullptr;
  static auto* const devices = new std::shared_ptr<Devices>(std::make_shared<Devices>(*driver));
  return *devices;
}

std::shared_ptr<Devices> Devices::require() {
  std::string why;
  std::shared_ptr<Devices> devices = of_process(&why);
  if (devices == nullptr) throw DeviceError(ErrorKind::kUsage, "device memory without a driver: " + why);
  return devices;
}

Devices::Current::Current(Devices& devices, int device)
    : Current(devices.driver(), devices.get(device).context, device) {}

Devices::Current::Current(const cuda::Driver& driver, cuda::Context context, int device) : driver_(driver) {
  if (driver_.is_hip) {
    driver_.check(driver_.get_device(&before_), "cuGetDevice");
    driver_.check(driver_.set_device(device), cuda::on("cuSetDevice", device));
  } else {
    driver_.check(driver_.context_push(context), cuda::on("cuCtxPushCurrent", device));
  }
  driver_.exchange_capture_mode(&capture_mode_);
}

Devices::Current::~Current() {
  driver_.exchange_capture_mode(&capture_mode_);
  if (driver_.is_hip) {
    driver_.set_device(before_);
  } else {
    cuda::Context popped = nullptr;
    driver_.context_pop(&popped);
  }
}

Devices::Device& Devices::get(int device) {
  if (is_forked())
    throw DeviceError(ErrorKind::kUsage,
                      "a process that was forked from one that has used CUDA or HIP cannot use it; start "
                      "workers with spawn");
  const std::lock_guard lock(mutex_);
  const auto found = devices_.find(device);
  // An element of a map stays where it is.
  return found != devices_.end() ? found->second : devices_.emplace(device, open(device)).first->second;
}

Devices::Device Devices::open(int device) const {
  Device opened;
  if (!driver_.is_hip) {
    cuda::Device handle = 0;
    driver_.check(driver_.device_get(&handle, device), cuda::on("cuDeviceGet", device));
    // Never released: the libraries that made the arrays use the same context.
    driver_.check(driver_.primary_context_retain(&opened.context, handle),
                  cuda::on("cuDevicePrimaryCtxRetain", device));
  }
  const Current current(driver_, opened.context, device);
  for (cuda::Stream* const stream : {&opened.down, &opened.up})
    driver_.check(driver_.stream_create(stream, cuda::kStreamNonBlocking),
                  cuda::on("cuStreamCreate", device));
  return opened;
}

void Devices::locate(Buffer& buffer) const {
  unsigned type = 0;
  unsigned managed = 0;
  int ordinal = -1;
  cuda::PointerAttribute attributes[] = {cuda::kMemoryType, cuda::kIsManaged, cuda::kDeviceOrdinal};
  void* values[] = {&type, &managed, &ordinal};
  const cuda::Result result =
      driver_.pointer_attributes(static_cast<unsigned>(std::size(attributes)), attributes, values,
                                 reinterpret_cast<cuda::Pointer>(buffer.address));
  const bool is_unknown = driver_.is_hip && result == cuda::kInvalidValue;  // memory of the host
  if (is_unknown) driver_.forget();
  if (!is_unknown) driver_.check(result, "cuPointerGetAttributes");
  buffer.kind = managed != 0                  ? MemoryKind::kManaged
                : type == cuda::kDeviceMemory ? MemoryKind::kDevice
                : type == cuda::kHostMemory   ? MemoryKind::kPinnedHost
                                              : MemoryKind::kHost;
  buffer.device = buffer.kind == MemoryKind::kHost ? -1 : ordinal;
}

void Devices::refuse_stream_elsewhere(int device, cuda::Result result) {
  if (result == cuda::kInvalidContext || result == cuda::kInvalidHandle)
    throw DeviceError(ErrorKind::kUsage,
                      "the array on device " + std::to_string(device) +
                          " names a stream of another device; make its device the current one, so that its "
                          "library names a stream of that");
}

// Events of a captured stream would make the streams of copies part of the graph.
void Devices::refuse_capture(int device, cuda::Stream stream) const {
  int capturing = 0;
  const cuda::Result result = driver_.stream_is_capturing(stream, &capturing);
  if (result != cuda::kSuccess) driver_.forget();
  refuse_stream_elsewhere(device, result);
  if (capturing != 0 || cuda::is_of_capture(result))
    throw DeviceError(ErrorKind::kUsage,
                      "the stream of the array on device " + std::to_string(device) +
                          " is being captured into a graph, which an operation that needs the "
                          "host cannot be part of; call it outside of the capture");
  driver_.check(result, cuda::on("cuStreamIsCapturing", device));
}

void Devices::copy(const Buffer& to, const std::byte* from) {
  const cuda::Stream stream = driver_.stream_of(to.stream);
  const Current current(*this, to.device);
  refuse_capture(to.device, stream);
  driver_.check(driver_.copy_on_device(reinterpret_cast<cuda::Pointer>(to.address),
                                       reinterpret_cast<cuda::Pointer>(from), to.bytes, stream),
                cuda::on("cuMemcpyDtoDAsync", to.device) + " of " + std::to_string(to.bytes) + " bytes");
}

// Memory that is kept would keep this, and this keeps the memory.
std::shared_ptr<std::byte> Devices::share(int device, std::byte* memory, std::size_t bytes) {
  return {memory, [weak = weak_from_this(), device, bytes](std::byte* back) {
            if (const auto self = weak.lock(); self && !self->is_forked())
              self->take_back(device, back, bytes);
          }};
}

std::shared_ptr<std::byte> Devices::pinned(int device, std::size_t bytes) {
  release_kept();
  const std::size_t size = pinned_size(bytes);
  std::pair<std::size_t, std::byte*> taken{};
  {
    const std::lock_guard lock(mutex_);
    const auto found = idle_.lower_bound(size);
    if (found != idle_.end() && found->first <= 2 * size) {
      taken = *found;
      idle_.erase(found);
      idle_bytes_ -= taken.first;
    }
  }
  if (taken.second != nullptr) return share(device, taken.second, taken.first);
  return share(device, allocate_pinned(device, size), size);
}

std::byte* Devices::allocate_pinned(int device, std::size_t bytes) {
  const Current current(*this, device);
  void* made = nullptr;
  // HIP's is portable in any case, and coherent, so that an event tells when a copy is seen, without flags
  // only.
  const unsigned flags = driver_.is_hip ? 0 : cuda::kHostAllocPortable;
  cuda::Result result = driver_.host_alloc(&made, bytes, flags);
  if (result == cuda::kOutOfMemory) {
    driver_.forget();
    free_pinned(device, take_largest_idle(0));
    result = driver_.host_alloc(&made, bytes, flags);
  }
  driver_.check(result, "cuMemHostAlloc of " + std::to_string(bytes) + " bytes of pinned host memory");
  return static_cast<std::byte*>(made);
}

/// Until no more bytes are idle.
std::vector<std::byte*> Devices::take_largest_idle(std::size_t until) {
  std::vector<std::byte*> taken;
  const std::lock_guard lock(mutex_);
  while (idle_bytes_ > until) {
    const auto largest = std::prev(idle_.end());
    taken.push_back(largest->second);
    idle_bytes_ -= largest->first;
    idle_.erase(largest);
  }
  return taken;
}

void Devices::free_pinned(int device, std::span<std::byte* const> blocks) {
  if (blocks.empty()) return;
  try {
    const Current current(*this, device);
    for (std::byte* const block : blocks) driver_.host_free(block);
  } catch (const DeviceError&) {  // the device has failed, or the driver has ended: so has its memory
  }
}

void Devices::take_back(int device, std::byte* memory, std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    idle_bytes_ += bytes;
    idle_.emplace(bytes, memory);
  }
  free_pinned(device, take_largest_idle(kMaxIdleBytes));
}

void Devices::keep_until(int device, cuda::Event event, std::vector<std::shared_ptr<std::byte>> memory) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({device, event, std::move(memory)});
}

// Without the lock, which giving memory back takes. What cannot be told to be complete is kept.
void Devices::release_kept() {
  std::vector<Kept> kept;
  {
    const std::lock_guard lock(mutex_);
    kept.swap(kept_);
  }
  for (Kept& each : kept) {
    const Current current(*this, each.device);
    if (driver_.event_query(each.event) == cuda::kSuccess)
      release_event(each.device, each.event);
    else
      keep_until(each.device, each.event, std::move(each.memory));
  }
}

std::shared_ptr<std::byte> Devices::device_memory(int device, std::size_t bytes) {
  const Current current(*this, device);
  cuda::Pointer made = 0;
  driver_.check(driver_.memory_alloc(&made, std::max<std::size_t>(bytes, 1)),
                cuda::on("cuMemAlloc", device) + " of " + std::to_string(bytes) + " bytes");
  return {reinterpret_cast<std::byte*>(made), [self = shared_from_this(), device](std::byte* memory) {
            if (self->is_forked()) return;
            try {
              const Current its(*self, device);
              self->driver_.memory_free(reinterpret_cast<cuda::Pointer>(memory));
            } catch (const DeviceError&) {  // the process ends, and the driver has ended before
            }
          }};
}

std::byte* Devices::take_shared(int device, std::size_t bytes) {
  Device& opened = get(device);
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = opened.shared.find(bytes); found != opened.shared.end()) {
      std::byte* const taken = found->second;
      opened.shared.erase(found);
      return taken;
    }
  }
  const Current current(*this, device);
  cuda::Pointer made = 0;
  driver_.check(driver_.memory_alloc(&made, bytes),
                cuda::on("cuMemAlloc", device) + " of " + std::to_string(bytes) + " bytes");
  return reinterpret_cast<std::byte*>(made);
}

void Devices::release_shared(int device, std::size_t bytes, std::byte* memory) {
  Device& opened = get(device);
  const std::lock_guard lock(mutex_);
  opened.shared.emplace(bytes, memory);
}

cuda::Function Devices::function(int device, int number, const char* name,
                                 const std::function<std::vector<char>()>& make) {
  Device& opened = get(device);
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = opened.functions.find(number); found != opened.functions.end())
      return found->second;
  }
  const std::vector<char> image = make();  // by several threads at once, perhaps
  const Current current(*this, device);
  cuda::Module module = nullptr;  // never unloaded
  cuda::Function function = nullptr;
  driver_.check(driver_.module_load(&module, image.data()), cuda::on("cuModuleLoadData", device));
  driver_.check(driver_.module_function(&function, module, name), cuda::on("cuModuleGetFunction", device));
  const std::lock_guard lock(mutex_);
  return opened.functions.emplace(number, function).first->second;
}

bool Devices::reaches_end(int device, cuda::Stream stream, double seconds) {
  constexpr std::chrono::milliseconds kPause(1);
  const Current current(*this, device);
  const cuda::Event end = take_event(device);
  if (driver_.event_record(end, stream) != cuda::kSuccess) return driver_.forget(), false;
  const Deadline deadline = Deadline::after(seconds);
  while (driver_.event_query(end) == cuda::kNotReady) {
    if (deadline.expired()) return false;  // the event stays in use
    std::this_thread::sleep_for(kPause);
  }
  driver_.forget();  // if the device has failed
  release_event(device, end);
  return true;
}

cuda::Stream Devices::take_stream(int device) {
  Device& opened = get(device);
  {
    const std::lock_guard lock(mutex_);
    if (!opened.streams.empty()) {
      cuda::Stream stream = opened.streams.back();
      opened.streams.pop_back();
      return stream;
    }
  }
  cuda::Stream stream = nullptr;
  driver_.check(driver_.stream_create(&stream, cuda::kStreamNonBlocking), cuda::on("cuStreamCreate", device));
  return stream;
}

void Devices::release_stream(int device, cuda::Stream stream) {
  Device& opened = get(device);
  const std::lock_guard lock(mutex_);
  opened.streams.push_back(stream);
}

cuda::Event Devices::take_event(int device) {
  Device& opened = get(device);
  {
    const std::lock_guard lock(mutex_);
    if (!opened.events.empty()) {
      cuda::Event event = opened.events.back();
      opened.events.pop_back();
      return event;
    }
  }
  cuda::Event event = nullptr;
  driver_.check(driver_.event_create(&event, cuda::kEventDisableTiming), cuda::on("cuEventCreate", device));
  return event;
}

void Devices::release_event(int device, cuda::Event event) {
  Device& opened = get(device);
  const std::lock_guard lock(mutex_);
  opened.events.push_back(event);
}

}  // namespace multiring
