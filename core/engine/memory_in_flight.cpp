#include "engine/memory_in_flight.h"

#include <algorithm>

namespace multiring {
namespace {

constexpr std::size_t kFewRanges = 64;

/// Calls `use(begin, end, is_written)` for each range of memory that an operation works on. What is reduced
/// in place is one range that is written.
template <class Use>
void for_each_range(const Operation& operation, const Use& use) {
  const auto take = [&](const std::byte* data, std::size_t bytes, bool is_written) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    if (data != nullptr && bytes > 0) use(begin, begin + bytes, is_written);
  };
  if (const DeviceArrays* arrays = operation.on_devices.get(); arrays != nullptr) {
    // In the operation itself host memory may stand in for them.
    take(arrays->input.address, arrays->input.bytes, false);
    take(arrays->output.address, arrays->output.bytes, true);
    for (const Buffer& piece : arrays->pieces) take(piece.address, piece.bytes, true);
    if (!arrays->pieces.empty()) return;
  }
  const bool in_place =
      operation.output == operation.input && operation.output_bytes >= operation.descriptor.bytes;
  if (!in_place) take(operation.input, operation.descriptor.bytes, false);
  take(operation.output, operation.output_bytes, true);
  for (const Piece& piece : operation.pieces) {
    if (piece.output != piece.input) take(piece.input, piece.bytes, false);
    take(piece.output, piece.bytes, true);
  }
  if (operation.strided == nullptr) return;
  for (const StridedView& view : operation.strided->inputs) take(view.lowest(), view.extent(), false);
  for (const StridedView& view : operation.strided->outputs) take(view.lowest(), view.extent(), true);
}

}  // namespace

std::uint64_t RangeSet::last_in(std::uintptr_t begin, std::uintptr_t end) const {
  auto range = std::ranges::upper_bound(ranges_, begin, {}, &Range::end);
  std::uint64_t last = 0;
  for (; range != ranges_.end() && range->begin < end; ++range) last = std::max(last, range->number);
  return last;
}

void RangeSet::insert(std::uintptr_t begin, std::uintptr_t end, std::uint64_t number) {
  const auto first = std::ranges::upper_bound(ranges_, begin, {}, &Range::end);
  auto after = first;
  for (; after != ranges_.end() && after->begin < end; ++after) {
    begin = std::min(begin, after->begin);
    end = std::max(end, after->end);
    number = std::max(number, after->number);
  }
  if (first == after) {
    ranges_.insert(first, {begin, end, number});
    return;
  }
  *first = {begin, end, number};
  ranges_.erase(first + 1, after);
}

void RangeSet::remove_before(std::uint64_t oldest) {
  std::erase_if(ranges_, [oldest](const Range& range) { return range.number < oldest; });
}

bool share_memory(const Operation& a, const Operation& b) {
  MemoryInFlight memory;
  memory.add(a, 1, 1);
  return memory.last_conflict(b, 1) > 0;
}

std::uint64_t MemoryInFlight::last_conflict(const Operation& operation, std::uint64_t oldest) const {
  std::uint64_t last = 0;
  for_each_range(operation, [&](std::uintptr_t begin, std::uintptr_t end, bool is_written) {
    last = std::max(last, written_.last_in(begin, end));
    if (is_written) last = std::max(last, read_.last_in(begin, end));
  });
  return last < oldest ? 0 : last;
}

std::uint64_t MemoryInFlight::add(const Operation& operation, std::uint64_t number, std::uint64_t oldest) {
  if (read_.size() + written_.size() >= remove_at_) {
    read_.remove_before(oldest);
    written_.remove_before(oldest);
    remove_at_ = std::max(kFewRanges, 2 * (read_.size() + written_.size()));
  }
  const std::uint64_t last = last_conflict(operation, oldest);
  for_each_range(operation, [&](std::uintptr_t begin, std::uintptr_t end, bool is_written) {
    (is_written ? written_ : read_).insert(begin, end, number);
  });
  return last;
}

void MemoryInFlight::clear() {
  read_.clear();
  written_.clear();
}

}  // namespace multiring
