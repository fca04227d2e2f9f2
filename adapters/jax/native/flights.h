#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call.h"

namespace multiring::xla {

/// A submission between its two calls.
struct Flight {
  mr_queue* queue = nullptr;
  std::vector<const void*> places;             // y, as `start` has seen it
  std::vector<std::vector<std::byte>> inputs;  // copies of x
  bool landed = false;
  mr_status status = MR_OK;
  std::string message;
};

/// The queues of the process by the numbers that programs contain, from 1. A program that another process has
/// compiled finds this process's queue or none. Queues stay valid to the end, so entries are never taken
/// back.
class Queues {
 public:
  static Queues& instance() {
    static auto* queues = new Queues;
    return *queues;
  }

  std::int64_t add(mr_queue* queue) {
    const std::lock_guard lock(mutex_);
    queues_.push_back(queue);
    return static_cast<std::int64_t>(queues_.size());
  }

  mr_queue* find(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    if (number < 1 || static_cast<std::size_t>(number) > queues_.size())
      throw Failure(MR_USAGE, "the program belongs to communicator " + std::to_string(number) +
                                  ", which this process does not have: compile it anew, after "
                                  "multiring.init()");
    return queues_[static_cast<std::size_t>(number) - 1];
  }

 private:
  std::mutex mutex_;
  std::vector<mr_queue*> queues_;
};

/// The flights of the process by their tickets. Never destroyed: threads of a queue may outlive `main`.
class Tower {
 public:
  static Tower& instance() {
    static auto* tower = new Tower;
    return *tower;
  }

  std::uint64_t enter(const std::shared_ptr<Flight>& flight) {
    const std::lock_guard lock(mutex_);
    flights_.emplace(++last_, flight);
    return last_;
  }

  /// The step that a submission belongs to, which is counted by the first one of each step.
  std::uint64_t step(const mr_queue* queue, const std::string& counter, bool first) {
    const std::lock_guard lock(mutex_);
    std::uint64_t& count = steps_[{queue, counter}];
    return first ? ++count : count;
  }

  /// The place of a submission among those that all ranks submit in one order.
  std::uint64_t place(const mr_queue* queue) {
    const std::lock_guard lock(mutex_);
    return ++places_[queue];
  }

  void leave(std::uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    flights_.erase(ticket);
  }

  void land(Flight& flight, mr_status status, const mr_error* error) {
    const std::lock_guard lock(mutex_);
    flight.status = status;
    if (status != MR_OK) flight.message = error != nullptr ? error->message : "the operation failed";
    flight.landed = true;
    changed_.notify_all();
  }

  std::shared_ptr<Flight> wait_for(std::uint64_t ticket) {
    std::unique_lock lock(mutex_);
    const auto found = flights_.find(ticket);
    if (found == flights_.end() && ticket <= forgotten_)
      throw Failure(MR_ABORTED, "the collective has ended with an earlier error of its communicator");
    if (found == flights_.end())
      throw Failure(MR_INTERNAL, "XLA has run the end of a collective without its start, or twice");
    const auto flight = found->second;
    flights_.erase(found);
    changed_.wait(lock, [&] { return flight->landed; });
    return flight;
  }

  /// A program that fails gives its memory back: nothing may be under way in it any more. What was submitted
  /// ends by itself, after an error of the communicator at once, otherwise when the peers have submitted it
  /// too or its deadline has passed. The program will not run the ends that are left: where the queue is
  /// broken, so that nobody else needs them, they are forgotten.
  void wait_for_all(const mr_queue* queue, bool broken) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      for (const auto& [ticket, flight] : flights_)
        if (flight->queue == queue && !flight->landed) return false;
      return true;
    });
    if (!broken) return;
    std::erase_if(flights_, [queue](const auto& entry) { return entry.second->queue == queue; });
    forgotten_ = last_;
  }

  std::size_t count() {
    const std::lock_guard lock(mutex_);
    return flights_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Flight>> flights_;
  std::map<std::pair<const mr_queue*, std::string>, std::uint64_t> steps_;
  std::map<const mr_queue*, std::uint64_t> places_;
  std::uint64_t last_ = 0;
  std::uint64_t forgotten_ = 0;  // tickets up to here may have been
};

using Context = std::shared_ptr<Flight>;

inline void on_done(void* context, mr_status status, const mr_error* error, mr_work* const*) {
  const std::unique_ptr<Context> flight(static_cast<Context*>(context));
  Tower::instance().land(**flight, status, error);
}

/// Submits operations whose memory the flight's program keeps; the ticket to wait for them with.
inline std::uint64_t submit(const std::shared_ptr<Flight>& flight, const std::string& name, bool ordered,
                            std::uint64_t step, const std::vector<mr_operation>& operations) {
  Tower& tower = Tower::instance();
  const std::uint64_t ticket = tower.enter(flight);
  auto context = std::make_unique<Context>(flight);
  mr_error error;
  const mr_status status = mr_queue_submit_ordered(
      flight->queue, name.c_str(), operations.data(), static_cast<int>(operations.size()), 0, step,
      ordered ? tower.place(flight->queue) : 0, on_done, context.get(), &error);
  if (status == MR_OK) {
    static_cast<void>(context.release());
    return ticket;
  }
  tower.leave(ticket);
  tower.wait_for_all(flight->queue, status == MR_ABORTED);
  throw Failure(status, error.message);
}

}  // namespace multiring::xla
