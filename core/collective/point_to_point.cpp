#include "collective/point_to_point.h"

#include <algorithm>
#include <cstring>

#include "base/arithmetic/kernels/copy.h"
#include "base/immovable.h"
#include "topology/chunks.h"

namespace multiring {

/// Header of a message's first chunk.
struct PointToPoint::Envelope {
  Descriptor descriptor;
  std::int64_t tag = 0;
};

/// Exclusive use of a mailbox. Another thread may hold it as long as its own call waits, so taking it waits
/// like any call.
class PointToPoint::MailboxLock : Immovable {
 public:
  /// `probing`: how many threads probe for what comes into the mailbox; null: it is for what is sent.
  MailboxLock(const RoundExchange& exchange, MailboxState& mailbox, const OperationCall& call, int peer,
              const std::atomic<int>* probing)
      : transport_(exchange.transport()), mailbox_(mailbox), probing_(probing) {
    constexpr std::chrono::milliseconds kTick(50);
    std::unique_lock lock(mailbox.mutex);
    // A signal handler that interrupts a call of its own thread would wait for itself.
    if (mailbox.busy && mailbox.owner == std::this_thread::get_id())
      exchange.throw_usage_of(call,
                              "called from a signal handler that interrupts another one to the same rank");
    if (mailbox.busy) call.waiting.deadline.start();
    while (mailbox.busy) {
      mailbox.idle.wait_for(lock, kTick);
      if (!mailbox.busy) break;
      lock.unlock();
      call.waiting.check_interrupt();
      exchange.throw_if_aborted(call);
      const bool cancelled = call.waiting.cancelled != nullptr && call.waiting.cancelled->load();
      if (cancelled) exchange.throw_for_peer(call, {WaitResult::Outcome::kCancelled, peer, false}, peer);
      if (call.waiting.deadline.expired())
        exchange.throw_for_peer(call, {WaitResult::Outcome::kTimeout, peer, false}, peer);
      lock.lock();
    }
    mailbox.busy = true;
    mailbox.told = false;
    mailbox.owner = std::this_thread::get_id();
  }
  ~MailboxLock() {
    bool probed = false;
    {
      const std::lock_guard lock(mailbox_.mutex);
      mailbox_.busy = false;
      // Under the lock: a probe that counts itself later finds the mailbox idle.
      probed = probing_ != nullptr && probing_->load(std::memory_order_relaxed) > 0;
    }
    mailbox_.idle.notify_one();
    if (probed) transport_.wake_receives();
  }

 private:
  Transport& transport_;
  MailboxState& mailbox_;
  const std::atomic<int>* const probing_;
};

PointToPoint::PointToPoint(RoundExchange& exchange)
    : exchange_(exchange),
      sent_(static_cast<std::size_t>(exchange.size())),
      received_(static_cast<std::size_t>(exchange.size())) {
  static_assert(sizeof(Envelope) <= Rounds::kUserHeaderBytes);
}

void PointToPoint::send(const OperationCall& call, const Operation& operation, std::int64_t tag) {
  Transport& transport = exchange_.transport();
  const int destination = operation.descriptor.key.root;
  MailboxState& mailbox = sent_[static_cast<std::size_t>(destination)];
  const MailboxLock mailbox_lock(exchange_, mailbox, call, destination, nullptr);
  const std::size_t chunk_bytes = transport.mailbox_chunk_bytes();
  const std::size_t segments =
      std::max<std::size_t>(1, segment_count(operation.descriptor.bytes, chunk_bytes));
  for (std::size_t segment = 0; segment < segments; ++segment) {
    const std::uint64_t chunk = ++mailbox.chunks;
    const std::uint64_t free_after =
        chunk > Mailboxes::kMailboxChunks ? chunk - Mailboxes::kMailboxChunks : 0;
    const WaitResult result = transport.await_read(destination, free_after, call.waiting);
    if (!result.ok()) throw_unsent(call, result, destination);
    if (segment == 0) {
      const Envelope envelope{operation.descriptor, tag};
      std::memcpy(transport.mailbox_header(exchange_.rank(), destination, chunk), &envelope, sizeof envelope);
    }
    const Range range = segment_range(operation.descriptor.bytes, chunk_bytes, segment);
    if (!range.empty())
      copy_bytes(transport.mailbox_payload(exchange_.rank(), destination, chunk),
                 operation.input + range.begin, range.size());
    transport.mailbox_written(destination, chunk, range.size());
  }
  const WaitResult result = transport.await_sent(destination, call.waiting);
  if (!result.ok()) throw_unsent(call, result, destination);
}

void PointToPoint::throw_unsent(const OperationCall& call, const WaitResult& result, int destination) {
  try {
    exchange_.throw_for_peer(call, result, destination);
  } catch (const Error& error) {
    const bool timeout = result.outcome == WaitResult::Outcome::kTimeout;
    const std::string mutual_send = timeout ? describe_mutual_send(destination) : std::string();
    if (mutual_send.empty()) throw;
    throw Error(error.kind(), std::string(error.what()) + " " + mutual_send, error.context());
  }
}

std::string PointToPoint::describe_mutual_send(int peer) {
  MailboxState& mailbox = received_[static_cast<std::size_t>(peer)];
  {
    const std::lock_guard lock(mailbox.mutex);
    if (mailbox.busy || !exchange_.transport().has_written(peer, mailbox.chunks + 1)) return {};
  }
  return "It sends to this rank as well, and no thread of this rank receives: let one of them receive first.";
}

std::optional<MessageInfo> PointToPoint::probe(const OperationCall& call, const ProbeRequest& request) {
  struct Counted {
    std::atomic<int>& count;
    explicit Counted(std::atomic<int>& c) : count(c) { count.fetch_add(1, std::memory_order_relaxed); }
    ~Counted() { count.fetch_sub(1, std::memory_order_relaxed); }
  } const counted(probing_);
  // Relaxed: only that no source is always the last.
  const auto next = std::ranges::upper_bound(request.sources, last_told_.load(std::memory_order_relaxed));
  const auto first = static_cast<std::size_t>(next - request.sources.begin());
  std::optional<MessageInfo> found;
  const auto ready = [&] {
    if (request.stopped != nullptr && request.stopped->load(std::memory_order_seq_cst)) return true;
    for (std::size_t at = 0; at < request.sources.size() && !found; ++at)
      found = next_message(call, request.sources[(first + at) % request.sources.size()]);
    return found.has_value();
  };
  AnySource any(request.sources, request.needed, ready,
                [this](int source, bool left) { return is_over(source, left); });
  const WaitResult result = exchange_.transport().await_any(any, call.waiting);
  if (!result.ok()) exchange_.throw_for_any(call, result, any, describe_told(request.sources));
  if (found) last_told_.store(found->source, std::memory_order_relaxed);
  return found;
}

std::optional<MessageInfo> PointToPoint::next_message(const OperationCall& call, int source) {
  const Transport& transport = exchange_.transport();
  MailboxState& mailbox = received_[static_cast<std::size_t>(source)];
  const std::lock_guard lock(mailbox.mutex);
  if (mailbox.busy || mailbox.told) return std::nullopt;
  const std::uint64_t chunk = mailbox.chunks + 1;
  if (!transport.has_written(source, chunk)) return std::nullopt;
  Envelope envelope;
  std::memcpy(static_cast<void*>(&envelope), transport.mailbox_header(source, exchange_.rank(), chunk),
              sizeof envelope);
  const Descriptor& sent = envelope.descriptor;
  if (!is_plausible(sent) || !is_whole_array(sent)) exchange_.throw_corrupt(call, source);
  mailbox.told = true;
  return MessageInfo{source, envelope.tag, sent.dtype, {sent.shape.begin(), sent.shape.begin() + sent.dims}};
}

bool PointToPoint::is_over(int source, bool left) {
  MailboxState& mailbox = received_[static_cast<std::size_t>(source)];
  const std::lock_guard lock(mailbox.mutex);
  if (mailbox.busy) return false;
  return (mailbox.told && !left) || !exchange_.transport().has_written(source, mailbox.chunks + 1);
}

std::string PointToPoint::describe_told(const std::vector<int>& sources) {
  std::string text;
  for (const int source : sources) {
    MailboxState& mailbox = received_[static_cast<std::size_t>(source)];
    const std::lock_guard lock(mailbox.mutex);
    if (mailbox.busy || !mailbox.told) continue;
    Envelope envelope;
    std::memcpy(static_cast<void*>(&envelope),
                exchange_.transport().mailbox_header(source, exchange_.rank(), mailbox.chunks + 1),
                sizeof envelope);
    text += (text.empty() ? "" : "; ") + exchange_.name_of(source) + " has sent a message with tag " +
            std::to_string(envelope.tag) + ", of which a probe has told before: receive it first";
  }
  return text;
}

void PointToPoint::receive(const OperationCall& call, Operation& operation, std::int64_t tag) {
  Transport& transport = exchange_.transport();
  const int source = operation.descriptor.key.root;
  MailboxState& mailbox = received_[static_cast<std::size_t>(source)];
  const MailboxLock mailbox_lock(exchange_, mailbox, call, source, &probing_);
  std::size_t segments = 1;
  for (std::size_t segment = 0; segment < segments; ++segment) {
    const std::uint64_t chunk = ++mailbox.chunks;
    const WaitResult result = transport.await_written(source, chunk, call.waiting);
    if (!result.ok()) exchange_.throw_for_peer(call, result, source);
    if (segment == 0) {
      Envelope envelope;
      std::memcpy(static_cast<void*>(&envelope), transport.mailbox_header(source, exchange_.rank(), chunk),
                  sizeof envelope);
      accept(call, operation, envelope, tag);
      segments = std::max<std::size_t>(
          1, segment_count(operation.descriptor.bytes, transport.mailbox_chunk_bytes()));
    }
    const Range range = segment_range(operation.descriptor.bytes, transport.mailbox_chunk_bytes(), segment);
    if (!range.empty())
      copy_bytes(operation.output + range.begin, transport.mailbox_payload(source, exchange_.rank(), chunk),
                 range.size());
    transport.mailbox_read(source, chunk);
  }
}

void PointToPoint::accept(const OperationCall& call, Operation& operation, const Envelope& envelope,
                          std::int64_t tag) const {
  const Descriptor& sent = envelope.descriptor;
  if (!is_plausible(sent) || !is_whole_array(sent))
    exchange_.throw_corrupt(call, operation.descriptor.key.root);
  const bool expects = operation.output != nullptr;
  const Descriptor& wanted = operation.descriptor;
  if (envelope.tag != tag || (expects && (sent.dtype != wanted.dtype || sent.bytes != wanted.bytes)))
    exchange_.throw_mismatch_with(
        call, wanted.key.root,
        exchange_.name_of(wanted.key.root) + " sent tag " + std::to_string(envelope.tag) + " " +
            describe(sent) + " where " + exchange_.name_of(exchange_.rank()) + " expects tag " +
            std::to_string(tag) + (expects ? " " + describe(wanted) : std::string()) +
            ". Messages between two ranks are received in the order in which they were sent.");
  operation.descriptor.dtype = sent.dtype;
  operation.descriptor.bytes = sent.bytes;
  operation.descriptor.rows = sent.rows;
  operation.descriptor.dims = sent.dims;
  operation.descriptor.shape = sent.shape;
  if (!expects) {
    operation.result.allocate(sent.bytes);
    operation.output = operation.result.data();
  }
}

}  // namespace multiring
