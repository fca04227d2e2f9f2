// Compares checksums of the training state over ranks, every so many steps, inside of a compiled function:
//
//     check(token, x...) -> token
//
// What it reads are arguments, which stay where they are during the call. A step without a comparison costs
// the call alone; one that compares what lies on a device waits for the work that makes it.

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <map>

#include "copies.h"
#include "pending_calls.h"

namespace multiring::xla {
namespace {

using Numbers = std::vector<std::uint64_t>;

/// The numbers of all ranks, in the order of the ranks. Collective: as many on each. Submitted under a name,
/// in a step, as the call says.
Numbers gather(const Call& call, const std::string& name, std::uint64_t step, const Numbers& mine) {
  mr_queue* queue = Queues::instance().find(call.integer("queue"));
  Numbers all(mine.size() * static_cast<std::size_t>(mr_queue_size(queue)));
  const std::uint64_t count = mine.size();
  mr_operation operation = MR_OPERATION_INIT;
  operation.kind = MR_ALLGATHER;
  operation.dtype = MR_UINT64;
  operation.name = name.c_str();
  operation.input = mine.data();
  operation.output = all.data();
  operation.output_bytes = all.size() * sizeof(std::uint64_t);
  operation.dims = 1;
  operation.shape = &count;
  const auto pending = std::make_shared<PendingCall>();
  pending->queue = queue;
  const std::string inside = call.text("inside");
  pending->inside = !inside.empty();
  if (pending->inside) step = PendingTable::instance().step_inside(queue, lines(inside));
  const bool ordered = call.integer("ordered") != 0;
  PendingTable::instance().wait_for(submit(pending, name, ordered, step, {operation}));
  if (pending->failure == nullptr) return all;
  PendingTable::instance().wait_for_all(queue, true);
  throw Failure(*pending->failure);
}

std::string rank_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size() && i < 8; ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text + (ranks.size() > 8 ? ", ..." : "");
}

/// "checksum 01 on rank 0, but checksum 02 on ranks 1, 2"
std::string who_has(const std::map<std::uint64_t, std::vector<int>>& found, const char* format) {
  std::string text;
  for (const auto& [value, ranks] : found) {
    char shown[64];
    std::snprintf(shown, sizeof shown, format, value);
    text += (text.empty() ? "" : ", but ") + std::string(shown) + " on " + rank_text(ranks);
  }
  return text;
}

/// By value, the ranks that have it, in column `column` of rows of `width`; of the ranks that are given.
std::map<std::uint64_t, std::vector<int>> by_value(const Numbers& rows, std::size_t width, std::size_t column,
                                                   const std::vector<int>& ranks) {
  std::map<std::uint64_t, std::vector<int>> found;
  for (const int rank : ranks) found[rows[static_cast<std::size_t>(rank) * width + column]].push_back(rank);
  return found;
}

/// In pieces, as devices give them: the same for the same bits wherever they lie.
std::uint64_t checksum_of(const Call& call, mr_queue* queue, const Buffer& array, std::uint64_t seed,
                          const std::string& label) {
  constexpr std::size_t kPiece = std::size_t{4} << 20;
  const std::size_t bytes = byte_count(array);
  std::vector<std::byte> room(call.on_device() ? std::min(bytes, kPiece) : 0);
  std::uint64_t sum = seed;
  std::size_t at = 0;
  do {
    const std::size_t piece = std::min(kPiece, bytes - at);
    const std::byte* data = static_cast<const std::byte*>(array.data) + at;
    if (call.on_device()) {
      read(call, queue, room.data(), data, piece, "model check of '" + label + "'");
      data = room.data();
    }
    sum = mr_checksum(data, piece, sum);
    at += piece;
  } while (at < bytes);
  return sum;
}

enum class Scope : std::uint8_t { kNothing, kNumbers, kEverything };

/// What a step compares, as multiring/state/check.py says.
Scope scope_at(std::uint64_t step, std::uint64_t every) {
  constexpr std::uint64_t kNumbersEvery = 10;
  if (step < 2) return Scope::kNothing;
  if (step % every == 0 || (step < every && std::has_single_bit(step))) return Scope::kEverything;
  return step % kNumbersEvery == 0 ? Scope::kNumbers : Scope::kNothing;
}

void check(const Call& call) {
  mr_queue* queue = Queues::instance().find(call.integer("queue"));
  const std::string name = call.text("name");
  const std::uint64_t step = PendingTable::instance().step(queue, "check " + call.text("counter"), true);
  const Scope scope = scope_at(step, static_cast<std::uint64_t>(call.integer("every")));
  if (scope == Scope::kNothing) return;
  const auto& arrays = call.arguments();
  std::vector<std::string> labels = lines(call.text("labels"));
  labels.resize(arrays.size());
  Numbers sums;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const bool compared = scope == Scope::kEverything || element_count(*arrays[i]) == 1;
    const std::uint64_t label = mr_checksum(labels[i].data(), labels[i].size(), i);
    sums.push_back(compared ? checksum_of(call, queue, *arrays[i], label, labels[i]) : label);
  }

  const Numbers row{sums.size(), mr_checksum(sums.data(), sums.size() * sizeof sums[0], 0)};
  const Numbers rows = gather(call, name, step, row);
  std::vector<int> ranks;  // those that have any: a rank that has no data any more compares nothing
  std::size_t most = 0;
  for (int rank = 0; rank < mr_queue_size(queue); ++rank) {
    const std::uint64_t count = rows[static_cast<std::size_t>(rank) * row.size()];
    if (count > 0) ranks.push_back(rank);
    most = std::max(most, static_cast<std::size_t>(count));
  }
  const auto counts = by_value(rows, row.size(), 0, ranks);
  if (counts.size() <= 1 && by_value(rows, row.size(), 1, ranks).size() <= 1) return;

  sums.resize(most);
  const Numbers all = gather(call, name + ": tensors", step, sums);
  std::string tensor, difference = "there are " + who_has(counts, "%" PRIu64 " arrays");
  if (counts.size() == 1) {
    std::size_t first = 0;
    while (first + 1 < most && by_value(all, most, first, ranks).size() == 1) ++first;
    labels.resize(most);
    tensor = labels[first];
    difference = (tensor.empty() ? "entry " + std::to_string(first) : "'" + tensor + "'") + " has " +
                 who_has(by_value(all, most, first, ranks), "checksum %016" PRIx64);
  }
  PendingTable::instance().wait_for_all(queue, false);
  Failure failure(MR_MISMATCH, "rank " + std::to_string(mr_queue_rank(queue)) +
                                   ": the ranks do not agree about the " + call.text("what") + " at step " +
                                   std::to_string(step) + ": " + difference + "; " + call.text("advice"));
  std::snprintf(failure.error.operation, sizeof failure.error.operation, "model check");
  std::snprintf(failure.error.tensor, sizeof failure.error.tensor, "%s", tensor.c_str());
  mr_queue_keep(queue, &failure.error, nullptr);
  throw failure;
}

}  // namespace
}  // namespace multiring::xla

extern "C" MR_API multiring::xla::Error* multiring_jax_check(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::check);
}

extern "C" MR_API multiring::xla::Error* multiring_jax_check_cuda(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::check, true);
}
