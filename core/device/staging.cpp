#include "device/staging.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

namespace multiring {
// Of an operation that did not run, or failed: copies may still be under way.
Staging::~Staging() {
  try {
    start();
    finish();
  } catch (const DeviceError&) {
    // No event tells when a copy is done that may be under way, so its memory never serves again.
    new std::vector<std::shared_ptr<std::byte>>(memory_);
  }
  for (const Recorded& each : arrival_) devices_->keep_until(each.device, each.event, memory_);
  for (const Recorded& each : before_) devices_->release_event(each.device, each.event);
}

Staging::Recorded Staging::record(int device, cuda::Stream stream) {
  const Recorded recorded{device, stream, devices_->take_event(device)};
  const cuda::Result result = devices_->driver().event_record(recorded.event, stream);
  if (result != cuda::kSuccess) devices_->release_event(device, recorded.event);
  if (result != cuda::kSuccess) devices_->driver().forget();
  if (devices_->driver().is_hip) Devices::refuse_stream_elsewhere(device, result);
  devices_->driver().check(result, cuda::on("cuEventRecord", device));
  return recorded;
}

void Staging::order_after(const Buffer& array) {
  const cuda::Stream stream = devices_->driver().stream_of(array.stream);
  const auto same = [&](const Recorded& each) {
    return each.device == array.device && each.stream == stream;
  };
  if (std::ranges::any_of(before_, same)) return;
  const Devices::Current current(*devices_, array.device);
  devices_->refuse_capture(array.device, stream);
  before_.push_back(record(array.device, stream));
  if (devices_->driver().is_hip && stream != nullptr) continue_on_own_stream(before_.back());
}

void Staging::continue_on_own_stream(Recorded& before) {
  const cuda::Stream own = devices_->down(before.device);
  devices_->driver().check(devices_->driver().stream_wait_event(own, before.event, 0),
                           cuda::on("cuStreamWaitEvent", before.device));
  const cuda::Event event = record(before.device, own).event;
  devices_->release_event(before.device, std::exchange(before.event, event));
}

void Staging::order_before(int device, cuda::Stream stream) {
  behind_.emplace_back(device, stream);
  const Devices::Current current(*devices_, device);
  const auto wait_for = [&](const Recorded& each) {
    devices_->driver().check(devices_->driver().stream_wait_event(stream, each.event, 0),
                             cuda::on("cuStreamWaitEvent", device));
  };
  std::ranges::for_each(before_, wait_for);
  std::ranges::for_each(arrival_, wait_for);
}

void Staging::hold_back() noexcept {
  for (const auto& [device, stream] : behind_) {
    try {
      const Devices::Current current(*devices_, device);
      const Recorded end = record(device, stream);
      for (const Recorded& before : before_)
        if (devices_->driver().stream_wait_event(before.stream, end.event, 0) != cuda::kSuccess)
          devices_->driver().forget();
      devices_->release_event(device, end.event);
    } catch (const DeviceError&) {  // the device has failed: nothing is written any more
    }
  }
}

std::byte* Staging::reserve(const Buffer& array) {
  order_after(array);
  return memory_.emplace_back(devices_->pinned(array.device, array.bytes)).get();
}

void Staging::copy_to_host(const Buffer& array, std::byte* to) {
  order_after(array);
  const Devices::Current current(*devices_, array.device);
  const cuda::Driver& driver = devices_->driver();
  const cuda::Stream down = devices_->down(array.device);
  for (Recorded& before : before_) {
    if (before.device != array.device || before.down_waits) continue;
    driver.check(driver.stream_wait_event(down, before.event, 0),
                 cuda::on("cuStreamWaitEvent", array.device));
    before.down_waits = true;
  }
  if (std::ranges::find(down_, array.device) == down_.end()) down_.push_back(array.device);
  const std::size_t part = part_bytes(array.bytes);
  for (std::size_t begin = 0; begin < array.bytes; begin += part) {
    const std::size_t bytes = std::min(part, array.bytes - begin);
    const auto from = reinterpret_cast<cuda::Pointer>(array.address + begin);
    driver.check(driver.copy_to_host(to + begin, from, bytes, down),
                 cuda::on("cuMemcpyDtoHAsync", array.device) + " of " + std::to_string(bytes) + " bytes");
    asked_ += bytes;
    if (begin + bytes == array.bytes) return;  // `start` records that
    arrival_.push_back(record(array.device, down));
    arrival_.back().end = asked_;
  }
}

void Staging::start() {
  while (!down_.empty()) {
    const int device = down_.back();
    const Devices::Current current(*devices_, device);
    arrival_.push_back(record(device, devices_->down(device)));
    down_.pop_back();
    arrival_.back().end = down_.empty() ? kAll : arrived_;  // of several devices none tells by itself
  }
}

bool Staging::arrived(std::size_t bytes) {
  for (Recorded& before : before_) {
    if (before.is_complete) continue;
    const Devices::Current current(*devices_, before.device);
    const cuda::Result result = devices_->driver().event_query(before.event);
    if (result == cuda::kNotReady) return false;
    devices_->driver().check(result, cuda::on("the work before the operation", before.device));
    before.is_complete = true;
  }
  while (!arrival_.empty() && arrived_ < bytes) {
    const Recorded& arrival = arrival_.front();
    const Devices::Current current(*devices_, arrival.device);
    const cuda::Result result = devices_->driver().event_query(arrival.event);
    if (result == cuda::kNotReady) return false;
    devices_->driver().check(result, cuda::on("the copy to the host", arrival.device));
    devices_->release_event(arrival.device, arrival.event);
    arrived_ = std::max(arrived_, arrival.end);
    arrival_.pop_front();
  }
  return true;
}

void Staging::await(const std::function<void()>& check) {
  constexpr std::chrono::microseconds kPause(20);
  constexpr int kBetweenChecks = 250;
  for (int looks = 1; !arrived(); ++looks) {
    std::this_thread::sleep_for(kPause);
    if (looks % kBetweenChecks == 0) check();
  }
}

void Staging::read(const Buffer& array, void* to, const std::function<void()>& check) {
  std::byte* const memory = reserve(array);
  copy_to_host(array, memory);
  start();
  await(check);
  std::memcpy(to, memory, array.bytes);
}

void Staging::copy_back(const Buffer& array, const std::byte* from, std::size_t bytes) {
  const Devices::Current current(*devices_, array.device);
  const cuda::Driver& driver = devices_->driver();
  const cuda::Stream up = devices_->up(array.device);
  if (std::ranges::find(up_, array.device) == up_.end()) {
    up_.push_back(array.device);
    for (const Recorded& before : before_) {
      if (before.is_complete) continue;  // as of every operation that has waited for `arrived`
      driver.check(driver.stream_wait_event(up, before.event, 0),
                   cuda::on("cuStreamWaitEvent", array.device));
    }
  }
  if (bytes > 0)
    driver.check(driver.copy_to_device(reinterpret_cast<cuda::Pointer>(array.address), from, bytes, up),
                 cuda::on("cuMemcpyHtoDAsync", array.device) + " of " + std::to_string(bytes) + " bytes");
}

void Staging::finish() {
  for (const int device : up_) {
    const Devices::Current current(*devices_, device);
    const Recorded done = record(device, devices_->up(device));
    const cuda::Result result = devices_->driver().event_synchronize(done.event);
    devices_->release_event(device, done.event);
    devices_->driver().check(result, cuda::on("the copy to the device", device));
  }
  up_.clear();
}

}  // namespace multiring
