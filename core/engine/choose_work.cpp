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

Choice choose_work(const std::deque<std::shared_ptr<Work>>& queue, std::uint64_t limit,
                   const Fusion& fusion) {
  Choice choice;
  std::vector<std::shared_ptr<Work>>& works = choice.works;
  for (const auto& work : queue) {
    if (work->index() > limit) continue;
    if (work->after() < queue.front()->index())
      works.push_back(work);
    else
      choice.is_held_back = true;
  }
  std::stable_sort(works.begin(), works.end(),
                   [](const auto& a, const auto& b) { return a->priority() > b->priority(); });
  if (works.empty() || !may_fuse(works[0]->operation(), fusion)) {
    works.resize(std::min<std::size_t>(works.size(), 1));
    return choice;
  }
  std::size_t bytes = 0;
  std::size_t fused = 0;
  while (fused < works.size() && may_fuse(works[fused]->operation(), fusion) &&
         same_reduction(works[fused]->operation().descriptor.key, works[0]->operation().descriptor.key) &&
         bytes + works[fused]->operation().descriptor.bytes <= fusion.at_most)
    bytes += works[fused++]->operation().descriptor.bytes;
  works.resize(std::max<std::size_t>(fused, 1));
  return choice;
}

Choice choose_first(const std::deque<std::shared_ptr<Work>>& queue, std::uint64_t limit) {
  if (queue.empty() || queue.front()->index() > limit) return {};
  return {.works = {queue.front()}};
}

}  // namespace multiring
