#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/export.h"
#include "collective/rank_list.h"
#include "engine/communicator_list.h"
#include "engine/communicator_options.h"
#include "engine/first_error.h"
#include "engine/operation_queue.h"
#include "engine/operation_runner.h"
#include "engine/work.h"
#include "transport/transport.h"

namespace multiring {

/// A group of ranks that run collectives together: the engine over one transport.
///
/// Operations run one at a time, in the same order on all ranks (OperationQueue), each in one way
/// (OperationRunner). The first error breaks the communicator (FirstError).
///
/// Thread-safe; but the peers must share the order of operations issued from several threads of a rank.
class MULTIRING_API Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::shared_ptr<Transport> transport, CommunicatorOptions options);
  /// Closes. May run on the progress thread, where finished work held the last reference; must not run in a
  /// warning or an interrupt callback.
  ~Communicator();

  // Who is in it. A world rank is one of `init`.
  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const std::string& name() const { return options_.name; }
  /// Its name, or that of the named queue which has it.
  std::string user_name() const;
  std::string host() const { return transport_->host(rank()); }
  /// The number of each rank's host, by rank.
  std::vector<int> hosts() const;
  std::int64_t process_id(int rank) const { return transport_->process_id(rank); }
  /// Whether the end of `rank` would be noticed on this host.
  bool is_watched(int rank) const { return transport_->is_watched(rank); }
  /// "rank 1 (world rank 3)".
  std::string names_of(const std::vector<int>& ranks) const { return rank_list(ranks, *transport_); }
  std::string describe_not_forwarded(const std::vector<int>& ranks) const {
    return not_forwarded_text(ranks, *transport_);
  }
  /// A number that no other communicator of the process has, but for those of one named queue.
  std::uint64_t number() const { return number_.load(std::memory_order_relaxed); }
  void share_number(const Communicator& other) { number_.store(other.number(), std::memory_order_relaxed); }
  /// Whether this rank has both of the same `init`.
  bool is_of_world(const Communicator& other) const { return options_.world == other.options_.world; }

  // Settings. Each rank has its own timeout, in seconds, which operations use whose calls do not say; groups
  // that are split off later take it over.
  /// The options that it was made with; `timeout()` and `tuning()` may be others since.
  const CommunicatorOptions& options() const { return options_; }
  double timeout() const { return runner_.timeout(); }
  void set_timeout(double seconds);
  std::string tuning() const;
  /// Replaces the tuning of later collectives (collective/plan/tuning.h); empty: none. To be called between
  /// the same operations on all ranks; raises a usage error while any is in progress here.
  void set_tuning(const std::string& tuning);
  /// The table of algorithms of a collective of float32, with what this communicator uses as the chosen one.
  std::vector<AlgorithmRow> algorithm_rows(Collective collective, std::size_t bytes, Order order) const;
  /// The line of a tuning with the costs that explain best what was measured among these ranks.
  std::string fit_costs(std::span<const AllreduceProbe> probes) const;

  // Collectives.
  /// Runs a collective in this thread.
  void run(Operation& operation, const CallOptions& call);
  /// Queues a collective. `keep_alive` is held until the work is destroyed. `timeout`: QueuedWork's.
  std::shared_ptr<Work> submit(Operation operation, int priority, std::shared_ptr<void> keep_alive,
                               double timeout = -1.0);
  /// Work::wait, for work of this communicator: a timeout error names the ranks that are waited for.
  void wait(Work& work, const Deadline& deadline, const std::function<void()>& interrupt) const;
  /// Checks and completes an operation to be queued; raises what is wrong with it. An array on a device is
  /// copied as it is now, so this waits for queued operations that share its memory.
  void prepare(Operation& operation);
  /// Queues work of prepared operations, all or (where it raises) none.
  void enqueue(std::span<const QueuedWork> queued) { enqueue(queued, false); }
  /// Queues it, and runs it in this thread, unless another one is at work: waking one takes longer than a
  /// small operation. The caller holds a reference, and is the only one that queues.
  void enqueue_and_run(std::span<const QueuedWork> queued) { enqueue(queued, true); }
  /// Returns the number of the last queued operation that has to end before `operation` may read and write
  /// its memory (MemoryInFlight); 0: there is none.
  std::uint64_t last_conflict(const Operation& operation) const { return queue_.last_conflict(operation); }
  /// Waits until the operations up to number `last` have ended; raises the error that broke the communicator.
  void await_queued(std::uint64_t last, const CallOptions& call) { queue_.await(last, call); }

  // Messages.
  /// Sends a message, or receives one, when the queued operations that share its memory have ended: those
  /// that are queued now, or up to the number `after` where a thread sends on behalf of an earlier call.
  void send(Operation& operation, std::int64_t tag, const CallOptions& call,
            std::optional<std::uint64_t> after = {}) {
    run_message(operation, tag, call, after, true);
  }
  void receive(Operation& operation, std::int64_t tag, const CallOptions& call,
               std::optional<std::uint64_t> after = {}) {
    run_message(operation, tag, call, after, false);
  }
  /// Waits for a message of one of `request.sources`, which a receive of this rank then gets at once. Empty:
  /// `request.stopped` was set. Runs beside other operations. When the time is up nothing is broken.
  std::optional<MessageInfo> probe(ProbeRequest request, const CallOptions& call);
  /// Lets waits of this rank look whether they are stopped.
  void wake();

  // What the ranks make together. Collective.
  /// Splits into groups of equal color, ranked by key, then by rank. Negative color: null.
  std::shared_ptr<Communicator> split(std::int64_t color, std::int64_t key, const CallOptions& call);
  /// A group of the same ranks, called `name() + "/" + purpose`, with the same `purpose` everywhere. `adjust`
  /// may change what the new group takes over from this one.
  std::shared_ptr<Communicator> duplicate(const std::string& purpose, const CallOptions& call,
                                          const std::function<void(CommunicatorOptions&)>& adjust = {});
  /// Tells all ranks how to reach each other: afterwards none asks the store, which may go.
  void exchange_addresses(const CallOptions& call);
  /// Memory that all ranks have mapped, with the same `bytes` everywhere.
  std::shared_ptr<SymmetricRegion> allocate_symmetric(std::size_t bytes, const CallOptions& call);
  /// The symmetric memory that contains `bytes` at `data`, and their offset in this rank's part; null: none.
  std::shared_ptr<SymmetricRegion> locate_symmetric(const std::byte* data, std::size_t bytes,
                                                    std::uint64_t* offset) const;

  // What it waits for, and what has ended.
  /// The ranks that an operation of this rank in progress still waits for. To be called by the thread that
  /// runs it (in CallOptions::interrupt).
  Stragglers waited_for() const { return runner_.exchange().missing(); }
  /// The collective in progress, or about to be; empty: nothing is to be done.
  std::optional<WaitInProgress> wait_in_progress() const;
  /// "barrier of communicator 'world'", in which a world rank waits for this one; empty: unknown.
  std::string wait_on_this_rank(int world_rank) const;
  /// "communicator 'world' has ended: ...", if a world rank is in it, too, and there was an error, or another
  /// rank has died; empty: not known.
  std::string end_of(int world_rank) const;
  /// Returns an error that names a rank which has died or left, as far as this rank knows without waiting for
  /// anything. Any thread.
  std::optional<Error> lost_rank() const;

  // Its end.
  /// Breaks the communicator on all ranks.
  void abort(const std::string& message) { abort_with(Error(ErrorKind::kAborted, message)); }
  /// Breaks it with an error of any kind, which becomes the first error of all ranks.
  void abort_with(const Error& error);
  bool is_broken() const;
  /// What broke it; empty: not known to be broken.
  std::optional<Error> first_error() const { return first_error_.get(); }
  /// Ends this rank's part: pending work fails, peers that still need it learn that it left. Idempotent.
  void close();
  /// Whether this thread runs an operation of this communicator (and so is in a callback of it).
  bool runs_on_this_thread() const { return queue_.runs_on_this_thread(); }
  /// To be called in a forked child: the communicator belongs to the parent alone, and every call here fails.
  void abandon();

 private:
  using Adjust = std::function<void(CommunicatorOptions&)>;

  static std::uint64_t next_number();
  void throw_if_abandoned() const;

  void enqueue(std::span<const QueuedWork> queued, bool runs_here);
  /// Checks and completes an operation; takes its arrays on devices when no queued operation shares them.
  void complete(Operation& operation, const CallOptions& options);
  void take_from_devices(Operation& operation);
  void execute(Operation& operation, const CallOptions& options);
  void run_message(Operation& operation, std::int64_t tag, const CallOptions& options,
                   std::optional<std::uint64_t> after, bool sends);
  void require_peer(const Operation& operation, int peer) const;
  /// Completes the sources of a probe and makes `operation` the receive that follows. Raises a usage error.
  void check_sources(Operation& operation, ProbeRequest& request) const;

  std::shared_ptr<Communicator> split_into(std::int64_t color, std::int64_t key, const std::string& purpose,
                                           const CallOptions& options, const Adjust& adjust);
  /// "barrier of communicator 'world'", in which a rank is or waits, as far as its descriptor is here.
  std::string describe_wait_of(int peer) const;

  const CommunicatorOptions options_;
  const std::shared_ptr<Transport> transport_;
  FirstError first_error_;
  OperationRunner runner_;
  OperationQueue queue_;
  std::atomic<std::uint64_t> number_{next_number()};
  std::atomic<bool> abandoned_{false};
  std::uint64_t splits_ = 0;         // guarded by the OperationLock
  std::uint32_t regions_ = 0;        // guarded by the OperationLock
  mutable std::mutex tuning_mutex_;  // guards tuning_; the queue's lock is taken while it is held
  std::string tuning_;
};

}  // namespace multiring
