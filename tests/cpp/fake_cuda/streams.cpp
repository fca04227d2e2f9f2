// What the streams of a FakeMachine do, and when.

#include <algorithm>
#include <cstring>
#include <utility>

#include "fake_cuda/machine.h"

namespace multiring::testing {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uintptr_t kLastDefaultStream = 2;  // CU_STREAM_PER_THREAD
constexpr std::chrono::microseconds kPause(20);
constexpr int kMaxPause = 200;                       // microseconds, of a stream's thread
constexpr double kSpeeds[] = {1, 1, 0.25, 1. / 64};  // some streams are far behind the others
constexpr int kVeryLate = 1000;                      // queries
constexpr std::size_t kWorthDividing = 2;            // bytes of a copy, of which parts may be seen

}  // namespace

FakeMachine::Stream& FakeMachine::make_stream(int device) {
  Stream& stream = *streams_.emplace_back(std::make_unique<Stream>());
  stream.device = device;
  draw_speed(stream);
  start_thread(stream);
  return stream;
}

FakeMachine::Stream* FakeMachine::find_stream(std::uintptr_t handle, int device) {
  if (handle <= kLastDefaultStream) {
    Stream*& found = defaults_.at(static_cast<std::size_t>(device));
    if (found == nullptr) found = &make_stream(device);
    return found;
  }
  const auto is_this = [handle](const auto& each) {
    return reinterpret_cast<std::uintptr_t>(each.get()) == handle;
  };
  const auto found = std::ranges::find_if(streams_, is_this);
  return found == streams_.end() ? nullptr : found->get();
}

FakeMachine::Event& FakeMachine::make_event(int device) {
  events_.push_back(std::make_unique<Event>());
  events_.back()->device = device;
  return *events_.back();
}

void FakeMachine::enqueue(Stream& stream, Step step) {
  stream.steps.push_back(std::move(step));
  changed_.notify_all();
}

bool FakeMachine::enqueue_copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  const auto fits = [&](const void* memory) {
    const Block* const block = block_of(memory);
    return block == nullptr || block == block_of(static_cast<const std::byte*>(memory) + bytes - 1);
  };
  if (bytes == 0) return true;
  if (!fits(to) || !fits(from)) return false;
  const bool is_ours[] = {block_of(to) != nullptr, block_of(from) != nullptr};
  const auto copy = [=, this, device = stream.device](std::size_t begin, std::size_t end) {
    if (is_ours[0] != (block_of(to) != nullptr) || is_ours[1] != (block_of(from) != nullptr)) {
      misuse_ = "memory of a copy that was still to come has been freed";
      return fail_device(device, cuda::kIllegalAddress);
    }
    std::memcpy(view(to) + begin, view(from) + begin, end - begin);
  };
  const std::size_t half = progress_ == Progress::kLate || bytes < kWorthDividing ? 0 : bytes / 2;
  if (half > 0) enqueue(stream, {.work = [=] { copy(0, half); }});
  enqueue(stream, {.work = [=] { copy(half, bytes); }});
  return true;
}

void FakeMachine::wait(Stream& stream, const Event& event) {
  if (!is_ignored(Ordering::kWait) && event.point != nullptr) enqueue(stream, {.waits_for = event.point});
}

void FakeMachine::record(Stream& stream, Event& event) {
  event.point = std::make_shared<Point>();
  event.point->late = lateness_;
  event.point->stream = &stream;
  const bool is_of_late_thread = std::this_thread::get_id() == late_thread_;
  if (is_of_late_thread) event.point->late = kVeryLate;
  if (is_ignored(Ordering::kRecord) || (is_of_late_thread && own_records_-- == 0))
    event.point->done = true;
  else
    enqueue(stream, {.reaches = event.point});
}

std::shared_ptr<FakeMachine::Point> FakeMachine::end_of(Stream& stream) {
  auto end = std::make_shared<Point>();
  end->stream = &stream;
  enqueue(stream, {.reaches = end});
  return end;
}

bool FakeMachine::is_complete(const Event& event) {
  const auto point = event.point;
  if (point == nullptr || point->done) return true;
  if (progress_ != Progress::kLate || point->late-- > 0) return false;
  return reach(point);
}

bool FakeMachine::await(const std::shared_ptr<Point>& point, std::unique_lock<std::recursive_mutex>& lock) {
  while (point != nullptr && !point->done) {
    if (progress_ == Progress::kLate) reach(point);
    const bool some = progress_ == Progress::kSeeded && run_random(1);
    if (point->done) break;
    if (never_comes(point)) return false;
    if (some) continue;
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    lock.lock();
  }
  return true;
}

bool FakeMachine::is_ready(Step& step) {
  if (!step.ends || (step.waits_for != nullptr && !step.waits_for->done)) return false;
  if (step.is_possible && !step.is_possible()) return false;
  if (step.seconds == 0) return true;
  const Clock::time_point now = Clock::now();
  if (step.begun == Clock::time_point{}) step.begun = now;
  return now - step.begun >= std::chrono::duration<double>(step.seconds);
}

void FakeMachine::run_first(Stream& stream) {
  const Step step = std::move(stream.steps.front());
  stream.steps.pop_front();
  if (step.work) step.work();
  if (step.reaches != nullptr) step.reaches->done = true;
}

/// Does what comes before a point; false: something there has not ended.
bool FakeMachine::reach(const std::shared_ptr<Point>& point) {
  while (!point->done) {
    Stream& stream = *point->stream;
    const std::shared_ptr<Point> before = stream.steps.front().waits_for;
    if (before != nullptr && !reach(before)) return false;
    if (!is_ready(stream.steps.front())) return false;
    run_first(stream);
  }
  return true;
}

bool FakeMachine::never_comes(const std::shared_ptr<Point>& point) const {
  for (const Step& step : point->stream->steps) {
    if (!step.ends) return true;
    if (step.waits_for != nullptr && !step.waits_for->done && never_comes(step.waits_for)) return true;
    if (step.reaches == point) return false;
  }
  return false;
}

/// False: no stream could do any.
bool FakeMachine::run_random(int steps) {
  for (; steps > 0; --steps) {
    std::vector<Stream*> ready;
    for (const auto& stream : streams_)
      if (!stream->steps.empty() && is_ready(stream->steps.front())) ready.push_back(stream.get());
    if (ready.empty()) return false;
    Stream& drawn = *ready[random_() % ready.size()];
    if (std::bernoulli_distribution(drawn.speed)(random_)) run_first(drawn);
  }
  return true;
}

void FakeMachine::run_all() {
  for (bool some = true; some;) {
    some = false;
    for (const auto& stream : streams_)
      for (; !stream->steps.empty() && is_ready(stream->steps.front()); some = true) run_first(*stream);
  }
}

void FakeMachine::draw_speed(Stream& stream) { stream.speed = kSpeeds[random_() % std::size(kSpeeds)]; }

void FakeMachine::start_thread(Stream& stream) {
  if (progress_ != Progress::kThreads || stream.thread.joinable()) return;
  stream.thread = std::thread([this, &stream, seed = random_()] { run_thread(stream, seed); });
}

void FakeMachine::run_thread(Stream& stream, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::unique_lock lock(mutex_);
  while (!ends_) {
    changed_.wait(lock, [&] { return ends_ || (progress_ == Progress::kThreads && !stream.steps.empty()); });
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % kMaxPause));
    lock.lock();
    if (!ends_ && progress_ == Progress::kThreads && !stream.steps.empty() && is_ready(stream.steps.front()))
      run_first(stream);
  }
}

}  // namespace multiring::testing
