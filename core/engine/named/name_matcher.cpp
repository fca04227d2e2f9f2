#include "engine/named/name_matcher.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.h"
#include "collective/agreement/odd_rank.h"
#include "collective/rank_list.h"

namespace multiring {
namespace {

/// An announcement in a message. The name follows if it has no number.
struct Entry {
  std::uint32_t number;
  std::int32_t priority;
  std::uint32_t operations;
  std::uint32_t name_bytes;
  std::uint64_t step;
  std::uint64_t position;
};
static_assert(sizeof(Entry) == 32, "copied as bytes: no padding");

void append(std::vector<std::byte>& to, const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  to.insert(to.end(), begin, begin + bytes);
}

[[noreturn]] void throw_corrupt(int rank) {
  throw Error(ErrorKind::kInternal, "the message of rank " + std::to_string(rank) +
                                        " about its named operations makes no sense: do all ranks run the "
                                        "same version of multiring?");
}

/// Raises a mismatch error, as rank `self` is told it, if the ranks announced different values for one
/// submission.
void require_equal(const std::string& name, int self, std::span<const std::uint64_t> said, const char* what,
                   const char* verb, const char* advice) {
  std::map<std::uint64_t, std::vector<int>> ranks;
  for (std::size_t rank = 0; rank < said.size(); ++rank) ranks[said[rank]].push_back(static_cast<int>(rank));
  if (ranks.size() == 1) return;
  std::string text = std::string("the ranks submitted ") + what + " '" + name + "': ";
  bool first = true;
  for (const auto& [value, those] : ranks) {
    text += (first ? "" : "; ") + rank_list(those) + " " + verb + " " + std::to_string(value);
    first = false;
  }
  ErrorContext context;
  context.rank = self;
  context.tensor = name;
  note_odd_rank(context, self, static_cast<int>(said.size()), [&](int a, int b) {
    return said[static_cast<std::size_t>(a)] == said[static_cast<std::size_t>(b)];
  });
  throw Error(ErrorKind::kMismatch, text + ". " + advice, context);
}

}  // namespace

std::vector<std::byte> NameMatcher::encode(std::span<const Announcement> announcements) const {
  std::vector<std::byte> message;
  for (const Announcement& announcement : announcements) {
    const auto known = names_.find(std::string(announcement.name));
    Entry entry{known == names_.end() ? 0 : known->second.number,
                announcement.priority,
                announcement.operations,
                0,
                announcement.step,
                announcement.position};
    if (entry.number == 0) entry.name_bytes = static_cast<std::uint32_t>(announcement.name.size());
    append(message, &entry, sizeof entry);
    append(message, announcement.name.data(), entry.name_bytes);
  }
  return message;
}

void NameMatcher::take(int rank, std::span<const std::byte> message) {
  while (!message.empty()) {
    Entry entry;
    if (message.size() < sizeof entry) throw_corrupt(rank);
    std::memcpy(&entry, message.data(), sizeof entry);
    message = message.subspan(sizeof entry);
    if (message.size() < entry.name_bytes || entry.number > numbered_.size() || entry.operations == 0)
      throw_corrupt(rank);
    const Announcement announcement{{}, entry.priority, entry.operations, entry.step, entry.position};
    if (entry.number > 0)
      announce(rank, numbered_[entry.number - 1], announcement);
    else
      announce(rank, {reinterpret_cast<const char*>(message.data()), entry.name_bytes}, announcement);
    message = message.subspan(entry.name_bytes);
  }
}

void NameMatcher::announce(int rank, const std::string& name, const Announcement& announcement) {
  if (announcement.position > 0) require_order(rank, name, announcement.position);
  const auto index_of_rank = static_cast<std::size_t>(rank);
  Name& entry = names_[name];
  entry.counts.resize(size_);
  const std::size_t index = static_cast<std::size_t>(entry.counts[index_of_rank]++ - entry.matched);
  if (index == entry.pending.size()) {
    entry.pending.push_back({std::vector<Part>(size_), 0, 0, 0});
    ++pending_;
  }
  Pending& pending = entry.pending[index];
  pending.parts[index_of_rank] = {announcement.operations, announcement.step};
  if (rank == 0) {
    pending.priority = announcement.priority;
    pending.order = ++order_;
  }
  // A rank announces its k-th submission after its (k-1)-th, so the front is complete first.
  if (++pending.present == size_) complete(name, entry);
}

void NameMatcher::require_order(int rank, const std::string& name, std::uint64_t position) {
  const auto found = ordered_.try_emplace(position, Ordered{name, rank, 0}).first;
  Ordered& ordered = found->second;
  if (ordered.name != name) {
    ErrorContext context;
    context.rank = rank_;
    context.peer = rank == rank_ ? ordered.rank : rank;
    context.common = ordered.rank;
    context.odd = rank;
    context.tensor = rank == rank_ ? name : ordered.name;
    throw Error(ErrorKind::kMismatch,
                "the ranks submitted different operations as number " + std::to_string(position) +
                    " of those that all submit in one order: rank " + std::to_string(ordered.rank) + " '" +
                    ordered.name + "', rank " + std::to_string(rank) + " '" + name +
                    "'. Look for a loop length or a branch that depends on the rank, and for two threads; "
                    "calls that belong together although they are written in different lines, and calls of "
                    "several threads, need names of their own.",
                context);
  }
  if (++ordered.present == size_) ordered_.erase(found);
}

void NameMatcher::complete(const std::string& name, Name& entry) {
  complete_.push_back({name, std::move(entry.pending.front())});
  entry.pending.pop_front();
  --pending_;
  ++entry.matched;
  if (entry.number == 0 && numbered_.size() < numbered_names_) {
    numbered_.push_back(name);
    entry.number = static_cast<std::uint32_t>(numbered_.size());
  }
  if (entry.number == 0 && entry.pending.empty()) names_.erase(name);
}

std::vector<Match> NameMatcher::matched() {
  std::sort(complete_.begin(), complete_.end(),
            [](const Complete& a, const Complete& b) { return a.pending.order < b.pending.order; });
  std::vector<Match> matches;
  for (Complete& complete : complete_) {
    require_alike(complete);
    matches.push_back({std::move(complete.name), complete.pending.priority});
  }
  complete_.clear();
  return matches;
}

void NameMatcher::require_alike(const Complete& complete) const {
  std::vector<std::uint64_t> operations, steps;
  for (const Part& part : complete.pending.parts) {
    operations.push_back(part.operations);
    steps.push_back(part.step);
  }
  require_equal(complete.name, rank_, operations, "different numbers of operations under the name",
                "submitted", "Every rank has to group the same operations under a name.");
  const auto low = [](std::uint64_t step) { return step & 0xFFFFFFFF; };
  const bool same =
      std::ranges::all_of(steps, [&](std::uint64_t step) { return low(step) == low(steps[0]); });
  for (std::uint64_t& step : steps) step = same ? step >> 32 : low(step);
  require_equal(
      complete.name, rank_, steps, "operations of different steps under the name", "submitted it in step",
      "Where a program skips steps, all ranks have to skip the same ones. A step that failed on some "
      "ranks only has omitted operations there: after such an error call multiring.shutdown() and "
      "init() on all ranks, or end the job.");
}

std::vector<Unmatched> NameMatcher::unmatched() const {
  std::vector<Unmatched> found;
  for (const auto& [name, entry] : names_)
    for (const Pending& pending : entry.pending) {
      Unmatched one{name, {}, {}};
      for (std::size_t rank = 0; rank < size_; ++rank)
        (pending.parts[rank].operations > 0 ? one.announced : one.missing).push_back(static_cast<int>(rank));
      found.push_back(std::move(one));
    }
  std::sort(found.begin(), found.end(),
            [](const Unmatched& a, const Unmatched& b) { return a.name < b.name; });
  return found;
}

}  // namespace multiring
