#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <vector>

namespace multiring::binding {

namespace py = pybind11;

/// Which gradients of a round have arrived, and which buckets are complete: the part of the gradient reducer
/// that runs for each gradient, in the middle of a backward pass. Hooks of adapters call it without Python.
class Arrivals {
 public:
  /// What `mark` has found; the reducer in Python compares numbers.
  enum Found : int { kWaits = 0, kComplete = 1, kSecond = 2 };
  /// Of the states of `GradientState` in Python, those that are needed here.
  enum State : std::uint8_t { kReady = 2, kSent = 3 };

  /// states: uint8, by index, which the reducer reads and writes as well.
  explicit Arrivals(py::array_t<std::uint8_t> states)
      : states_(std::move(states)),
        state_(states_.mutable_data()),
        bucket_of_(static_cast<std::size_t>(states_.size())) {}

  void set_buckets(std::vector<std::vector<std::size_t>> buckets);
  void begin();
  void end() { open_ = false; }
  bool is_open() const { return open_; }
  /// A gradient is final for the round, which has begun.
  Found mark(std::size_t index);
  bool is_complete(std::size_t bucket) const { return pending_.at(bucket) == 0; }
  /// Whether all gradients of a bucket are ready, and have not been sent.
  bool are_ready(std::size_t bucket) const;
  /// They leave.
  void set_sent(std::size_t bucket);
  /// In which order gradients have arrived, until `stop_recording`.
  const std::vector<std::size_t>& order() const { return order_; }
  void clear_order() { order_.clear(); }
  void stop_recording() {
    recording_ = false;
    order_.clear();
  }

 private:
  py::array_t<std::uint8_t> states_;
  std::uint8_t* state_;
  std::vector<std::size_t> bucket_of_;
  std::vector<std::vector<std::size_t>> buckets_;
  std::vector<std::size_t> pending_;
  std::vector<std::size_t> order_;
  bool recording_ = true;
  bool open_ = false;
};

void bind_arrivals(py::module_& module);

}  // namespace multiring::binding
