// Aborts and goodbyes over MPI.

#include <algorithm>

#include "base/text.h"
#include "transport/mpi/backoff.h"
#include "transport/mpi/mpi_network.h"

namespace multiring {
namespace {

// How long `leave`, and then the destructor, wait for requests that MPI has not finished.
constexpr double kEndSeconds = 0.5;

}  // namespace

void MpiNetwork::post_control_receive() {
  Reason why{};
  multiring_mpi_request request{};
  if (mpi_.receive(session_->group(), control_input_.get(), sizeof *control_input_, -1, tag_ + kMpiControlTag,
                   &request, why.data(), why.size()) != 0)
    throw_failed(why.data());
  own(kMpiControlTag, request, kControl);
}

void MpiNetwork::on_control_message(const ControlMessage& message) {
  if (message.type == ControlMessage::Type::kAbort) {
    AbortRecord record(message.kind, message.origin, message.text);
    record.about.common = message.common;
    record.about.odd = message.odd;
    record.about.operation = message.operation;
    record.about.tensor = message.tensor;
    return propagate_abort(record, message.rank);
  }
  Peer& other = peer(message.rank);
  other.left = true;
  other.posted = message.counts;
  fail_pending(message.rank);
}

/// Pending messages whose counterpart an ended peer has not posted are lost.
void MpiNetwork::fail_pending(int rank) {
  for (auto& [ticket, message] : messages_)
    if (message.peer == rank && message.state == State::kPending && cannot_complete(message))
      message.state = State::kLost;
}

void MpiNetwork::send_control(int rank, const ControlMessage& message) {
  auto copy = std::make_unique<ControlMessage>(message);
  const multiring_mpi_part part{copy.get(), sizeof *copy};
  Reason why{};
  multiring_mpi_request request{};
  // Ignored: after an error, or at the end, a peer that cannot be reached learns of it otherwise.
  if (mpi_.send(session_->group(), &part, 1, options_.members[static_cast<std::size_t>(rank)],
                tag_ + kMpiControlTag, &request, why.data(), why.size()) != 0)
    return;
  control_output_.push_back(std::move(copy));
  own(kMpiControlTag, request, kDiscarded);
}

void MpiNetwork::propagate_abort(const AbortRecord& record, int from) {
  if (abort_) return;
  abort_ = record;
  if (!usable()) return;
  ControlMessage message;
  message.rank = options_.rank;
  message.kind = record.kind;
  message.origin = record.origin;
  message.common = record.about.common;
  message.odd = record.about.odd;
  copy_cut(message.operation, record.about.operation);
  copy_cut(message.tensor, record.about.tensor);
  copy_cut(message.text, record.message);
  for (int other = 0; other < size(); ++other)
    if (other != from && peer(other).connected && !peer(other).left && !peer(other).lost)
      send_control(other, message);
}

void MpiNetwork::abort(const Error& error) {
  relay({error.kind(), options_.rank, error.what(), error.context()});
}

void MpiNetwork::relay(const AbortRecord& record) {
  const std::lock_guard lock(mutex_);
  if (!left_) propagate_abort(record, -1);
}

bool MpiNetwork::aborted(AbortRecord* record) const {
  const std::lock_guard lock(mutex_);
  if (!abort_) return false;
  if (record != nullptr) *record = *abort_;
  return true;
}

void MpiNetwork::leave() {
  std::vector<StreamCounts> counts;
  {
    const std::lock_guard lock(mutex_);
    if (left_) return;
    left_ = true;
    if (!usable()) return;
    counts = posted_counts();
    if (mpi_.simulated == 0) cancel_receives();  // simulations cannot cancel, and no time would pass
  }
  await_requests([](Ticket owner) { return owner == kCancelled; });
  const std::lock_guard lock(mutex_);
  if (!usable()) return;
  for (int other = 0; other < size(); ++other) {
    const Peer& each = peer(other);
    if (!each.connected || each.left || each.lost) continue;
    ControlMessage message;
    message.type = ControlMessage::Type::kGoodbye;
    message.rank = options_.rank;
    message.counts = counts[static_cast<std::size_t>(other)];
    send_control(other, message);
  }
}

/// All sends, and the receives that are not about to be cancelled.
std::vector<StreamCounts> MpiNetwork::posted_counts() const {
  std::vector<StreamCounts> counts(peers_.size());
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    for (std::size_t channel = 0; channel < kMpiChannels; ++channel) {
      counts[rank].sent[channel] = peers_[rank].streams[channel].sent;
      counts[rank].received[channel] = peers_[rank].streams[channel].received;
    }
  }
  for (const auto& [ticket, message] : messages_) {
    if (message.is_send || message.state == State::kDone) continue;
    std::uint64_t& received =
        counts[static_cast<std::size_t>(message.peer)].received[static_cast<std::size_t>(message.channel)];
    received = std::min(received, message.sequence - 1);
  }
  return counts;
}

void MpiNetwork::cancel_receives() {
  for (auto& [all, owners] : requests_) {
    for (std::size_t index = 0; index < all.size(); ++index) {
      const auto found = messages_.find(owners[index]);
      const bool receives = owners[index] == kControl || (found != messages_.end() && !found->second.is_send);
      if (!receives) continue;
      if (found != messages_.end()) found->second.state = State::kLost;
      owners[index] = kCancelled;
      mpi_.cancel(&all[index]);
    }
  }
}

void MpiNetwork::await_requests(const std::function<bool(Ticket)>& wanted) {
  const Deadline deadline = Deadline::after(kEndSeconds);
  for (Backoff backoff;; backoff.pause()) {
    const std::lock_guard lock(mutex_);
    try {
      advance();
    } catch (const Error&) {
      return;  // MPI fails: there is nothing to wait for
    }
    if (!usable() || mpi_.simulated != 0 || deadline.expired() || !has_requests(wanted)) return;
  }
}

}  // namespace multiring
