#include "transport/tcp/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "base/error.h"

namespace multiring::tcp {

Poller::Poller(DescriptorTable& descriptors) {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) throw_errno("epoll_create1");
  epoll_ = descriptors.adopt(std::move(epoll));
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) throw_errno("eventfd");
  wake_ = descriptors.adopt(std::move(event));
  epoll_event interest{};
  interest.events = EPOLLIN;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &interest) != 0) throw_errno("epoll_ctl");
}

void Poller::add(const Descriptor& descriptor, EventSink& sink) {
  if (!try_add(descriptor, sink)) throw_errno("epoll_ctl");
}

bool Poller::try_add(const Descriptor& descriptor, EventSink& sink) {
  epoll_event interest{};
  interest.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  interest.data.ptr = &sink;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor.get(), &interest) == 0) return true;
  return errno == EEXIST && ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, descriptor.get(), &interest) == 0;
}

void Poller::remove(const Descriptor& descriptor) {
  // It may not have been added yet.
  if (descriptor) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, descriptor.get(), nullptr);
}

void Poller::sleep(int milliseconds) {
  if (dispatched_ < event_count_) return;  // a sink has raised: the kernel reports the rest only once
  epoll_event events[kMaxEvents];
  event_count_ = dispatched_ = 0;
  const int count = ::epoll_wait(epoll_.get(), events, kMaxEvents, milliseconds);
  if (count < 0 && errno != EINTR) throw_errno("epoll_wait");
  for (int i = 0; i < count; ++i) {
    auto* sink = static_cast<EventSink*>(events[i].data.ptr);
    if (sink != nullptr) {
      events_[event_count_++] = {sink, events[i].events};
    } else {
      std::uint64_t times = 0;
      [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &times, sizeof times);
    }
  }
}

void Poller::dispatch() {
  while (dispatched_ < event_count_) {
    const Event& next = events_[dispatched_++];
    next.sink->on_events(next.events);
  }
}

void Poller::wake() {
  const std::uint64_t once = 1;
  [[maybe_unused]] const ssize_t put = ::write(wake_.get(), &once, sizeof once);
}

}  // namespace multiring::tcp
