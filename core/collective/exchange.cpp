#include "collective/exchange.h"

#include <algorithm>

namespace multiring {

static_assert(sizeof(Descriptor) <= Rounds::kUserHeaderBytes);

void Exchange::begin(const Descriptor& descriptor) {
  ++round_;
  staged_ = 0;
  auto* header = reinterpret_cast<Descriptor*>(transport_.header(rank(), round()));
  *header = descriptor;
  header->round = round();
}

void Exchange::synchronise(const OperationCall& call) {
  transport_.arrive(round(), staged_);
  const WaitResult result = transport_.await_all(round(), call.waiting);
  if (!result.ok()) throw_for(call, result);
}

void Exchange::synchronise_again(const OperationCall& call) {
  transport_.arrive(round(), staged_);
  call.waiting.deadline.start();  // or only the copy's clock would run, anew each time
  WaitOptions waiting = call.waiting;
  waiting.brief = true;
  const WaitResult result = transport_.await_all(round(), waiting);
  if (!result.ok()) throw_for(call, result);
}

bool Exchange::all_match() const {
  const MatchKey& mine = descriptor(rank()).key;
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank() && !same_key(mine, descriptor(peer).key)) return false;
  return true;
}

void Exchange::require_match(const OperationCall& call) const {
  for (int peer = 0; peer < size(); ++peer)
    if (!is_plausible(descriptor(peer))) throw_corrupt(call, peer);
  if (all_match()) return;
  std::uint64_t least = descriptor(0).submitted;
  bool alike = true;
  bool may_choose_otherwise = false;
  for (int peer = 0; peer < size(); ++peer) {
    const Descriptor& theirs = descriptor(peer);
    if (!theirs.asynchronous) throw_mismatch(call);
    may_choose_otherwise = may_choose_otherwise || theirs.key.fused > 1 || theirs.held_back;
    alike = alike && theirs.submitted == least;
    least = std::min(least, theirs.submitted);
  }
  if (alike && !may_choose_otherwise) throw_mismatch(call);
  throw ChoiceMismatch{least, alike};
}

bool Exchange::differ_in_choice_alone(bool or_order) const {
  const auto key = [&](int peer) {
    MatchKey key = descriptor(peer).key;
    key.algorithm = 0;
    if (or_order) key.order = {};
    return key;
  };
  for (int peer = 1; peer < size(); ++peer)
    if (!same_key(key(peer), key(0))) return false;
  return !all_match();
}

SymmetricRanks Exchange::symmetric_ranks(bool outputs) const {
  const Descriptor& mine = descriptor(rank());
  bool any = false;
  bool all = true;
  for (int each = 0; each < size(); ++each) {
    const Descriptor& theirs = descriptor(each);
    const bool symmetric = theirs.input_region != 0 && (!outputs || theirs.output_region != 0);
    any = any || symmetric;
    all = all && symmetric && theirs.input_region == mine.input_region &&
          (!outputs || theirs.output_region == mine.output_region);
  }
  return all ? SymmetricRanks::kAll : any ? SymmetricRanks::kSome : SymmetricRanks::kNone;
}

}  // namespace multiring
