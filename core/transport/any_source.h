#pragma once

#include <algorithm>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "transport/waiting.h"

namespace multiring {

/// A wait for a message of one of several ranks.
///
/// A rank that has died ends it, for the message may have been that rank's. One that has left does not,
/// unless it is needed: others may still send. It ends when all have left and all that they sent has been
/// received. For one thread.
class AnySource {
 public:
  /// `needed`: those of `sources` that must not leave. `ready`: whether the wait is over, by a message or
  /// otherwise. `is_silent`: whether no message of a source is here or being received.
  AnySource(std::vector<int> sources, std::vector<int> needed, std::function<bool()> ready,
            std::function<bool(int source)> is_silent)
      : sources_(std::move(sources)),
        needed_(std::move(needed)),
        ready_(std::move(ready)),
        is_silent_(std::move(is_silent)) {}

  const std::vector<int>& sources() const { return sources_; }
  bool ready() const { return ready_(); }
  bool is_silent(int source) const { return is_silent_(source); }
  bool has_left(int source) const { return left_.contains(source); }
  bool all_left() const { return left_.size() == sources_.size(); }

  /// Notes the end of a silent source. Returns it if it ends the wait.
  WaitResult note_end(const WaitResult& end) {
    if (!end.peer_left && !end.peer_gone) return end;
    left_.insert(end.peer);
    return all_left() || std::ranges::find(needed_, end.peer) != needed_.end() ? end : WaitResult{};
  }

 private:
  const std::vector<int> sources_;
  const std::vector<int> needed_;
  const std::function<bool()> ready_;
  const std::function<bool(int)> is_silent_;
  std::set<int> left_;
};

}  // namespace multiring
