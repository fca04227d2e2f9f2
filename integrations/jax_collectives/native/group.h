#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "multiring.h"

namespace multiring::jax_collectives {

/// Connects the members of a group, which are world ranks in the order of the group. Returns the address of
/// an mr_communicator, or null with an error in `text`. Collective over the members.
using Connect = void* (*)(const int* members, int count, char* text, std::size_t room);

/// The ranks of one communicator of XLA. Functions return 0 or the number of an error.
class Group {
 public:
  Group(std::vector<int> members, int rank, Connect connect);
  /// A group that nobody knows: each of its operations fails with this text.
  explicit Group(std::string failure);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }

  /// A rehearsed group is in use by a program that runs on this rank alone (`rehearsal.h`): its allreduce
  /// returns the input.
  void end_rehearsal() { rehearsed_.store(false, std::memory_order_release); }

  int run(const mr_operation& operation);
  int send(int peer, int tag, const void* data, std::size_t bytes);
  int receive(int peer, int tag, void* data, std::size_t bytes);

 private:
  /// Returns the communicator, which is connected when it is first needed; null: `*code` is an error.
  mr_communicator* connected(int* code);
  /// Calls a function of the C ABI with the communicator; returns 0 or the number of its error.
  template <class Call>
  int on_communicator(const Call& call);

  const std::vector<int> members_;
  const int rank_;
  const Connect connect_;
  const std::string failure_;
  std::atomic<bool> rehearsed_{true};
  std::mutex mutex_;  // guards all below; held while the members are connected
  mr_communicator* communicator_ = nullptr;
  int connect_error_ = 0;
};

}  // namespace multiring::jax_collectives
