#pragma once

#include <unistd.h>

#include <atomic>
#include <deque>
#include <utility>
#include <vector>

#include "base/immovable.h"
#include "base/unique_fd.h"

namespace multiring::tcp {

/// The descriptors of a network, for a fork of the process to close them at any moment. A fork cannot take
/// locks, and finds what another thread was changing half changed.
class DescriptorTable : Immovable {
 private:
  struct Slot {
    std::atomic<int> fd{kNone};
    Slot* next = nullptr;  // written before the slot can be reached
  };

 public:
  /// Owns a descriptor of the table.
  class Descriptor {
   public:
    Descriptor() = default;
    Descriptor(Descriptor&& other) noexcept
        : table_(other.table_), slot_(std::exchange(other.slot_, nullptr)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
      if (this != &other) {
        reset();
        table_ = other.table_;
        slot_ = std::exchange(other.slot_, nullptr);
      }
      return *this;
    }
    ~Descriptor() { reset(); }

    // Relaxed here and below: only the number matters, and a fork sees memory as the forking thread does.
    int get() const { return slot_ == nullptr ? kNone : slot_->fd.load(std::memory_order_relaxed); }
    explicit operator bool() const { return get() >= 0; }
    void reset() {
      if (slot_ == nullptr) return;
      // Out of the table before it is closed: a fork must not close a number that is in use again.
      const UniqueFd owned(slot_->fd.exchange(kNone, std::memory_order_relaxed));
      table_->free_.push_back(std::exchange(slot_, nullptr));
    }

   private:
    friend class DescriptorTable;
    Descriptor(DescriptorTable* table, Slot* slot) : table_(table), slot_(slot) {}
    DescriptorTable* table_ = nullptr;
    Slot* slot_ = nullptr;
  };

  DescriptorTable() = default;

  /// One thread at a time adopts and resets descriptors.
  Descriptor adopt(UniqueFd fd) {
    if (free_.empty()) {
      Slot& added = slots_.emplace_back();
      added.next = first_.load(std::memory_order_relaxed);
      // Release: a fork follows this pointer to an initialised slot.
      first_.store(&added, std::memory_order_release);
      free_.push_back(&added);
    }
    Slot* slot = free_.back();
    free_.pop_back();
    slot->fd.store(fd.release(), std::memory_order_relaxed);
    return {this, slot};
  }
  /// In a fork of the process. Takes no lock and no memory.
  void close_all() {
    for (Slot* slot = first_.load(std::memory_order_acquire); slot != nullptr; slot = slot->next) {
      const int fd = slot->fd.exchange(kNone, std::memory_order_relaxed);
      if (fd >= 0) ::close(fd);
    }
  }

 private:
  static constexpr int kNone = -1;
  std::deque<Slot> slots_;  // its elements do not move
  std::vector<Slot*> free_;
  std::atomic<Slot*> first_{nullptr};
};

using Descriptor = DescriptorTable::Descriptor;

}  // namespace multiring::tcp
