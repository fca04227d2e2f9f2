#include "engine/choose_work.h"

#include <algorithm>

#include "collective/sums/integer_average.h"

namespace multiring {
namespace {

// What is fused depends on time, and so would the bits of a sum in any order.
bool may_fuse(const Operation& operation, std::size_t below) {
  return operation.descriptor.key.kind == OpKind::kAllreduce && operation.descriptor.bytes < below &&
         operation.descriptor.key.order != Order::kAny && !averages_integers(operation.descriptor);
}

bool same_reduction(const MatchKey& a, const MatchKey& b) {
  return a.dtype == b.dtype && a.op == b.op && a.prescale == b.prescale && a.postscale == b.postscale &&
         a.comm_dtype == b.comm_dtype;
}

}  // namespace

std::vector<std::shared_ptr<Work>> choose_work(const std::deque<std::shared_ptr<Work>>& queue,
                                               std::uint64_t limit, std::size_t fuse_below,
                                               std::size_t fuse_at_most) {
  std::vector<std::shared_ptr<Work>> candidates;
  for (const auto& work : queue)
    if (work->index() <= limit) candidates.push_back(work);
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a->priority() > b->priority(); });
  if (candidates.empty() || !may_fuse(candidates[0]->operation(), fuse_below)) {
    candidates.resize(std::min<std::size_t>(candidates.size(), 1));
    return candidates;
  }
  std::size_t bytes = 0;
  std::size_t fused = 0;
  while (fused < candidates.size() && may_fuse(candidates[fused]->operation(), fuse_below) &&
         same_reduction(candidates[fused]->operation().descriptor.key,
                        candidates[0]->operation().descriptor.key) &&
         bytes + candidates[fused]->operation().descriptor.bytes <= fuse_at_most)
    bytes += candidates[fused++]->operation().descriptor.bytes;
  candidates.resize(std::max<std::size_t>(fused, 1));
  return candidates;
}

}  // namespace multiring
