#pragma once

#include <cstdint>

#include "transport/tcp/descriptor_table.h"

namespace multiring::tcp {

/// What hears of a descriptor's events.
class EventSink {
 public:
  virtual void on_events(std::uint32_t events) = 0;

 protected:
  ~EventSink() = default;
};

/// Waits for events of many descriptors at once (epoll). A descriptor's events are told when they begin, not
/// as long as they last: who is told remembers it until the kernel says that nothing is left.
class Poller {
 public:
  explicit Poller(DescriptorTable& descriptors);

  /// Adding a descriptor again changes who hears of it, and tells what is there.
  void add(const Descriptor& descriptor, EventSink& sink);
  /// The same; false, with errno set, instead of an error.
  bool try_add(const Descriptor& descriptor, EventSink& sink);
  /// Before the sink goes. Closing the descriptor is not enough: a fork of the process may hold it open.
  void remove(const Descriptor& descriptor);
  /// Sleeps until there are events, at most `milliseconds`; what was found is told by `tell`. Another thread
  /// may change what is waited for meanwhile.
  void sleep(int milliseconds);
  void tell();
  /// Ends a sleep. Any thread.
  void wake();

 private:
  static constexpr int kMaxEvents = 64;
  struct Found {
    EventSink* sink;
    std::uint32_t events;
  };

  Descriptor epoll_;
  Descriptor wake_;
  Found found_[kMaxEvents];
  int found_count_ = 0;
  int told_ = 0;  // of those found
};

}  // namespace multiring::tcp
