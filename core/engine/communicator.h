#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/export.h"
#include "base/job_settings.h"
#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/operation.h"
#include "collective/point_to_point.h"
#include "collective/rank_list.h"
#include "engine/choose_work.h"
#include "engine/memory_in_flight.h"
#include "engine/symmetric_registry.h"
#include "engine/work.h"
#include "transport/transport.h"

namespace multiring {

/// How one blocking call waits.
struct CallOptions {
  /// Seconds; negative: the communicator's default.
  double timeout = -1.0;
  /// Called from time to time in the calling thread; may throw. May be null.
  const std::function<void()>* interrupt = nullptr;
};

/// Work to be queued.
struct QueuedWork {
  std::shared_ptr<Work> work;
  int priority = 0;
  double timeout = -1.0;  ///< seconds from when it begins; negative: the communicator's default
};

/// Of the settings, groups that are split off choose `mode` and `tuning` themselves.
struct CommunicatorOptions : JobSettings {
  explicit CommunicatorOptions(const JobSettings& settings = {}) : JobSettings(settings) {}

  std::string name = "world";
  std::size_t fuse_below = 64 * 1024;            ///< asynchronous allreduces of fewer bytes are fused,
  std::size_t fuse_at_most = 0;                  ///< up to so many bytes; 0: what fits the staging memory
  std::function<void(const std::string&)> warn;  ///< takes warnings, from any thread
  bool may_stay_on_devices = true;               ///< arrays, where `mode` is empty; groups take it over
  /// The same in all communicators that descend from one; null: the communicator is the first.
  std::shared_ptr<const char> world;
};

/// What a communicator of this process is doing, and for which ranks it waits.
struct WaitInProgress {
  /// Name of a rank, its host, and its process there.
  using Place = std::tuple<std::string, std::string, std::int64_t>;

  std::uint64_t number;      ///< of the communicator
  std::string communicator;  ///< its name, or that of the named queue which has it
  std::string operation;     ///< "barrier of communicator 'world'"
  Place on;
  std::vector<Place> late;  ///< that have not come to the operation; none: it waits for none
};

/// A group of ranks that run collectives together: the engine over one transport.
///
/// Operations run one at a time, in the same order on all ranks. A synchronous one runs in the calling
/// thread, after all asynchronous ones submitted before it; asynchronous ones run on a progress thread, which
/// sleeps when there are none, highest priority first among those that all ranks have submitted. The first
/// error breaks the communicator: it is stored, sent to all peers, and raised by what is pending and by the
/// first call that is told of it. Later calls raise an abort that names it.
///
/// Thread-safe; but the peers must share the order of operations issued from several threads of a rank.
class MULTIRING_API Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::shared_ptr<Transport> transport, CommunicatorOptions options);
  /// Closes. May run on the progress thread, where finished work held the last reference; must not run in a
  /// warning or an interrupt callback.
  ~Communicator();

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const std::string& name() const { return options_.name; }
  std::string host() const { return transport_->host(rank()); }
  /// For each rank the number of its host.
  std::vector<int> hosts() const {
    std::vector<int> numbers;
    for (int each = 0; each < size(); ++each) numbers.push_back(transport_->host_number(each));
    return numbers;
  }
  /// Process id of a rank, for messages.
  std::int64_t process_id(int rank) const { return transport_->process_id(rank); }
  /// As it was made with; `timeout()` may be another one since.
  const CommunicatorOptions& options() const { return options_; }
  /// Seconds that operations wait for other ranks where their call does not say.
  double timeout() const { return timeout_.load(std::memory_order_relaxed); }
  /// The same for all operations that begin from now on, those that are queued among them, and of groups that
  /// are split off later. Each rank has its own.
  void set_timeout(double seconds);
  /// The ranks that an operation of this rank in progress still waits for. To be called by the thread that
  /// runs it (in CallOptions::interrupt).
  Stragglers waited_for() const { return exchange_.missing(); }
  /// "rank 1 (world rank 3)", and a sentence on ranks that do not forward messages.
  std::string names_of(const std::vector<int>& ranks) const { return rank_list(ranks, *transport_); }
  std::string describe_not_forwarded(const std::vector<int>& ranks) const {
    return not_forwarded_text(ranks, *transport_);
  }
  /// "barrier of communicator 'world'", in which a world rank waits for this one; empty: unknown.
  std::string wait_on_this_rank(int world_rank) const;
  /// "communicator 'world' has ended: ...", if a world rank is in it, too, and there was an error, or another
  /// rank has died; empty: not known.
  std::string end_of(int world_rank) const;
  /// Returns an error that names a rank which has died or left, as far as this rank knows without waiting for
  /// anything. Any thread.
  std::optional<Error> lost_rank() const;
  /// Whether this rank has both of the same `init`.
  bool is_of_world(const Communicator& other) const { return options_.world == other.options_.world; }
  /// Unlike that of any other communicator of the process; those of a named queue have one.
  std::uint64_t number() const { return number_.load(std::memory_order_relaxed); }
  void share_number(const Communicator& other) { number_.store(other.number(), std::memory_order_relaxed); }
  /// Its name, or that of the named queue which has it.
  std::string user_name() const;
  /// The collective in progress, or about to be; empty: nothing is to be done.
  std::optional<WaitInProgress> wait_in_progress() const;
  /// Whether the end of `rank` would be noticed on this host.
  bool is_watched(int rank) const { return transport_->is_watched(rank); }

  /// Runs a collective in this thread.
  void run(Operation& operation, const CallOptions& call);
  /// Queues a collective. `keep_alive` is held until the work is destroyed.
  /// `timeout`: see QueuedWork.
  std::shared_ptr<Work> submit(Operation operation, int priority, std::shared_ptr<void> keep_alive,
                               double timeout = -1.0);
  /// Work::wait, for work of this communicator: a timeout error names the ranks that are waited for.
  void wait(Work& work, const Deadline& deadline, const std::function<void()>& interrupt) const;
  /// Checks and completes an operation to be queued; raises what is wrong with it. An array on a device is
  /// copied as it is now, so this waits for queued operations that share its memory.
  void prepare(Operation& operation);
  /// Queues work of prepared operations, all or (where it raises) none.
  void enqueue(std::span<const QueuedWork> queued) { enqueue(queued, false); }
  /// The same, and runs it in this thread, unless another one is at work: waking one takes longer than a
  /// small operation. The caller holds a reference, and is the only one that queues.
  void enqueue_and_run(std::span<const QueuedWork> queued) { enqueue(queued, true); }
  /// Returns the number of the last queued operation that has to end before `operation` may read and write
  /// its memory (MemoryInFlight); 0: there is none.
  std::uint64_t last_conflict(const Operation& operation) const;
  /// Waits until the operations up to number `last` have ended; raises the error that broke the communicator.
  void await_queued(std::uint64_t last, const CallOptions& call);
  /// Sends a message, or receives one, when the queued operations that share its memory have ended: those
  /// that are queued now, or up to the number `after` where a thread sends on behalf of an earlier call.
  void send(Operation& operation, std::int64_t tag, const CallOptions& call,
            std::optional<std::uint64_t> after = {});
  void receive(Operation& operation, std::int64_t tag, const CallOptions& call,
               std::optional<std::uint64_t> after = {});
  /// Waits for a message of one of `request.sources`, which a receive of this rank then gets at once. Empty:
  /// `request.stopped` was set. Runs beside other operations. When the time is up nothing is broken.
  std::optional<MessageInfo> probe(ProbeRequest request, const CallOptions& call);
  /// Lets waits of this rank look whether they are stopped.
  void wake() {
    if (!abandoned_.load(std::memory_order_acquire)) transport_->wake();
  }

  /// Splits into groups of equal color, ranked by key, then by rank. Collective. Negative color: null.
  std::shared_ptr<Communicator> split(std::int64_t color, std::int64_t key, const CallOptions& call);
  /// A group of the same ranks, called `name() + "/" + purpose`. Collective, with the same `purpose`
  /// everywhere. `adjust` may change what the new group takes over from this one.
  std::shared_ptr<Communicator> duplicate(const std::string& purpose, const CallOptions& call,
                                          const std::function<void(CommunicatorOptions&)>& adjust = {});
  /// Tells all ranks how to reach each other: afterwards nobody asks the store, which may go. Collective.
  void exchange_addresses(const CallOptions& call);
  /// Replaces the tuning of later collectives (collective/plan/tuning.h); empty: none. To be called between
  /// the same operations on all ranks; raises a usage error while any is in progress here.
  void set_tuning(const std::string& tuning);
  /// The table of algorithms of a collective of float32, with what this communicator uses as the chosen one.
  std::vector<AlgorithmRow> algorithm_rows(Collective collective, std::size_t bytes, Order order) const;
  /// The line of a tuning with the costs that explain best what was measured among these ranks.
  std::string fit_costs(std::span<const AllreduceProbe> probes) const;
  /// The last tuning given.
  std::string tuning() const {
    const std::lock_guard lock(mutex_);
    return tuning_;
  }
  /// Memory that all ranks have mapped. Collective, with the same `bytes` everywhere.
  std::shared_ptr<SymmetricRegion> allocate_symmetric(std::size_t bytes, const CallOptions& call);
  /// The symmetric memory that contains `bytes` at `data`, and their offset in this rank's part; null: none.
  std::shared_ptr<SymmetricRegion> locate_symmetric(const std::byte* data, std::size_t bytes,
                                                    std::uint64_t* offset) const {
    throw_if_abandoned();
    return symmetric_.locate(data, bytes, offset);
  }

  /// Breaks the communicator on all ranks.
  void abort(const std::string& message);
  /// The same with an error of any kind, which becomes the first error of all ranks.
  void abort_with(const Error& error);
  /// Ends this rank's part: pending work fails, peers that still need it learn that it left. Idempotent.
  void close();
  bool is_broken() const;
  /// What broke it; empty: not known to be broken.
  std::optional<Error> first_error() const {
    const std::lock_guard lock(mutex_);
    return first_error_;
  }
  /// Whether this thread runs an operation of this communicator (and so is in a callback of it).
  bool runs_on_this_thread() const;
  /// To be called in a forked child: the communicator belongs to the parent alone, and every call here fails.
  void abandon();

 private:
  void follow_tuning();
  void warn_of_rings() const;
  void warn_of_nccl() const;
  class OperationLock;

  static std::uint64_t next_number();
  void complete(Operation& operation) const;
  void take_from_devices(Operation& operation);
  std::uint64_t oldest() const { return queue_.empty() ? submitted_ + 1 : queue_.front()->index(); }
  [[noreturn]] void throw_lock_timeout(const Operation& operation, const Work* before,
                                       const Deadline& deadline) const;
  CallOptions lock_operations(const Operation& operation, const CallOptions& options);
  OperationCall make_call(const Descriptor& descriptor, const CallOptions& options,
                          std::function<void(double)>& stalled);
  void execute(Operation& operation, const CallOptions& options);
  void dispatch(const OperationCall& call, Operation& operation);
  void dispatch_fused(const OperationCall& call, std::span<Operation* const> operations);
  template <class Body>
  void run_on_host(const OperationCall& call, std::span<Operation* const> operations, const Body& body);
  void enqueue(std::span<const QueuedWork> queued, bool runs_here);
  void hold_exchange();  // with mutex_ held
  /// Runs all that is queued in this thread, which holds the exchange.
  void run_queued();
  void start_progress();
  void progress();
  using Adjust = std::function<void(CommunicatorOptions&)>;
  std::shared_ptr<Communicator> split_into(std::int64_t color, std::int64_t key, const std::string& purpose,
                                           const CallOptions& options, const Adjust& adjust);
  /// Runs a part of an operation; errors get the operation's name and `what`.
  template <class Body>
  void in_steps(const OperationCall& call, const std::string& what, const Body& body) const;
  Operation gather_of(OpKind kind, DType dtype, std::size_t count, std::span<const std::byte> mine,
                      const std::string& name) const;
  std::shared_ptr<Transport> open_group(const std::vector<int>& members, const WaitOptions& waiting);
  /// `group`: of those `members`, or null.
  void exchange_addresses(Transport* group, const std::vector<int>& members, const OperationCall& call);
  void execute_chosen();
  void run_chosen(const Choice& choice, std::uint64_t submitted);
  void remove_finished(const std::vector<std::shared_ptr<Work>>& chosen);
  /// Stores the first error, sends it to the peers, and fails all work except that in progress.
  void fail(const std::exception_ptr& error, const std::string& what);
  /// The same. `about`: what the peers are told of it besides its text.
  void break_by(const Error& error, const ErrorContext& about);
  /// The same with the error that is being handled, which the program is told of.
  /// Of one that has begun, from a handler of its error, in the thread that ran it.
  void fail_operation(const Descriptor& descriptor);
  [[noreturn]] void fail_and_raise(const Descriptor& descriptor);
  void fail_running();
  bool is_running(const std::shared_ptr<Work>& work) const;  // with mutex_ held
  void throw_if_unusable() const;
  void throw_if_abandoned() const;
  /// "barrier of communicator 'world'", in which a rank is or waits, as far as its descriptor is here.
  std::string describe_wait_of(int peer) const;
  /// "rank 1 on b (process 7) has died, or its host cannot be reached any more", of a wait that has ended so.
  std::string describe_end(const WaitResult& ended) const;
  std::string explain_wait(const Work& work, ErrorContext& context) const;
  double timeout_of(const std::vector<std::shared_ptr<Work>>& chosen) const;
  void require_peer(const Operation& operation, int peer) const;
  /// Completes the sources of a probe and makes `operation` the receive that follows. Raises a usage error.
  void check_sources(Operation& operation, ProbeRequest& request) const;
  template <class Body>
  void run_point_to_point(Operation& operation, const CallOptions& options,
                          std::optional<std::uint64_t> after, const Body& body);

  /// How long a wait for other threads sleeps before it looks at interrupts and deadlines.
  static constexpr std::chrono::duration<double> kTick{0.05};

  const CommunicatorOptions options_;
  const std::shared_ptr<Transport> transport_;
  Exchange exchange_;  // for the holder of the OperationLock
  PointToPoint point_to_point_;
  SymmetricRegistry symmetric_;
  std::atomic<double> timeout_;
  std::atomic<std::uint64_t> number_{next_number()};
  std::atomic<bool> closing_{false};
  std::atomic<bool> abandoned_{false};
  const ErrorSeen error_seen_ = std::make_shared<std::atomic<bool>>(false);  // of first_error_
  std::uint64_t splits_ = 0;                                                 // guarded by the OperationLock
  std::uint32_t regions_ = 0;                                                // likewise

  mutable std::mutex mutex_;  // guards all below; no other lock is taken while it is held
  std::condition_variable changed_;
  std::thread::id busy_thread_;
  bool busy_ = false;  // an operation is in progress
  std::deque<std::shared_ptr<Work>> queue_;
  std::vector<std::shared_ptr<Work>> running_;  // on the progress thread; a part of queue_
  std::uint64_t submitted_ = 0;
  MemoryInFlight memory_;  // of queue_
  std::optional<Error> first_error_;
  std::string tuning_;
  bool closed_ = false;    // no more operations
  bool finished_ = false;  // close has joined and failed what was pending
  std::thread progress_thread_;
  bool* destroyed_ = nullptr;  // set where the progress thread itself destroys this
};

}  // namespace multiring
