#pragma once

#include <cstdint>

#include "transport/tcp/descriptor_table.h"

namespace multiring::tcp {

class EventSink {
 public:
  virtual void on_events(std::uint32_t events) = 0;

 protected:
  ~EventSink() = default;
};

/// Waits for events of many descriptors (epoll, edge-triggered).
class Poller {
 public:
  explicit Poller(DescriptorTable& descriptors);

  /// Adding a descriptor again replaces its sink, which is notified of what is there.
  void add(const Descriptor& descriptor, EventSink& sink);
  /// As `add`, but returns false, with errno set, instead of raising.
  bool try_add(const Descriptor& descriptor, EventSink& sink);
  /// Before the sink is destroyed. Closing the descriptor is not enough: a fork may hold it open.
  void remove(const Descriptor& descriptor);
  /// Sleeps until there are events for `dispatch`, at most `milliseconds`. Others may add descriptors.
  void sleep(int milliseconds);
  void dispatch();
  /// Ends a sleep. Any thread.
  void wake();

 private:
  static constexpr int kMaxEvents = 64;
  struct Event {
    EventSink* sink;
    std::uint32_t events;
  };

  Descriptor epoll_;
  Descriptor wake_;
  Event events_[kMaxEvents];
  int event_count_ = 0;
  int dispatched_ = 0;  // of these
};

}  // namespace multiring::tcp
