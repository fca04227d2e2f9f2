#include "collective/sums/partial_sums.h"

#include <algorithm>
#include <bit>

#include "base/arithmetic/half.h"
#include "base/arithmetic/kernels/copy.h"
#include "base/cache.h"

namespace multiring {
namespace {

/// Whether the tree over `parts` has the shape of reduce()'s over as many inputs.
bool is_canonical(std::span<const PartialSums::Part> parts, Subtree node) {
  if (parts.size() == 1) return parts[0].node == node;
  const std::size_t left = std::bit_floor(parts.size() - 1);
  const int split = canonical_split(node);
  return parts[left - 1].node.end == split && is_canonical(parts.first(left), {node.begin, split}) &&
         is_canonical(parts.subspan(left), {split, node.end});
}

}  // namespace

PartialSums::PartialSums(DType dtype, const Reduction& reduction, int ranks, Order order)
    : dtype_(dtype),
      computed_(is_half(dtype) ? DType::kFloat32 : dtype),
      reduction_(reduction),
      inner_{reduction.op == ReduceOp::kAverage ? ReduceOp::kSum : reduction.op},
      ranks_(ranks),
      order_(order) {}

std::size_t PartialSums::bytes_per_element(Subtree node) const {
  return dtype_size(is_raw(node) || is_all(node) ? dtype_ : computed_);
}

void PartialSums::join(std::span<const Part> parts, Subtree node, void* output, std::size_t count) {
  if (count == 0) return;
  if (is_raw(node)) {
    copy_bytes(output, parts[0].data, count * dtype_size(dtype_));
    return;
  }
  const bool all = is_all(node);
  Reduction whole = inner_;
  if (all) {
    whole = reduction_;
    whole.prescale = 1.0;
    whole.divisor = static_cast<std::size_t>(ranks_);
  }
  const bool raw = std::ranges::all_of(parts, [this](const Part& part) { return is_raw(part.node); });
  if (raw && (all || dtype_ == computed_)) whole.prescale = reduction_.prescale;
  if (in_one(parts, node) && (dtype_ == computed_ || raw == all))
    return reduce_parts(parts, raw ? dtype_ : computed_, whole, 0, output, count);
  const std::size_t element = bytes_per_element(node);
  for (std::size_t offset = 0; offset < count; offset += kCachedElements) {
    const std::size_t now = std::min(kCachedElements, count - offset);
    auto* const target = static_cast<std::byte*>(output) + offset * element;
    if (!all) {
      evaluate(parts, node, offset, target, now, 0);
      continue;
    }
    std::byte* const block = scratch(0);
    evaluate(parts, node, offset, block, now, 1);
    finish(block, target, now);
  }
}

/// Half precision: raw parts are widened one by one, so they are in one only with the result, or none is raw.
bool PartialSums::in_one(std::span<const Part> parts, Subtree node) const {
  const auto raws = static_cast<std::size_t>(
      std::ranges::count_if(parts, [this](const Part& part) { return is_raw(part.node); }));
  const bool alike = raws == 0 || raws == parts.size();
  return (alike || (dtype_ == computed_ && reduction_.prescale == 1.0)) &&
         (order_ == Order::kAny || is_canonical(parts, node));
}

/// How many of `parts` make up the left child of `node`.
std::size_t PartialSums::left_parts(std::span<const Part> parts, Subtree node) const {
  if (order_ == Order::kAny) return std::bit_floor(parts.size() - 1);
  const int right = canonical_split(node);
  const auto found = std::ranges::find_if(parts, [&](const Part& part) { return part.node.begin >= right; });
  return static_cast<std::size_t>(found - parts.begin());
}

void PartialSums::reduce_parts(std::span<const Part> parts, DType dtype, const Reduction& reduction,
                               std::size_t offset, void* output, std::size_t count) {
  inputs_.clear();
  for (const Part& part : parts) inputs_.push_back(part.data + offset * dtype_size(dtype));
  void* const outputs[] = {output};
  reduce(dtype, reduction, inputs_, outputs, count);
}

/// The sum of `node` before the last scaling, in the type that is computed in.
void PartialSums::evaluate(std::span<const Part> parts, Subtree node, std::size_t offset, void* output,
                           std::size_t count, std::size_t depth) {
  if (parts.size() == 1 && is_raw(parts[0].node)) return widen_raw(parts[0], offset, output, count);
  const bool raw = is_raw(parts[0].node);
  if (in_one(parts, node) && (dtype_ == computed_ || !raw)) {
    Reduction reduction = inner_;
    if (raw && std::ranges::all_of(parts, [this](const Part& part) { return is_raw(part.node); }))
      reduction.prescale = reduction_.prescale;
    return reduce_parts(parts, computed_, reduction, offset, output, count);
  }
  const std::size_t left = left_parts(parts, node);
  const int split = parts[left].node.begin;
  std::byte* const other = scratch(depth);
  evaluate(parts.first(left), {node.begin, split}, offset, output, count, depth + 1);
  evaluate(parts.subspan(left), {split, node.end}, offset, other, count, depth + 1);
  const void* const inputs[] = {output, other};
  void* const outputs[] = {output};
  reduce(computed_, inner_, inputs, outputs, count);
}

void PartialSums::widen_raw(const Part& part, std::size_t offset, void* output, std::size_t count) const {
  const std::byte* const data = part.data + offset * dtype_size(dtype_);
  if (dtype_ != computed_)
    widen(dtype_, data, output, count);
  else
    copy_bytes(output, data, count * dtype_size(dtype_));
  if (reduction_.prescale == 1.0) return;
  Reduction scaling = inner_;
  scaling.prescale = reduction_.prescale;
  const void* const inputs[] = {output};
  void* const outputs[] = {output};
  reduce(computed_, scaling, inputs, outputs, count);
}

/// The last scaling, and the type of the result.
void PartialSums::finish(void* block, void* output, std::size_t count) const {
  Reduction last = reduction_;
  last.prescale = 1.0;
  last.divisor = static_cast<std::size_t>(ranks_);
  const void* const inputs[] = {block};
  void* const outputs[] = {dtype_ == computed_ ? output : block};
  reduce(computed_, last, inputs, outputs, count);
  if (dtype_ != computed_) narrow(dtype_, block, output, count);
}

/// Each level of the tree has one block, and level 0 is only used once.
std::byte* PartialSums::scratch(std::size_t depth) {
  const std::size_t block = kCachedElements * dtype_size(computed_);
  if (scratch_.empty())
    scratch_.resize((static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(ranks_))) + 2) * block);
  return scratch_.data() + depth * block;
}

}  // namespace multiring
