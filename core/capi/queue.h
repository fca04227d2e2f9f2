#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "base/export.h"
#include "engine/named_queue.h"

/// A named queue of the C ABI. It outlives the queue itself: its address stays valid, and later submissions
/// are refused.
struct MULTIRING_API mr_queue {
 public:
  explicit mr_queue(std::shared_ptr<multiring::NamedQueue> queue);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  bool is_closed() const;
  /// By an error of any rank, or closed.
  bool is_broken() const;
  /// Raises an error of kind aborted after close, of kind usage in a forked child.
  std::shared_ptr<multiring::NamedQueue> get() const;
  /// Closes and releases the queue. False: called on a thread of the queue, so only begun.
  bool close();
  /// To be called in a forked child.
  void abandon();

 private:
  const int rank_;
  const int size_;
  const std::string name_;
  std::atomic<bool> abandoned_{false};
  mutable std::mutex mutex_;  // guards queue_; no other lock is taken while it is held
  std::shared_ptr<multiring::NamedQueue> queue_;
};
