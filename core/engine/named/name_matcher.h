#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/export.h"

namespace multiring {

/// What a rank announces of one submission. `position`: among those that all ranks submit in one order.
struct Announcement {
  std::string_view name;
  std::int32_t priority = 0;
  std::uint32_t operations = 1;
  std::uint64_t step = 0;
  std::uint64_t position = 0;  ///< from 1; 0: in any order
};

/// A submission that all ranks have announced.
struct Match {
  std::string name;
  std::int32_t priority = 0;  ///< rank 0's
};

/// A submission that some ranks have announced and others have not.
struct Unmatched {
  std::string name;
  std::vector<int> announced;
  std::vector<int> missing;
};

/// Matches submissions by name: the k-th of a name on one rank with the k-th of it on the others.
///
/// In each negotiation every rank sends a message of its new submissions, and takes the messages of all ranks
/// in rank order. All state, and the order of matches, is a function of these messages alone, so it is the
/// same on all ranks; errors differ in the rank that they name. A name is sent as text until its first match,
/// and as a number from then on.
class MULTIRING_API NameMatcher {
 public:
  /// Further names are always sent as text, so that names used once cost no memory.
  static constexpr std::size_t kNumberedNames = 16384;

  /// `rank`: this one, to which errors are told.
  explicit NameMatcher(int size, int rank, std::size_t numbered_names = kNumberedNames)
      : size_(static_cast<std::size_t>(size)), rank_(rank), numbered_names_(numbered_names) {}

  /// This rank's message.
  std::vector<std::byte> encode(std::span<const Announcement> announcements) const;
  /// Takes rank `rank`'s message; raises an internal error if it cannot be parsed, and a mismatch error if
  /// two ranks announced different names for one position.
  void take(int rank, std::span<const std::byte> message);
  /// What has been matched since the last call, in the order in which rank 0 announced it. Raises a mismatch
  /// error if the ranks announced different numbers of operations under one name, or different steps.
  std::vector<Match> matched();
  /// What has been announced, but not by all ranks, in the order of the names.
  std::vector<Unmatched> unmatched() const;
  bool has_unmatched() const { return pending_ > 0; }

 private:
  /// What one rank announced.
  struct Part {
    std::uint32_t operations = 0;  // 0: has not announced it
    std::uint64_t step = 0;
  };
  /// The k-th submission of a name, for one k.
  struct Pending {
    std::vector<Part> parts;  // of each rank
    std::size_t present = 0;
    std::int32_t priority = 0;
    std::uint64_t order = 0;  // among what rank 0 announced
  };
  struct Name {
    std::uint32_t number = 0;           // 0: none
    std::vector<std::uint64_t> counts;  // submissions that each rank has announced
    std::uint64_t matched = 0;          // submissions before pending.front()
    std::deque<Pending> pending;
  };
  struct Complete {
    std::string name;
    Pending pending;
  };

  /// The name at one position of the order, until all ranks have announced it.
  struct Ordered {
    std::string name;
    int rank = 0;  // that announced it first
    std::size_t present = 0;
  };

  void announce(int rank, const std::string& name, const Announcement& announcement);
  void require_order(int rank, const std::string& name, std::uint64_t position);
  void complete(const std::string& name, Name& entry);
  void require_alike(const Complete& complete) const;

  const std::size_t size_;
  const int rank_;
  const std::size_t numbered_names_;
  std::unordered_map<std::string, Name> names_;
  std::vector<std::string> numbered_;  // [number - 1]
  std::vector<Complete> complete_;
  std::map<std::uint64_t, Ordered> ordered_;  // by position
  std::uint64_t order_ = 0;
  std::size_t pending_ = 0;
};

}  // namespace multiring
