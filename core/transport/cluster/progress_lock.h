#pragma once

#include <atomic>
#include <thread>

namespace multiring {

/// Who drives a network: one thread at a time. Not a mutex, since a thread that drives may come here again
/// from a callback of its wait, and has to learn that the seat is taken.
class DriverSeat {
 public:
  class Ride {
   public:
    explicit Ride(DriverSeat& seat)
        : seat_(seat), taken_(!seat.taken_.test_and_set(std::memory_order_acquire)) {}
    ~Ride() {
      if (taken_) seat_.taken_.clear(std::memory_order_release);
    }
    Ride(const Ride&) = delete;
    Ride& operator=(const Ride&) = delete;
    explicit operator bool() const { return taken_; }

   private:
    DriverSeat& seat_;
    const bool taken_;
  };

 private:
  std::atomic_flag taken_;
};

}  // namespace multiring
