#pragma once

#include <unistd.h>

#include <atomic>
#include <deque>
#include <utility>
#include <vector>

#include "base/unique_fd.h"

namespace multiring::tcp {

/// The descriptors of a network, so that a fork of the process can close all of them at any moment: what
/// another thread was changing when the process was forked stays as it was, and no lock is ever free again.
class DescriptorTable {
 private:
  struct Place {
    std::atomic<int> fd{kNone};
    Place* next = nullptr;  // written before the place can be reached
  };

 public:
  /// Owns a descriptor that stands in the table.
  class Descriptor {
   public:
    Descriptor() = default;
    Descriptor(Descriptor&& other) noexcept
        : table_(other.table_), place_(std::exchange(other.place_, nullptr)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
      if (this != &other) {
        reset();
        table_ = other.table_;
        place_ = std::exchange(other.place_, nullptr);
      }
      return *this;
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() { reset(); }

    // Relaxed here and below: the number alone matters, and a fork sees memory as its thread does.
    int get() const { return place_ == nullptr ? kNone : place_->fd.load(std::memory_order_relaxed); }
    explicit operator bool() const { return get() >= 0; }
    void reset() {
      if (place_ == nullptr) return;
      // Out of the table before it is closed: a fork must not close a number that is somebody else's by then.
      const UniqueFd owned(place_->fd.exchange(kNone, std::memory_order_relaxed));
      table_->free_.push_back(std::exchange(place_, nullptr));
    }

   private:
    friend class DescriptorTable;
    Descriptor(DescriptorTable* table, Place* place) : table_(table), place_(place) {}
    DescriptorTable* table_ = nullptr;
    Place* place_ = nullptr;
  };

  DescriptorTable() = default;
  DescriptorTable(const DescriptorTable&) = delete;
  DescriptorTable& operator=(const DescriptorTable&) = delete;

  /// One thread at a time takes descriptors in and lets go of them.
  Descriptor adopt(UniqueFd fd) {
    if (free_.empty()) {
      Place& added = places_.emplace_back();
      added.next = first_.load(std::memory_order_relaxed);
      // Release: a fork follows this pointer to a whole place.
      first_.store(&added, std::memory_order_release);
      free_.push_back(&added);
    }
    Place* place = free_.back();
    free_.pop_back();
    place->fd.store(fd.release(), std::memory_order_relaxed);
    return {this, place};
  }
  /// In a fork of the process. Takes no lock and no memory.
  void close_all() {
    for (Place* place = first_.load(std::memory_order_acquire); place != nullptr; place = place->next) {
      const int fd = place->fd.exchange(kNone, std::memory_order_relaxed);
      if (fd >= 0) ::close(fd);
    }
  }

 private:
  static constexpr int kNone = -1;
  std::deque<Place> places_;  // which leaves its elements where they are
  std::vector<Place*> free_;
  std::atomic<Place*> first_{nullptr};
};

using Descriptor = DescriptorTable::Descriptor;

}  // namespace multiring::tcp
