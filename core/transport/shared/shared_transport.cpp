#include "transport/shared/shared_transport.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "base/text.h"

namespace multiring {
namespace {

// A sleeping rank checks for lost peers, its deadline and interrupts at these intervals.
constexpr double kFirstTick = 0.005;
constexpr double kLongestTick = 0.05;

// A pause instruction takes 10 to 60 ns, depending on the processor; the budget need not be exact.
constexpr double kSpinsPerMicrosecond = 25.0;

// A sleep is short if it takes so many times as long as a wait spins at most: half of that may be the waking.
constexpr double kShortSleep = 2.0;

// Collectives cut staging memory into cache lines.
constexpr std::size_t kMinStagingBytes = 64;

SpinBudget spin_budget(const SharedTransportOptions& options) {
  const double least = std::min(options.spin_microseconds, 1.0);
  return {static_cast<std::uint32_t>(least * kSpinsPerMicrosecond),
          static_cast<std::uint32_t>(options.spin_microseconds * kSpinsPerMicrosecond)};
}

/// Whether the condition came true within so many pause instructions.
template <class Ready>
bool spin(const Ready& ready, std::uint32_t spins) {
  for (std::uint32_t count = 0; count < spins; ++count) {
    cpu_relax();
    if (ready()) return true;
  }
  return false;
}

/// The same if oversubscribed: a peer that needs this core gets it without the cost of sleeping and waking.
/// Another process may keep it for milliseconds, so the limit is a time.
template <class Ready>
bool yield(const Ready& ready, std::uint32_t spins) {
  const auto until =
      Clock::now() + std::chrono::nanoseconds(static_cast<std::int64_t>(1e3 * spins / kSpinsPerMicrosecond));
  do {
    ::sched_yield();
    if (ready()) return true;
  } while (Clock::now() < until);
  return false;
}

/// The condition that ranks [0, size) except one have arrived at a round.
struct Arrivals {
  const RankState* const states;
  const int size;
  const int self;
  const std::uint64_t round;

  bool pending(int rank) const {
    // seq_cst: see WaitPoint. It also orders the reads of what was published.
    return rank != self && states[rank].arrived.load(std::memory_order_seq_cst) < round;
  }
  bool operator()() const {
    for (int rank = 0; rank < size; ++rank)
      if (pending(rank)) return false;
    return true;
  }
};

/// The condition that a counter of one peer has reached a value.
struct PeerCounter {
  const std::atomic<std::uint64_t>& counter;
  const int peer;
  const std::uint64_t value;

  bool pending(int rank) const { return rank == peer && !(*this)(); }
  bool operator()() const { return counter.load(std::memory_order_seq_cst) >= value; }
};

/// The condition that something of one of several ranks has come.
struct AnyChunk {
  AnySource& any;

  bool operator()() const { return any.ready(); }
};

}  // namespace

SharedTransport::SharedTransport(std::shared_ptr<HostGroup> host_group, std::vector<int> members,
                                 std::uint64_t tag, const SharedTransportOptions& options,
                                 const WaitOptions& waiting)
    : host_group_(std::move(host_group)),
      members_(std::move(members)),
      tag_(tag),
      options_(options),
      oversubscribed_(options.oversubscribed.value_or(host_group_->size() > host_group_->cores())),
      layout_(static_cast<int>(members_.size()), options.staging_bytes),
      spin_(spin_budget(options)) {
  const auto self = std::find(members_.begin(), members_.end(), host_group_->rank());
  if (self == members_.end())
    throw Error(ErrorKind::kInternal, "a rank builds a transport it is not part of");
  if (options.staging_bytes < kMinStagingBytes)
    throw Error(ErrorKind::kUsage, "MULTIRING_STAGING_BYTES is " + std::to_string(options.staging_bytes) +
                                       ": at least " + std::to_string(kMinStagingBytes) + " are needed");
  rank_ = static_cast<int>(self - members_.begin());
  block_ = host_group_->share(layout_.bytes, local_members(), block_tag(0), waiting);
  control_ = reinterpret_cast<GroupControl*>(block_->data());
  // A core dump would touch every page, unused mailboxes included.
  ::madvise(block_->data(), layout_.bytes, MADV_DONTDUMP);
}

SharedTransport::~SharedTransport() { SharedTransport::leave(); }

std::string SharedTransport::host(int) const { return host_group_->host(); }

std::int64_t SharedTransport::process_id(int rank) const {
  return host_group_->process_id(members_[static_cast<std::size_t>(rank)]);
}

RankState& SharedTransport::state(int rank) const {
  return reinterpret_cast<RankState*>(block_->data() + layout_.states)[rank];
}

MailboxState& SharedTransport::mailbox(int source, int destination) const {
  const std::size_t index =
      static_cast<std::size_t>(source) * layout_.size + static_cast<std::size_t>(destination);
  return *reinterpret_cast<MailboxState*>(block_->data() + layout_.mailboxes +
                                          index * GroupLayout::mailbox_stride());
}

std::byte* SharedTransport::header(int rank, std::uint64_t round) const {
  return block_->data() + layout_.headers + (static_cast<std::size_t>(rank) * 2 + round % 2) * kHeaderBytes;
}

std::byte* SharedTransport::staging(int rank, std::uint64_t round) const {
  return block_->data() + layout_.staging_begin +
         (static_cast<std::size_t>(rank) * 2 + round % 2) * layout_.staging_stride();
}

std::byte* SharedTransport::mailbox_header(int source, int destination, std::uint64_t chunk) const {
  auto* begin = reinterpret_cast<std::byte*>(&mailbox(source, destination)) + sizeof(MailboxState);
  return begin + (chunk % kMailboxChunks) * (kHeaderBytes + GroupLayout::kMailboxChunkBytes);
}

std::byte* SharedTransport::mailbox_payload(int source, int destination, std::uint64_t chunk) const {
  return mailbox_header(source, destination, chunk) + kHeaderBytes;
}

void SharedTransport::arrive(std::uint64_t round, std::size_t) { publish_arrival(rank_, round); }

void SharedTransport::publish_arrival(int rank, std::uint64_t round) {
  // seq_cst: see WaitPoint. It also releases what was written for the round.
  state(rank).arrived.store(round, std::memory_order_seq_cst);
  if (!control_->rounds.has_sleepers()) return;
  // Only the last rank to arrive wakes the sleepers: one wake per rank and round. Of ranks that arrive at the
  // same time, the one whose store is last in the total order sees those of all others.
  if (Arrivals{&state(0), size(), rank_, round}()) host_group_->wake(control_->rounds);
}

void SharedTransport::notify(WaitPoint& point) const {
  if (point.has_sleepers()) host_group_->wake(point);
}

std::uint64_t SharedTransport::arrived(int rank) const {
  return state(rank).arrived.load(std::memory_order_acquire);
}

WaitResult SharedTransport::await_all(std::uint64_t round, const WaitOptions& waiting) {
  return wait(control_->rounds, Arrivals{&state(0), size(), rank_, round}, waiting);
}

void SharedTransport::mailbox_written(int destination, std::uint64_t chunk, std::size_t) {
  mailbox(rank_, destination).written.store(chunk, std::memory_order_seq_cst);
  notify(state(destination).mailboxes);
}

void SharedTransport::mailbox_read(int source, std::uint64_t chunk) {
  mailbox(source, rank_).read.store(chunk, std::memory_order_seq_cst);
  notify(state(source).mailboxes);
}

bool SharedTransport::has_written(int source, std::uint64_t chunk) const {
  return mailbox(source, rank_).written.load(std::memory_order_acquire) >= chunk;
}

WaitResult SharedTransport::await_written(int source, std::uint64_t chunk, const WaitOptions& waiting) {
  return wait(state(rank_).mailboxes, PeerCounter{mailbox(source, rank_).written, source, chunk}, waiting);
}

WaitResult SharedTransport::await_read(int destination, std::uint64_t chunk, const WaitOptions& waiting) {
  return wait(state(rank_).mailboxes, PeerCounter{mailbox(rank_, destination).read, destination, chunk},
              waiting);
}

WaitResult SharedTransport::await_any(AnySource& any, const WaitOptions& waiting) {
  return wait(state(rank_).mailboxes, AnyChunk{any}, waiting);
}

void SharedTransport::wake_receives() { notify(state(rank_).mailboxes); }

template <class Ready>
WaitResult SharedTransport::wait(WaitPoint& point, const Ready& ready, const WaitOptions& waiting) {
  if (ready()) return {};
  const std::uint32_t spins = waiting.brief && !oversubscribed_ ? spin_.most() : spin_.spins();
  if (spins > 0 && (oversubscribed_ ? yield(ready, spins) : spin(ready, spins))) {
    spin_.was_short();
    return {};
  }
  const Clock::time_point start = Clock::now();
  const WaitResult result = sleep(point, ready, waiting);
  const double slept = 1e6 * seconds_between(start, Clock::now());
  if (slept < kShortSleep * options_.spin_microseconds)
    spin_.was_short();
  else
    spin_.was_long();
  return result;
}

template <class Ready>
WaitResult SharedTransport::sleep(WaitPoint& point, const Ready& ready, const WaitOptions& waiting) {
  struct Count {
    std::atomic<std::uint32_t>& sleepers;
    explicit Count(std::atomic<std::uint32_t>& s) : sleepers(s) {
      sleepers.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Count() { sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  };
  waiting.deadline.start();
  const Clock::time_point start = Clock::now();
  bool stall_reported = waiting.stall_after <= 0 || waiting.stalled == nullptr;
  double tick = kFirstTick;
  for (;;) {
    WaitResult trouble;
    {
      const Count count(point.sleepers);
      const std::uint32_t epoch = point.epoch.load(std::memory_order_seq_cst);
      if (ready()) return {};
      trouble = check_for_end(ready, waiting);
      if (trouble.ok()) {
        host_group_->sleep(point, epoch, std::min(tick, waiting.deadline.remaining()));
        if (ready()) return {};
      }
    }
    // A peer may have arrived and died after that, or reported a later error.
    if (!trouble.ok()) return ready() ? WaitResult{} : trouble;
    tick = std::min(tick * 2, kLongestTick);
    waiting.check_interrupt();
    const double waited = seconds_between(start, Clock::now());
    if (!stall_reported && waited >= waiting.stall_after) {
      stall_reported = true;
      (*waiting.stalled)(waited);
    }
  }
}

template <class Ready>
WaitResult SharedTransport::check_for_end(const Ready& ready, const WaitOptions& waiting) {
  using Outcome = WaitResult::Outcome;
  if (control_->abort_published.load(std::memory_order_acquire) != 0) return {Outcome::kAborted, -1, false};
  if (waiting.is_cancelled()) return {Outcome::kCancelled, -1, false};
  const WaitResult lost = find_lost_peer(ready);
  if (!lost.ok()) return lost;
  if (waiting.deadline.expired()) return {Outcome::kTimeout, -1, false};
  return {};
}

template <class Ready>
WaitResult SharedTransport::find_lost_peer(const Ready& ready) const {
  if constexpr (std::is_same_v<Ready, AnyChunk>) {
    return find_lost_source(ready.any);
  } else {
    WaitResult found;
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == rank_ || !ready.pending(rank)) continue;
      // If the receiver is lost, nothing is known of the rank.
      const int receiver = receiver_of(rank);
      if (receiver == rank_ || is_remote(receiver)) continue;
      const WaitResult end = end_of(receiver);
      // It may have arrived between the first check and its end.
      if (end.ok() || !ready.pending(rank)) continue;
      found = end;
      if (!end.peer_left) break;  // it may have left because another one died
    }
    return found;
  }
}

WaitResult SharedTransport::end_of(int rank) const {
  const bool left = state(rank).left.load(std::memory_order_acquire) != 0;
  if (!left && !host_group_->is_lost(members_[static_cast<std::size_t>(rank)])) return {};
  return {WaitResult::Outcome::kPeerLost, rank, left};
}

WaitResult SharedTransport::find_lost_source(AnySource& any) const {
  WaitResult found;
  for (const int source : any.sources()) {
    if (is_remote(source) || any.has_left(source)) continue;
    const WaitResult end = end_of(source);
    if (end.ok()) continue;
    const WaitResult ended = any.note_end(end);  // what it has sent before counts: looked for after its end
    if (!ended.ok() && (found.ok() || found.peer_left)) found = ended;
  }
  return found;
}

WaitResult SharedTransport::find_lost(std::uint64_t round) {
  return find_lost_peer(Arrivals{&state(0), size(), rank_, round});
}

WaitResult SharedTransport::find_ended() const {
  return find_lost_peer(Arrivals{&state(0), size(), rank_, std::numeric_limits<std::uint64_t>::max()});
}

void SharedTransport::abort(const Error& error) noexcept {
  publish_abort(error.kind(), rank_, error.what(), error.context());
}

void SharedTransport::publish_abort(ErrorKind kind, int origin, std::string_view message,
                                    const ErrorContext& about) const noexcept {
  if (abandoned_.load(std::memory_order_acquire)) return;
  if (control_->abort_claimed.exchange(1, std::memory_order_acq_rel) == 0) {
    control_->abort_kind = static_cast<std::uint8_t>(kind);
    control_->abort_origin = origin;
    control_->abort_common = about.common;
    control_->abort_odd = about.odd;
    copy_cut(control_->abort_operation, about.operation);
    copy_cut(control_->abort_tensor, about.tensor);
    copy_cut(control_->abort_message, message);
    control_->abort_published.store(1, std::memory_order_seq_cst);
  }
  notify(control_->rounds);
  for (int rank = 0; rank < size(); ++rank) notify(state(rank).mailboxes);
}

bool SharedTransport::aborted(AbortRecord* record) const {
  if (control_->abort_published.load(std::memory_order_acquire) == 0) return false;
  if (record != nullptr) {
    record->kind = static_cast<ErrorKind>(control_->abort_kind);
    record->origin = control_->abort_origin;
    record->message = control_->abort_message;
    record->about.common = control_->abort_common;
    record->about.odd = control_->abort_odd;
    record->about.operation = control_->abort_operation;
    record->about.tensor = control_->abort_tensor;
  }
  return true;
}

void SharedTransport::abandon() {
  abandoned_.store(true, std::memory_order_release);
  host_group_->abandon();
}

void SharedTransport::leave() {
  if (block_ == nullptr || abandoned_.load(std::memory_order_acquire) ||
      state(rank_).left.exchange(1, std::memory_order_seq_cst) != 0)
    return;
  SharedTransport::wake();
}

void SharedTransport::wake() {
  notify(control_->rounds);
  for (int rank = 0; rank < size(); ++rank) notify(state(rank).mailboxes);
}

}  // namespace multiring
