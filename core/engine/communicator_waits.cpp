// What a communicator waits for, and which ranks have ended.

#include <cstring>

#include "base/text.h"
#include "engine/communicator.h"

namespace multiring {

namespace {

/// "rank 1 on b (process 7) has died, or its host cannot be reached any more", of a wait that has ended so.
std::string describe_end(const Exchange& exchange, const WaitResult& ended) {
  const Transport& transport = exchange.transport();
  return exchange.name_of(ended.peer) + " on " + transport.host(ended.peer) + " (process " +
         std::to_string(transport.process_id(ended.peer)) + ") has " +
         (ended.peer_left ? "left" : "died, or its host cannot be reached any more");
}

}  // namespace

void Communicator::wait(Work& work, const Deadline& deadline, const std::function<void()>& interrupt) const {
  const Exchange& exchange = runner_.exchange();
  work.wait(deadline, interrupt, [&](ErrorContext& context) {
    context.rank = rank();
    context.host = host();
    std::string text = " on " + exchange.name_of(rank()) + " (" + host() + ")";
    const bool runs = queue_.describe_turn(work, text);
    const Stragglers absent = exchange.awaited();
    if (!absent.late.empty()) context.peer = absent.late.front();
    const std::string missing = exchange.describe_missing(absent);
    return text + (runs || missing.empty() ? "" : ", which waits") + missing;
  });
}

std::string Communicator::end_of(int world_rank) const {
  bool is_member = false;
  for (int peer = 0; peer < size(); ++peer)
    is_member = is_member || transport_->world_rank(peer) == world_rank;
  if (!is_member || runner_.is_cancelled()) return "";
  const std::string begin = "communicator '" + name() + "' has ended: ";
  try {
    AbortRecord record;
    if (transport_->aborted(&record)) return begin + first_sentence(record.message);
    const WaitResult ended = transport_->find_ended();
    const bool is_known = ended.ok() || ended.peer_left || transport_->world_rank(ended.peer) == world_rank;
    return is_known ? "" : begin + describe_end(runner_.exchange(), ended);
  } catch (const Error&) {
    return "";  // a network that fails tells that itself
  }
}

std::optional<Error> Communicator::lost_rank() const {
  if (runner_.is_cancelled()) return std::nullopt;
  ErrorContext context;
  context.rank = rank();
  context.host = host();
  try {
    AbortRecord record;
    if (transport_->aborted(&record) && record.kind == ErrorKind::kPeerLost && record.about.odd >= 0) {
      context.peer = record.about.odd;
      return Error(ErrorKind::kPeerLost, first_sentence(record.message), context);
    }
    const WaitResult ended = transport_->find_ended();
    if (ended.ok()) return std::nullopt;
    context.peer = ended.peer;
    return Error(ErrorKind::kPeerLost, describe_end(runner_.exchange(), ended), context);
  } catch (const Error&) {
    return std::nullopt;  // a network that fails tells that itself
  }
}

std::string Communicator::wait_on_this_rank(int world_rank) const {
  if (runner_.is_cancelled()) return "";
  for (int peer = 0; peer < size(); ++peer)
    if (transport_->world_rank(peer) == world_rank && transport_->is_ahead(peer))
      return describe_wait_of(peer);
  return "";
}

std::optional<WaitInProgress> Communicator::wait_in_progress() const {
  if (runner_.is_cancelled() || queue_.is_idle()) return std::nullopt;
  const auto place = [&](int peer) {
    return WaitInProgress::Place(runner_.exchange().name_of(peer), transport_->host(peer),
                                 transport_->process_id(peer));
  };
  WaitInProgress found{number(), user_name(), describe_wait_of(rank()), place(rank()), {}};
  for (const int peer : runner_.exchange().awaited().late) found.late.push_back(place(peer));
  return found;
}

std::string Communicator::user_name() const {
  const bool is_of_queue = name().ends_with(kNamesOfQueue);
  return is_of_queue ? name().substr(0, name().size() - std::strlen(kNamesOfQueue)) : name();
}

std::string Communicator::describe_wait_of(int peer) const {
  if (name().ends_with(kNamesOfQueue))
    return "the exchange of gradients or other named tensors (communicator '" + user_name() + "')";
  const bool is_here = peer == rank() || transport_->arrived(peer) > transport_->arrived(rank());
  return (is_here ? runner_.exchange().last_operation(peer) : "an operation") + " of communicator '" +
         name() + "'";
}

}  // namespace multiring
