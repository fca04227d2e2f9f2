#include "collective/cluster/cluster_copy.h"

#include <algorithm>

#include "base/arithmetic/kernels/copy.h"
#include "base/cache.h"
#include "collective/cluster/message_segments.h"
#include "topology/chunks.h"

namespace multiring {
void synchronise_host(const RoundExchange& exchange, const OperationCall& call, Hierarchy& hierarchy) {
  WaitOptions waiting = call.waiting;
  waiting.brief = true;  // all are in the operation
  const WaitResult result = hierarchy.synchronise(waiting);
  if (!result.ok()) exchange.throw_in_progress(call, result, result.peer);
}

MessageRing::MessageRing(Exchange& exchange, const OperationCall& call, Hierarchy& hierarchy,
                         std::size_t segment)
    : exchange_(exchange),
      call_(call),
      hierarchy_(hierarchy),
      segment_(segment),
      waiting_(call.waiting),
      memory_(exchange.plans().workspace(2 * message_slots(segment) * segment)),
      slots_(message_slots(segment)) {
  waiting_.brief = true;  // all are in the operation
  for (std::size_t index = 0; index < slots_.size(); ++index)
    slots_[index].memory = memory_->data() + 2 * index * segment;
}

// Incomplete messages belong to a failed operation: the network keeps their memory.
MessageRing::~MessageRing() {
  std::vector<Hierarchy::Ticket> pending;
  for (const Slot& slot : slots_)
    for (const Hierarchy::Ticket ticket : {slot.sent, slot.received})
      if (ticket != 0) pending.push_back(ticket);
  if (pending.empty()) return;
  hierarchy_.keep(memory_);
  hierarchy_.give_up(pending);
}

void MessageRing::connect(std::span<const int> peers) {
  const WaitResult result = hierarchy_.connect(peers, waiting_);
  if (!result.ok()) exchange_.throw_in_progress(call_, result, result.peer);
}

void MessageRing::post(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) {
  Slot& slot = slots_[next_++ % slots_.size()];
  complete(slot);
  slot.to = to;
  slot.from = from;
  slot.in = in;
  if (!in.empty()) slot.received = hierarchy_.post_receive(from, {slot.memory + segment_, in.size()});
  if (out.empty()) return;
  copy_bytes(slot.memory, out.data(), out.size());
  const std::span<const std::byte> parts[] = {{slot.memory, out.size()}};
  slot.sent = hierarchy_.post_send(to, parts);
}

void MessageRing::finish() {
  for (std::size_t index = 0; index < slots_.size(); ++index) complete(slots_[next_++ % slots_.size()]);
}

void MessageRing::complete(Slot& slot) {
  if (slot.received != 0) {
    wait(slot.received, slot.from);
    copy_bytes(slot.in.data(), slot.memory + segment_, slot.in.size());
  }
  if (slot.sent != 0) wait(slot.sent, slot.to);
}

void MessageRing::wait(Hierarchy::Ticket& ticket, int peer) {
  const Hierarchy::Ticket tickets[] = {ticket};
  const WaitResult result = hierarchy_.wait(tickets, waiting_);
  if (!result.ok())
    exchange_.throw_in_progress(call_, result,
                                result.outcome == WaitResult::Outcome::kTimeout ? peer : result.peer);
  ticket = 0;
}

ClusterCopy::ClusterCopy(Exchange& exchange, const OperationCall& call,
                         std::span<const StagedCopy::Outgoing> outgoing,
                         std::span<const StagedCopy::Incoming> incoming)
    : exchange_(exchange),
      call_(call),
      hierarchy_(*exchange.transport().hierarchy()),
      local_ranks_(hierarchy_.host_ranks()),
      outgoing_(outgoing),
      incoming_(incoming) {}

bool ClusterCopy::is_here(int rank) const { return std::ranges::binary_search(local_ranks_, rank); }

void ClusterCopy::run(std::size_t longest) {
  std::vector<int> peers;
  for (int rank = 0; rank < exchange_.size(); ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (!is_here(rank) && (outgoing_[index].bytes > 0 || incoming_[index].bytes > 0)) peers.push_back(rank);
  }
  // The division into segments is the same on all ranks.
  MessageRing ring(exchange_, call_, hierarchy_,
                   message_segment_bytes(exchange_.transport().staging_bytes()));
  ring.connect(peers);
  const int size = exchange_.size();
  for (int step = 1; step < size; ++step)
    exchange_with(ring, (exchange_.rank() + step) % size, (exchange_.rank() + size - step) % size);
  ring.finish();
  copy_within_host(longest);
}

void ClusterCopy::exchange_with(MessageRing& ring, int to, int from) {
  const StagedCopy::Outgoing out =
      is_here(to) ? StagedCopy::Outgoing{} : outgoing_[static_cast<std::size_t>(to)];
  const StagedCopy::Incoming in =
      is_here(from) ? StagedCopy::Incoming{} : incoming_[static_cast<std::size_t>(from)];
  const std::size_t segments =
      std::max(segment_count(out.bytes, ring.segment()), segment_count(in.bytes, ring.segment()));
  for (std::size_t segment = 0; segment < segments; ++segment) {
    const Range sent = segment_range(out.bytes, ring.segment(), segment);
    const Range received = segment_range(in.bytes, ring.segment(), segment);
    ring.post(to, {out.data + sent.begin, sent.size()}, from, {in.data + received.begin, received.size()});
  }
}

void ClusterCopy::copy_within_host(std::size_t longest) {
  const auto self = static_cast<std::size_t>(exchange_.rank());
  if (incoming_[self].bytes > 0)
    copy_bytes(incoming_[self].data, outgoing_[self].data, incoming_[self].bytes);
  if (local_ranks_.size() == 1) return;
  const std::size_t section = hierarchy_.staging_bytes() / local_ranks_.size() / kCacheLine * kCacheLine;
  if (section == 0)
    throw Error(ErrorKind::kUsage, "MULTIRING_STAGING_BYTES is too small for " +
                                       std::to_string(local_ranks_.size()) + " ranks on a host");
  const auto local_rank =
      static_cast<std::size_t>(std::ranges::find(local_ranks_, exchange_.rank()) - local_ranks_.begin());
  for (std::size_t segment = 0; segment < segment_count(longest, section); ++segment) {
    for (std::size_t other = 0; other < local_ranks_.size(); ++other) {
      const StagedCopy::Outgoing& out = outgoing_[static_cast<std::size_t>(local_ranks_[other])];
      const Range range = segment_range(out.bytes, section, segment);
      if (other != local_rank && !range.empty())
        copy_bytes(hierarchy_.staging(static_cast<int>(local_rank)) + other * section, out.data + range.begin,
                   range.size());
    }
    synchronise_host(exchange_, call_, hierarchy_);
    for (std::size_t other = 0; other < local_ranks_.size(); ++other) {
      const StagedCopy::Incoming& in = incoming_[static_cast<std::size_t>(local_ranks_[other])];
      const Range range = segment_range(in.bytes, section, segment);
      if (other != local_rank && !range.empty())
        copy_bytes(in.data + range.begin, hierarchy_.staged(static_cast<int>(other)) + local_rank * section,
                   range.size());
    }
  }
}

}  // namespace multiring
