#include "transport/mpi/mpi_network.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "transport/mpi/backoff.h"
#include "transport/timed_wait.h"

namespace multiring {
namespace {

using Outcome = WaitResult::Outcome;

/// A wait that polls looks every so often at what it does not wait for, too.
constexpr unsigned kPollsOfOwn = 32;

}  // namespace

MpiNetwork::MpiNetwork(std::shared_ptr<MpiSession> session, MpiOptions options)
    : session_(std::move(session)),
      mpi_(session_->functions()),
      options_(std::move(options)),
      tag_(session_->reserve_tags(options_.name, kMpiTags)),
      peers_(options_.members.size()) {
  if (options_.channels > kMpiChannels)
    throw Error(ErrorKind::kInternal, "a network over MPI of " + std::to_string(options_.channels) +
                                          " channels: there are " + std::to_string(kMpiChannels));
  control_input_ = std::make_unique<ControlMessage>();
  post_control_receive();
}

MpiNetwork::~MpiNetwork() {
  leave();
  await_requests([](Ticket) { return true; });
  const std::lock_guard lock(mutex_);
  if (!has_requests([](Ticket) { return true; }) || !usable()) return;
  for (auto& memory : kept_) session_->keep(std::move(memory));
  for (auto& message : control_output_) session_->keep(std::shared_ptr<ControlMessage>(std::move(message)));
  session_->keep(std::shared_ptr<ControlMessage>(std::move(control_input_)));
}

bool MpiNetwork::usable() const {
  return !abandoned_.load(std::memory_order_acquire) && mpi_.finalized() == 0;
}

std::string MpiNetwork::named(int rank) const {
  return "rank " + std::to_string(rank) + " on " + options_.hosts[static_cast<std::size_t>(rank)];
}

void MpiNetwork::throw_failed(const char* why) const {
  throw Error(ErrorKind::kInternal, named(options_.rank) + ": MPI failed: " + why);
}

void MpiNetwork::connect(std::span<const Link> links, const WaitOptions& waiting) {
  waiting.check_interrupt();
  const std::lock_guard lock(mutex_);
  advance();
  if (abort_) throw Error(abort_->kind, named(abort_->origin) + " stopped all ranks: " + abort_->message);
  for (const Link& link : links) {
    Peer& other = peer(link.peer);
    if (other.left || other.lost) {
      ErrorContext context;
      context.rank = options_.rank;
      context.peer = link.peer;
      context.host = options_.hosts[static_cast<std::size_t>(link.peer)];
      throw Error(
          ErrorKind::kPeerLost,
          named(link.peer) + (other.left ? " has left the job" : " cannot be reached by MPI any more"),
          context);
    }
    other.connected = true;
  }
}

MpiNetwork::Stream& MpiNetwork::stream_to_post(int rank, int channel, std::size_t bytes) {
  Stream& stream = peer(rank).streams[static_cast<std::size_t>(channel)];
  require_usable();
  if (left_) throw Error(ErrorKind::kInternal, "a message was posted by a rank that has left");
  if (stream.out_of_step)
    throw Error(ErrorKind::kInternal, "a message was posted on channel " + std::to_string(channel) +
                                          " with " + named(rank) + ", of which one was given up");
  if (bytes > INT_MAX)
    throw Error(ErrorKind::kInternal, "a message of " + std::to_string(bytes) + " bytes by MPI");
  return stream;
}

void MpiNetwork::require_usable() const {
  if (!usable())
    throw Error(ErrorKind::kUsage, named(options_.rank) +
                                       ": MPI was finalized before multiring.shutdown(), and carries nothing "
                                       "any more");
}

void MpiNetwork::own(int tag, const multiring_mpi_request& request, Ticket owner) {
  Requests& requests = requests_[static_cast<std::size_t>(tag)];
  requests.all.push_back(request);
  requests.owners.push_back(owner);
}

bool MpiNetwork::has_requests(const std::function<bool(Ticket owner)>& wanted) const {
  return std::ranges::any_of(requests_,
                             [&](const Requests& each) { return std::ranges::any_of(each.owners, wanted); });
}

/// Whether the peer has ended without the counterpart of a message.
bool MpiNetwork::cannot_complete(const Message& message) const {
  const Peer& other = peers_[static_cast<std::size_t>(message.peer)];
  const auto channel = static_cast<std::size_t>(message.channel);
  const std::uint64_t posted = message.is_send ? other.posted.received[channel] : other.posted.sent[channel];
  return other.lost || (other.left && message.sequence > posted);
}

MpiNetwork::Ticket MpiNetwork::post_send(int peer, int channel,
                                         std::span<const std::span<const std::byte>> parts) {
  const std::lock_guard lock(mutex_);
  std::vector<multiring_mpi_part> pieces;
  std::size_t bytes = 0;
  for (const auto part : parts) {
    if (!part.empty()) pieces.push_back({part.data(), part.size()});
    bytes += part.size();
  }
  Stream& stream = stream_to_post(peer, channel, bytes);
  return post({State::kPending, true, peer, channel, stream.sent + 1, bytes}, stream.sent,
              [&](multiring_mpi_request& request, Reason& why) {
                return mpi_.send(session_->group(), pieces.data(), pieces.size(),
                                 options_.members[static_cast<std::size_t>(peer)], tag_ + channel, &request,
                                 why.data(), why.size());
              });
}

MpiNetwork::Ticket MpiNetwork::post_receive(int peer, int channel, std::span<std::byte> buffer) {
  const std::lock_guard lock(mutex_);
  Stream& stream = stream_to_post(peer, channel, buffer.size());
  return post({State::kPending, false, peer, channel, stream.received + 1, buffer.size()}, stream.received,
              [&](multiring_mpi_request& request, Reason& why) {
                return mpi_.receive(session_->group(), buffer.data(), buffer.size(),
                                    options_.members[static_cast<std::size_t>(peer)], tag_ + channel,
                                    &request, why.data(), why.size());
              });
}

template <class Start>
MpiNetwork::Ticket MpiNetwork::post(Message message, std::uint64_t& counter, const Start& start) {
  Reason why{};
  multiring_mpi_request request{};
  const bool lost = cannot_complete(message);
  if (lost)
    message.state = State::kLost;
  else if (start(request, why) != 0)
    throw_failed(why.data());
  ++counter;
  const Ticket ticket = next_ticket_++;
  messages_.emplace(ticket, message);
  if (!lost) own(message.channel, request, ticket);
  return ticket;
}

WaitResult MpiNetwork::wait(std::span<const Ticket> tickets, const WaitOptions& waiting) {
  TimedWait timed(waiting);
  Backoff backoff;
  for (unsigned polls = 0;; ++polls) {
    {
      const std::lock_guard lock(mutex_);
      require_usable();
      const std::array<bool, kMpiTags> own = tags_of(tickets);
      if (mpi_.simulated != 0)
        await(tickets);
      else
        for (int tag = 0; tag < kMpiTags; ++tag)
          if (own[static_cast<std::size_t>(tag)] || polls % kPollsOfOwn == 0) advance(tag);
      WaitResult result;
      if (check_tickets(tickets, &result)) return result;
    }
    if (waiting.is_cancelled()) return {Outcome::kCancelled};
    if (timed.expired()) return {Outcome::kTimeout};
    backoff.pause();
  }
}

WaitResult MpiNetwork::wait_any(std::span<const Ticket> tickets, const WaitOptions& waiting) {
  TimedWait timed(waiting);
  for (Backoff backoff;; backoff.pause()) {
    {
      const std::lock_guard lock(mutex_);
      // Before losses: `leave` of this rank makes its receives lost.
      if (waiting.is_cancelled()) return {Outcome::kCancelled};
      require_usable();
      advance();
      const Message* lost = nullptr;
      const Message* out_of_step = nullptr;
      for (const Ticket ticket : tickets) {
        const auto found = messages_.find(ticket);
        if (found == messages_.end() || found->second.state == State::kDone) return {};
        if (found->second.state == State::kLost) lost = &found->second;
        if (found->second.state == State::kOutOfStep) out_of_step = &found->second;
      }
      if (abort_) return {Outcome::kAborted};
      if (lost != nullptr) return {Outcome::kPeerLost, lost->peer, peer(lost->peer).left};
      if (out_of_step != nullptr) throw_out_of_step(*out_of_step);
    }
    if (timed.expired()) return {Outcome::kTimeout};
  }
}

std::array<bool, kMpiTags> MpiNetwork::tags_of(std::span<const Ticket> tickets) const {
  std::array<bool, kMpiTags> tags{};
  for (const Ticket ticket : tickets)
    if (const auto found = messages_.find(ticket); found != messages_.end())
      tags[static_cast<std::size_t>(found->second.channel)] = true;
  return tags;
}

bool MpiNetwork::check_tickets(std::span<const Ticket> tickets, WaitResult* result) {
  int lost = -1;
  bool all_done = true;
  const Message* out_of_step = nullptr;
  for (const Ticket ticket : tickets) {
    const auto found = messages_.find(ticket);
    if (found == messages_.end())
      throw Error(ErrorKind::kInternal, "a wait for a message whose ticket was used before");
    const Message& message = found->second;
    all_done = all_done && message.state == State::kDone;
    if (message.state == State::kLost && lost < 0) lost = message.peer;
    if (message.state == State::kOutOfStep) out_of_step = &message;
  }
  if (all_done) {
    for (const Ticket ticket : tickets) messages_.erase(ticket);
    *result = {};
    return true;
  }
  if (abort_) {
    *result = {Outcome::kAborted};
    return true;
  }
  if (lost >= 0) {
    *result = {Outcome::kPeerLost, lost, peer(lost).left};
    return true;
  }
  if (out_of_step != nullptr) throw_out_of_step(*out_of_step);
  return false;
}

void MpiNetwork::throw_out_of_step(const Message& message) const {
  throw Error(ErrorKind::kInternal, "a wait for message " + std::to_string(message.sequence) +
                                        " on channel " + std::to_string(message.channel) + " with " +
                                        named(message.peer) + ", of which another was given up");
}

bool MpiNetwork::done(Ticket ticket) const {
  const std::lock_guard lock(mutex_);
  const auto found = messages_.find(ticket);
  return found != messages_.end() && found->second.state == State::kDone;
}

void MpiNetwork::give_up(std::span<const Ticket> tickets) {
  const std::lock_guard lock(mutex_);
  for (const Ticket ticket : tickets) {
    const auto found = messages_.find(ticket);
    if (found == messages_.end()) continue;
    const Message message = found->second;
    messages_.erase(found);
    if (message.state == State::kDone) continue;
    peer(message.peer).streams[static_cast<std::size_t>(message.channel)].out_of_step = true;
    for (auto& [other, each] : messages_)
      if (each.peer == message.peer && each.channel == message.channel && each.state == State::kPending)
        each.state = State::kOutOfStep;
    Requests& requests = requests_[static_cast<std::size_t>(message.channel)];
    const auto owner = std::ranges::find(requests.owners, ticket);
    if (owner == requests.owners.end() || !usable()) continue;
    *owner = kDiscarded;
    if (!message.is_send)
      mpi_.cancel(&requests.all[static_cast<std::size_t>(owner - requests.owners.begin())]);
  }
}

void MpiNetwork::progress() {
  const std::lock_guard lock(mutex_);
  advance();
}

void MpiNetwork::keep(std::shared_ptr<const void> memory) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(memory));
}

/// Waits for one message after the other; in simulations, where no rank fails.
void MpiNetwork::await(std::span<const Ticket> tickets) {
  Reason why{};
  for (const Ticket ticket : tickets) {
    const auto message = messages_.find(ticket);
    if (message == messages_.end()) continue;
    Requests& requests = requests_[static_cast<std::size_t>(message->second.channel)];
    const auto owner = std::ranges::find(requests.owners, ticket);
    if (owner == requests.owners.end()) continue;
    const auto index = owner - requests.owners.begin();
    multiring_mpi_request request = requests.all[static_cast<std::size_t>(index)];
    multiring_mpi_completion completion{};
    int count = 0;
    if (mpi_.test(&request, 1, 1, &completion, &count, why.data(), why.size()) != 0) throw_failed(why.data());
    requests.all.erase(requests.all.begin() + index);
    requests.owners.erase(owner);
    finish_message(ticket, completion);
  }
}

void MpiNetwork::advance() {
  for (int tag = 0; tag < kMpiTags; ++tag) advance(tag);
}

void MpiNetwork::advance(int tag) {
  auto& [all, owners] = requests_[static_cast<std::size_t>(tag)];
  if (all.empty() || !usable() || mpi_.simulated != 0) return;
  completions_.resize(all.size());
  Reason why{};
  int count = 0;
  if (mpi_.test(all.data(), static_cast<int>(all.size()), 0, completions_.data(), &count, why.data(),
                why.size()) != 0)
    throw_failed(why.data());
  if (count == 0) return;
  // Completions may post further requests, which are appended.
  std::vector<bool> completed(all.size());
  const std::vector<multiring_mpi_completion> completions(completions_.begin(), completions_.begin() + count);
  for (const multiring_mpi_completion& each : completions)
    completed[static_cast<std::size_t>(each.index)] = true;
  for (const multiring_mpi_completion& each : completions)
    finish(owners[static_cast<std::size_t>(each.index)], each);
  std::size_t kept = 0;
  for (std::size_t index = 0; index < all.size(); ++index) {
    if (index < completed.size() && completed[index]) continue;
    all[kept] = all[index];
    owners[kept++] = owners[index];
  }
  all.resize(kept);
  owners.resize(kept);
}

void MpiNetwork::finish(Ticket owner, const multiring_mpi_completion& completion) {
  if (owner == kDiscarded || owner == kCancelled) return;
  if (owner != kControl) return finish_message(owner, completion);
  if (left_) return;  // cancelled
  const ControlMessage message = *control_input_;
  const bool whole = completion.outcome == MULTIRING_MPI_DONE && completion.bytes == sizeof message;
  post_control_receive();
  if (whole) on_control_message(message);
}

void MpiNetwork::finish_message(Ticket ticket, const multiring_mpi_completion& completion) {
  const auto found = messages_.find(ticket);
  if (found == messages_.end() || found->second.state != State::kPending) return;
  Message& message = found->second;
  if (completion.outcome == MULTIRING_MPI_FAILED) {
    peer(message.peer).lost = true;
    return fail_pending(message.peer);
  }
  const bool longer = completion.outcome == MULTIRING_MPI_TRUNCATED;
  if (!message.is_send && (longer || completion.bytes != message.bytes))
    return propagate_abort(
        {ErrorKind::kMismatch, options_.rank,
         named(message.peer) + " sent " +
             (longer ? "more than " + std::to_string(message.bytes) : std::to_string(completion.bytes)) +
             " bytes as message " + std::to_string(message.sequence) + " on channel " +
             std::to_string(message.channel) + ", where rank " + std::to_string(options_.rank) + " expects " +
             std::to_string(message.bytes) + " bytes"},
        -1);
  message.state = State::kDone;
}

}  // namespace multiring
