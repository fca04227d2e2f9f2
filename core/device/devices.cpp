#include "device/devices.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <iterator>
#include <utility>

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

Devices::Current::Current(Devices& devices, int device) : driver_(devices.driver()) {
  driver_.check(driver_.context_push(devices.get(device).context), cuda::on("cuCtxPushCurrent", device));
}

Devices::Current::~Current() {
  cuda::Context popped = nullptr;
  driver_.context_pop(&popped);
}

Devices::Device& Devices::get(int device) {
  const std::lock_guard lock(mutex_);
  const auto found = devices_.find(device);
  // An element of a map stays where it is.
  return found != devices_.end() ? found->second : devices_.emplace(device, open(device)).first->second;
}

Devices::Device Devices::open(int device) const {
  Device opened;
  cuda::Device handle = 0;
  driver_.check(driver_.device_get(&handle, device), cuda::on("cuDeviceGet", device));
  // Never released: the libraries that made the arrays use the same context.
  driver_.check(driver_.primary_context_retain(&opened.context, handle),
                cuda::on("cuDevicePrimaryCtxRetain", device));
  driver_.check(driver_.context_push(opened.context), cuda::on("cuCtxPushCurrent", device));
  cuda::Result result = driver_.stream_create(&opened.down, cuda::kStreamNonBlocking);
  if (result == cuda::kSuccess) result = driver_.stream_create(&opened.up, cuda::kStreamNonBlocking);
  cuda::Context popped = nullptr;
  driver_.context_pop(&popped);
  driver_.check(result, cuda::on("cuStreamCreate", device));
  return opened;
}

void Devices::locate(Buffer& buffer) const {
  unsigned type = 0;
  unsigned managed = 0;
  int ordinal = -1;
  cuda::PointerAttribute attributes[] = {cuda::kMemoryType, cuda::kIsManaged, cuda::kDeviceOrdinal};
  void* values[] = {&type, &managed, &ordinal};
  driver_.check(driver_.pointer_attributes(static_cast<unsigned>(std::size(attributes)), attributes, values,
                                           reinterpret_cast<cuda::Pointer>(buffer.address)),
                "cuPointerGetAttributes");
  buffer.kind = managed != 0                  ? MemoryKind::kManaged
                : type == cuda::kDeviceMemory ? MemoryKind::kDevice
                : type == cuda::kHostMemory   ? MemoryKind::kPinnedHost
                                              : MemoryKind::kHost;
  buffer.device = buffer.kind == MemoryKind::kHost ? -1 : ordinal;
}

// Memory that is kept would keep this, and this keeps the memory.
std::shared_ptr<std::byte> Devices::share(int device, std::byte* memory, std::size_t bytes) {
  return {memory, [weak = weak_from_this(), device, bytes](std::byte* back) {
            if (const auto self = weak.lock()) self->take_back(device, back, bytes);
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
  const Current current(*this, device);
  void* made = nullptr;
  driver_.check(driver_.host_alloc(&made, size, cuda::kHostAllocPortable),
                "cuMemHostAlloc of " + std::to_string(size) + " bytes of pinned host memory");
  return share(device, static_cast<std::byte*>(made), size);
}

void Devices::take_back(int device, std::byte* memory, std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (idle_bytes_ + bytes <= kMaxIdleBytes) {
      idle_bytes_ += bytes;
      idle_.emplace(bytes, memory);
      return;
    }
  }
  try {
    const Current current(*this, device);
    driver_.host_free(memory);
  } catch (const DeviceError&) {  // the device has failed, or the driver has ended: so has its memory
  }
}

void Devices::keep_until(int device, cuda::Event event, std::vector<std::shared_ptr<std::byte>> memory) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({device, event, std::move(memory)});
}

void Devices::release_kept() {
  std::vector<Kept> released;  // without the lock, which giving memory back takes
  {
    const std::lock_guard lock(mutex_);
    const auto complete = [this](const Kept& kept) {
      return driver_.event_query(kept.event) != cuda::kNotReady;
    };
    const auto first = std::stable_partition(kept_.begin(), kept_.end(), std::not_fn(complete));
    std::move(first, kept_.end(), std::back_inserter(released));
    kept_.erase(first, kept_.end());
  }
  for (const Kept& kept : released) release_event(kept.device, kept.event);
}

std::shared_ptr<std::byte> Devices::device_memory(int device, std::size_t bytes) {
  const Current current(*this, device);
  cuda::Pointer made = 0;
  driver_.check(driver_.memory_alloc(&made, std::max<std::size_t>(bytes, 1)),
                cuda::on("cuMemAlloc", device) + " of " + std::to_string(bytes) + " bytes");
  return {reinterpret_cast<std::byte*>(made), [self = shared_from_this(), device](std::byte* memory) {
            try {
              const Current its(*self, device);
              self->driver_.memory_free(reinterpret_cast<cuda::Pointer>(memory));
            } catch (const DeviceError&) {  // the process ends, and the driver has ended before
            }
          }};
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
