#pragma once

#include <algorithm>
#include <functional>

#include "base/export.h"
#include "collective/agreement/board.h"

namespace multiring {

/// Which ranks have their arrays in symmetric memory.
enum class SymmetricRanks { kNone, kSome, kAll };

/// The decisions that all ranks take together when all have come to a round: every rank gets the same answer.
///
/// A question is a function of one rank's descriptor, and its answer is a bit or a number. So each rank can
/// answer for itself, and answers can be combined in any order and grouping, a few bytes at a time:
///
///   all, any      bits, combined by and, or
///   least, most   numbers, combined by minimum, maximum
///   same          numbers whose least is their most
///   all_match     the same for what an operation has to have alike (MatchKey)
///
/// A question must not compare descriptors, or depend on the rank that asks it. All ranks ask the same
/// questions in the same order, `all_match` first. How answers travel is not part of the contract: here each
/// rank computes the answers of all from the board.
class MULTIRING_API Agreement {
 public:
  explicit Agreement(const Board& board) : board_(board) {}

  template <class Bit>
  bool any(const Bit& bit) const {
    return board_.find([&](int rank) { return std::invoke(bit, board_.of(rank)); }) >= 0;
  }
  template <class Bit>
  bool all(const Bit& bit) const {
    return !any(std::not_fn(bit));
  }
  template <class Number>
  auto least(const Number& number) const {
    return combined(number, [](auto a, auto b) { return std::min(a, b); });
  }
  template <class Number>
  auto most(const Number& number) const {
    return combined(number, [](auto a, auto b) { return std::max(a, b); });
  }
  template <class Number>
  bool same(const Number& number) const {
    return all([&, first = std::invoke(number, board_.of(0))](const Descriptor& each) {
      return std::invoke(number, each) == first;
    });
  }
  bool all_match() const;
  /// Whether inputs, and outputs if they are asked for, lie in symmetric memory, in the same regions on all
  /// ranks.
  SymmetricRanks symmetric_ranks(bool outputs) const;

 private:
  template <class Number, class Combine>
  auto combined(const Number& number, const Combine& combine) const {
    auto result = std::invoke(number, board_.of(0));
    for (int rank = 1; rank < board_.size(); ++rank)
      result = combine(result, std::invoke(number, board_.of(rank)));
    return result;
  }

  const Board& board_;
};

}  // namespace multiring
