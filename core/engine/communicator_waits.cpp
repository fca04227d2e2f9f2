// This file holds what a thread of the program waits for besides its own operations (work, and messages of
// any rank), for how long, and which ranks have ended.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "collective/kinds.h"
#include "engine/communicator.h"
#include "engine/communicator_list.h"
#include "engine/validate.h"

namespace multiring {

void Communicator::set_timeout(double seconds) {
  if (!(seconds > 0))  // NaN included
    throw Error(ErrorKind::kUsage, "a timeout of " + std::to_string(seconds) + " s for communicator '" +
                                       name() + "': expected a number of seconds above 0");
  timeout_.store(seconds, std::memory_order_relaxed);
}

void Communicator::wait(Work& work, const Deadline& deadline, const std::function<void()>& interrupt) const {
  work.wait(deadline, interrupt, [&](ErrorContext& context) { return explain_wait(work, context); });
}

std::string Communicator::describe_end(const WaitResult& ended) const {
  return exchange_.name_of(ended.peer) + " on " + transport_->host(ended.peer) + " (process " +
         std::to_string(transport_->process_id(ended.peer)) + ") has " +
         (ended.peer_left ? "left" : "died, or its host cannot be reached any more");
}

std::string Communicator::end_of(int world_rank) const {
  bool is_member = false;
  for (int peer = 0; peer < size(); ++peer)
    is_member = is_member || transport_->world_rank(peer) == world_rank;
  if (!is_member || closing_.load(std::memory_order_acquire)) return "";
  const std::string begin = "communicator '" + name() + "' has ended: ";
  try {
    AbortRecord record;
    if (transport_->aborted(&record)) return begin + first_sentence(record.message);
    const WaitResult ended = transport_->find_ended();
    const bool is_known = ended.ok() || ended.peer_left || transport_->world_rank(ended.peer) == world_rank;
    return is_known ? "" : begin + describe_end(ended);
  } catch (const Error&) {
    return "";  // a network that fails tells that itself
  }
}

std::optional<Error> Communicator::lost_rank() const {
  if (closing_.load(std::memory_order_acquire)) return std::nullopt;
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
    return Error(ErrorKind::kPeerLost, describe_end(ended), context);
  } catch (const Error&) {
    return std::nullopt;  // a network that fails tells that itself
  }
}

std::uint64_t Communicator::next_number() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

std::optional<WaitInProgress> Communicator::wait_in_progress() const {
  if (closing_.load(std::memory_order_acquire)) return std::nullopt;
  {
    const std::lock_guard lock(mutex_);
    if (!busy_ && queue_.empty()) return std::nullopt;
  }
  const auto place = [&](int peer) {
    return WaitInProgress::Place(exchange_.name_of(peer), transport_->host(peer),
                                 transport_->process_id(peer));
  };
  WaitInProgress found{number(), user_name(), describe_wait_of(rank()), place(rank()), {}};
  for (const int peer : exchange_.awaited().late) found.late.push_back(place(peer));
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
  return (is_here ? exchange_.last_operation(peer) : "an operation") + " of communicator '" + name() + "'";
}

std::uint64_t Communicator::last_conflict(const Operation& operation) const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? 0 : memory_.last_conflict(operation, oldest());
}

// The queued operations have deadlines of their own; what ends without success has broken the communicator.
void Communicator::await_queued(std::uint64_t last, const CallOptions& options) {
  if (last == 0) return;
  std::unique_lock lock(mutex_);
  for (;;) {
    throw_if_unusable();
    if (oldest() > last) return;
    if (busy_ && busy_thread_ == std::this_thread::get_id())
      throw Error(ErrorKind::kUsage, "an operation of communicator '" + name() +
                                         "' shares memory with one that is queued, and was called where that "
                                         "cannot be waited for: in a callback or a signal handler");
    changed_.wait_for(lock, kTick);
    if (oldest() > last || options.interrupt == nullptr || !*options.interrupt) continue;
    lock.unlock();
    (*options.interrupt)();
    lock.lock();
  }
}

std::string Communicator::explain_wait(const Work& work, ErrorContext& context) const {
  context.rank = rank();
  context.host = host();
  std::string text = " on " + exchange_.name_of(rank()) + " (" + host() + ")";
  bool runs = false;
  {
    const std::lock_guard lock(mutex_);
    runs = std::ranges::any_of(running_, [&](const auto& each) { return each.get() == &work; });
    if (!runs && !running_.empty()) {
      // Its kind and name only: the rest may change while it runs.
      const Descriptor& first = running_.front()->operation().descriptor;
      text += std::string(", behind ") + traits_of(first).name + " '" + std::string(first.name_view()) + "'";
    } else if (!runs && busy_) {
      text += ", behind an operation of another thread";
    }
  }
  const Stragglers absent = exchange_.awaited();
  if (!absent.late.empty()) context.peer = absent.late.front();
  const std::string missing = exchange_.describe_missing(absent);
  return text + (runs || missing.empty() ? "" : ", which waits") + missing;
}

void Communicator::require_peer(const Operation& operation, int peer) const {
  if (peer == rank()) throw_usage(operation, "a rank cannot send to or receive from itself");
  if (!transport_->fully_linked() && !transport_->has_link(rank(), peer))
    throw_usage(operation, "its host " + transport_->host(peer) + " is no neighbour of " +
                               transport_->host(rank()) +
                               " (MULTIRING_HOST_LINKS): pass the message on from rank to rank, or use a "
                               "collective");
}

void Communicator::check_sources(Operation& operation, ProbeRequest& request) const {
  std::vector<int>& sources = request.sources;
  if (sources.empty())
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank() && (transport_->fully_linked() || transport_->has_link(peer, rank())))
        sources.push_back(peer);
  if (sources.empty()) throw_usage(operation, "there is no other rank that could send to this one");
  std::ranges::sort(sources);
  const auto twice = std::ranges::unique(sources);
  sources.erase(twice.begin(), twice.end());
  int& root = operation.descriptor.key.root;
  for (const int source : sources) {
    root = source;
    validate(operation, rank(), size(), name());
    require_peer(operation, source);
  }
  if (sources.size() > 1) root = -1;
  for (const int needed : request.needed)
    if (!std::ranges::binary_search(sources, needed))
      throw_usage(operation, exchange_.name_of(needed) + " is needed, but its messages are not waited for");
}

std::optional<MessageInfo> Communicator::probe(ProbeRequest request, const CallOptions& options) {
  throw_if_abandoned();
  Operation operation;  // the receive that follows, for messages
  Descriptor& descriptor = operation.descriptor;
  descriptor.key.kind = OpKind::kReceive;
  check_sources(operation, request);
  {
    const std::lock_guard lock(mutex_);
    throw_if_unusable();
  }
  std::function<void(double)> stalled;
  OperationCall call = make_call(descriptor, options, stalled);
  if (options.timeout > timeout()) call.waiting.stalled = nullptr;  // who says so expects to wait
  stalled = [&](double waited) {
    options_.warn(exchange_.where(call) + ", has waited " + seconds_text(waited) + " for a message of " +
                  rank_list(request.sources, *transport_) + kHowToSilence);
  };
  try {
    exchange_.throw_if_aborted(call);
    return point_to_point_.probe(call, request);
  } catch (const Error& error) {
    // A probe that has run out of time breaks nothing; the error of a group that is broken may be a timeout.
    if (error.kind() == ErrorKind::kTimeout && !transport_->aborted(nullptr)) throw;
    fail_and_raise(descriptor);
  }
}

}  // namespace multiring
