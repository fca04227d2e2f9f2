#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/export.h"
#include "engine/named/named_queue.h"

/// A named queue of the C ABI. It outlives the queue itself: its address stays valid, and later submissions
/// are refused.
struct MULTIRING_API mr_queue {
 public:
  explicit mr_queue(std::shared_ptr<multiring::NamedQueue> queue);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  const std::string& host() const { return host_; }
  bool is_closed() const;
  /// By an error of any rank, or closed.
  bool is_broken() const;
  /// Raises an error of kind aborted after close, of kind usage in a forked child.
  std::shared_ptr<multiring::NamedQueue> get() const;
  /// Closes and releases the queue. False: called on a thread of the queue, so only begun.
  bool close();
  /// To be called in a forked child.
  void abandon();

  /// Keeps an error, since a framework hands on no more than a text. Returns its number, which no other error
  /// of this process has; that of an equal one, where there is one, for all that was pending ends with the
  /// first error.
  std::int64_t keep(const multiring::Error& error);
  /// The error with this number, if it is one of the last.
  std::optional<multiring::Error> kept(std::int64_t number) const;

 private:
  const int rank_;
  const int size_;
  const std::string name_;
  const std::string host_;
  std::atomic<bool> abandoned_{false};
  mutable std::mutex mutex_;  // guards all below; no other lock is taken while it is held
  std::shared_ptr<multiring::NamedQueue> queue_;
  std::deque<std::pair<std::int64_t, multiring::Error>> errors_;  // the last ones, by their numbers
};
