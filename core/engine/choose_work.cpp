#include "engine/choose_work.h"

#include <algorithm>

#include "collective/sums/integer_average.h"

namespace multiring {
namespace {

bool may_fuse(const Operation& operation, const Fusion& fusion) {
  return operation.descriptor.key.kind == OpKind::kAllreduce && operation.descriptor.bytes < fusion.below &&
         (fusion.any_order || operation.descriptor.key.order != Order::kAny) &&
         !averages_integers(operation.descriptor);
}

bool same_reduction(const MatchKey& a, const MatchKey& b) {
  return a.dtype == b.dtype && a.op == b.op && a.prescale == b.prescale && a.postscale == b.postscale &&
         a.comm_dtype == b.comm_dtype && a.order == b.order;
}

}  // namespace

std::vector<std::shared_ptr<Work>> choose_work(const std::deque<std::shared_ptr<Work>>& queue,
                                               std::uint64_t limit, const Fusion& fusion) {
  std::vector<std::shared_ptr<Work>> candidates;
  for (const auto& work : queue)
    if (work->index() <= limit) candidates.push_back(work);
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a->priority() > b->priority(); });
  if (candidates.empty() || !may_fuse(candidates[0]->operation(), fusion)) {
    candidates.resize(std::min<std::size_t>(candidates.size(), 1));
    return candidates;
  }
  std::size_t bytes = 0;
  std::size_t fused = 0;
  while (fused < candidates.size() && may_fuse(candidates[fused]->operation(), fusion) &&
         same_reduction(candidates[fused]->operation().descriptor.key,
                        candidates[0]->operation().descriptor.key) &&
         bytes + candidates[fused]->operation().descriptor.bytes <= fusion.at_most)
    bytes += candidates[fused++]->operation().descriptor.bytes;
  candidates.resize(std::max<std::size_t>(fused, 1));
  return candidates;
}

}  // namespace multiring
