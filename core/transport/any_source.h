#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/waiting.h"

namespace multiring {

/// A wait for a message of one of several ranks.
///
/// A rank that has died ends it, for the message may have been that rank's. One that has left does not,
/// unless it is needed: others may still send. It ends when all have left and all that they sent has been
/// received. One at whose address nothing answers (WaitResult::peer_gone) may have left or died: it is taken
/// for dead after `kGoneSeconds`, in which the news of the cause may arrive. For one thread.
class AnySource {
 public:
  static constexpr double kGoneSeconds = 2.0;

  /// `needed`: those of `sources` that must not leave. `ready`: whether the wait is over, by a message or
  /// otherwise. `is_over`: whether nothing more can come of a source that has left, or that has died.
  AnySource(std::vector<int> sources, std::vector<int> needed, std::function<bool()> ready,
            std::function<bool(int source, bool left)> is_over)
      : sources_(std::move(sources)),
        needed_(std::move(needed)),
        ready_(std::move(ready)),
        is_over_(std::move(is_over)) {}

  const std::vector<int>& sources() const { return sources_; }
  bool ready() const { return ready_(); }
  /// Whether no message of a source is here or being received.
  bool is_silent(int source) const { return is_over_(source, true); }
  bool has_left(int source) const { return left_.contains(source); }
  bool is_gone(int source) const { return gone_.contains(source); }
  bool any_gone() const { return !gone_.empty(); }
  bool is_unreachable(int source) const { return unreachable_.contains(source); }
  bool all_ended() const { return left_.size() + gone_.size() == sources_.size(); }

  /// Notes the end of a source, unless a message of it is here. Returns it if it ends the wait.
  WaitResult note_end(const WaitResult& end) {
    if (!is_over_(end.peer, end.peer_left)) return {};
    if (!end.peer_left && !end.peer_gone) return end;
    if (end.peer_left) {
      gone_.erase(end.peer);
      left_.insert(end.peer);
    } else {
      gone_.try_emplace(end.peer, Clock::now());
    }
    return all_ended() || is_needed(end.peer) ? end : WaitResult{};
  }
  /// The end of one that has been gone for so long that it is taken for dead.
  WaitResult gone_for_long() const {
    for (const auto& [source, since] : gone_)
      if (seconds_between(since, Clock::now()) >= kGoneSeconds)
        return {WaitResult::Outcome::kPeerLost, source, false, true};
    return {};
  }
  /// Notes that this rank cannot connect with a source, which may still connect itself. Raises `why` if the
  /// source is needed, or if no other one is left.
  void note_unreachable(int source, const Error& why) {
    unreachable_.insert(source);
    const auto hopeless = [this](int each) {
      return unreachable_.contains(each) || left_.contains(each) || gone_.contains(each);
    };
    if (is_needed(source) || std::ranges::all_of(sources_, hopeless)) throw why;
  }

 private:
  bool is_needed(int source) const { return std::ranges::find(needed_, source) != needed_.end(); }

  const std::vector<int> sources_;
  const std::vector<int> needed_;
  const std::function<bool()> ready_;
  const std::function<bool(int, bool)> is_over_;
  std::set<int> left_;
  std::map<int, Clock::time_point> gone_;  // and since when
  std::set<int> unreachable_;
};

}  // namespace multiring
