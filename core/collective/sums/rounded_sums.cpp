#include "collective/sums/rounded_sums.h"

#include <algorithm>
#include <map>

#include "base/arithmetic/half.h"
#include "base/cache.h"

namespace multiring {
namespace {

Reduction without_prescale(Reduction reduction) {
  reduction.prescale = 1.0;
  return reduction;
}

}  // namespace

RoundedSums::RoundedSums(DType rounded, const Reduction& reduction, int ranks, Order order)
    : rounded_(rounded),
      reduction_(reduction),
      sums_(DType::kFloat32, without_prescale(reduction), ranks, order),
      ranks_(ranks) {}

void RoundedSums::contribute(std::span<const std::byte* const> inputs, void* output, std::size_t count) {
  if (inputs.size() == 1 && reduction_.prescale == 1.0) return narrow(rounded_, inputs[0], output, count);
  Reduction inner{reduction_.op == ReduceOp::kAverage ? ReduceOp::kSum : reduction_.op};
  inner.prescale = reduction_.prescale;
  for (std::size_t begin = 0; begin < count; begin += kCachedElements) {
    const std::size_t now = std::min(kCachedElements, count - begin);
    inputs_.clear();
    for (const std::byte* input : inputs) inputs_.push_back(input + begin * sizeof(float));
    void* const outputs[] = {block(0)};
    reduce(DType::kFloat32, inner, inputs_, outputs, now);
    narrow(rounded_, block(0), static_cast<std::byte*>(output) + begin * dtype_size(rounded_), now);
  }
}

void RoundedSums::join(std::span<const Part> parts, Subtree node, void* output, std::size_t count) {
  const std::size_t element = dtype_size(rounded_);
  for (std::size_t begin = 0; begin < count; begin += kCachedElements) {
    const std::size_t now = std::min(kCachedElements, count - begin);
    block(parts.size());  // from here on none moves
    widened_.clear();
    for (const Part& part : parts) {
      float* const to = block(widened_.size() + 1);
      widen(rounded_, part.data + begin * element, to, now);
      widened_.push_back({part.node, reinterpret_cast<const std::byte*>(to)});
    }
    sums_.join(widened_, node, block(0), now);
    narrow(rounded_, block(0), static_cast<std::byte*>(output) + begin * element, now);
  }
}

void RoundedSums::restore(const std::byte* result, void* output, std::size_t count) const {
  widen(rounded_, result, output, count);
}

void RoundedSums::reduce_whole(std::span<const void* const> inputs, std::span<const Subtree> nodes,
                               void* output, std::size_t count) {
  const std::size_t element = dtype_size(rounded_);
  std::vector<std::byte> rounded((nodes.size() + 1) * kCachedElements * element);
  std::vector<const std::byte*> contributions;
  std::vector<Part> parts;
  for (std::size_t begin = 0; begin < count; begin += kCachedElements) {
    const std::size_t now = std::min(kCachedElements, count - begin);
    std::byte* block = rounded.data();
    parts.clear();
    for (const Subtree node : nodes) {
      contributions.clear();
      for (int rank = node.begin; rank < node.end; ++rank)
        contributions.push_back(static_cast<const std::byte*>(inputs[static_cast<std::size_t>(rank)]) +
                                begin * sizeof(float));
      contribute(contributions, block, now);
      parts.push_back({node, block});
      block += kCachedElements * element;
    }
    join(parts, {0, ranks_}, block, now);
    restore(block, static_cast<std::byte*>(output) + begin * sizeof(float), now);
  }
}

float* RoundedSums::block(std::size_t index) {
  if (blocks_.size() < (index + 1) * kCachedElements) blocks_.resize((index + 1) * kCachedElements);
  return blocks_.data() + index * kCachedElements;
}

std::vector<Subtree> host_nodes(int ranks, const std::function<int(int)>& host_of) {
  std::map<int, std::vector<int>> hosts;
  for (int rank = 0; rank < ranks; ++rank) hosts[host_of(rank)].push_back(rank);
  std::vector<Subtree> nodes;
  for (const auto& [number, local_ranks] : hosts)
    for (const Subtree node : canonical_parts(local_ranks, ranks)) nodes.push_back(node);
  std::ranges::sort(nodes);
  return nodes;
}

}  // namespace multiring
