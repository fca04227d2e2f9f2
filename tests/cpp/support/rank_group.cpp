#include "support/rank_group.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "base/immovable.h"
#include "base/names.h"
#include "support/network/tcp_group.h"
#include "transport/shm/shm_transport.h"

namespace multiring::testing {
namespace {

/// Ends the process when it has lived too long.
class Watchdog : Immovable {
 public:
  Watchdog(double seconds, std::function<std::string()> state)
      : thread_([this, seconds, state = std::move(state)] {
          std::unique_lock lock(mutex_);
          if (over_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done_; })) return;
          std::fprintf(stderr, "the ranks hang: after %.0f s there still run %s\n", seconds, state().c_str());
          std::abort();
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    over_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;  // guards done_
  std::condition_variable over_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace

const char* transport_name(TransportKind kind) {
  static constexpr const char* kNames[] = {"inproc", "shm", "cluster", "cluster_mpi", "cluster_relayed"};
  return name_in(kNames, kind, "");
}

RankGroup::RankGroup(const GroupOptions& options) : options_(options) {
  if (options_.transport == TransportKind::kShm) return;
  InprocHub::Options hub;
  hub.transport.staging_bytes = options_.staging_bytes;
  hub.transport.spin_microseconds = options_.spin_microseconds;
  hub.cores = options_.cores;
  if (options_.transport != TransportKind::kInproc)
    build_cluster(hub);
  else
    hub_ = std::make_shared<InprocHub>(options_.size, hub);
}

// Networks have the same names in every run, so each run is a job of its own.
void RankGroup::renew_mpi() {
  if (options_.transport == TransportKind::kClusterMpi) mpi_ = std::make_unique<InprocMpi>(options_.size);
}

// Unless they are laid out, neighbours are not on the same host, and hosts have different numbers of ranks.
int RankGroup::host_of(int rank) const {
  if (options_.layout.empty())
    return options_.hosts == 2 ? static_cast<int>(rank % 3 != 0) : rank % options_.hosts;
  int host = 0;
  for (int left = rank; left >= options_.layout[static_cast<std::size_t>(host)]; ++host)
    left -= options_.layout[static_cast<std::size_t>(host)];
  return host;
}

void RankGroup::build_cluster(const InprocHub::Options& options) {
  if (!options_.layout.empty()) options_.hosts = static_cast<int>(options_.layout.size());
  std::vector<int> counts(static_cast<std::size_t>(options_.hosts));
  for (int rank = 0; rank < options_.size; ++rank) {
    const int host = host_of(rank);
    int& count = counts[static_cast<std::size_t>(host)];
    places_.push_back({host, count++, "host" + std::to_string(host), 1000 + rank});
    networks_.push_back(std::make_unique<WatchedNetworks>());
  }
  for (const int count : counts) hosts_.push_back(std::make_shared<InprocHub>(count, options));
}

// No deadline of a test begins before the others are there.
std::shared_ptr<Transport> RankGroup::connect_all(int rank, Store& store, Latch& connected) const {
  std::shared_ptr<Transport> transport;
  try {
    transport = connect(rank, store);
  } catch (...) {
    connected.count_down();
    throw;
  }
  connected.count_down();
  connected.wait();
  return transport;
}

std::shared_ptr<Transport> RankGroup::connect(int rank, Store& store) const {
  WaitOptions waiting;
  waiting.deadline = Deadline::after(options_.time_limit);  // a test's own is for what it tests
  if (hub_ != nullptr) return hub_->connect(rank, waiting);
  if (!places_.empty()) return connect_cluster(rank, store, waiting);
  ShmOptions shm;
  shm.rank = rank;
  shm.size = options_.size;
  shm.transport.staging_bytes = options_.staging_bytes;
  shm.transport.spin_microseconds = options_.spin_microseconds;
  return connect_shm(store, shm, waiting);
}

std::shared_ptr<Transport> RankGroup::connect_cluster(int rank, Store& store,
                                                      const WaitOptions& waiting) const {
  const ClusterRank& place = places_[static_cast<std::size_t>(rank)];
  auto context = std::make_shared<ClusterContext>();
  context->ranks = places_;
  context->rank = rank;
  if (options_.transport == TransportKind::kClusterRelayed) context->direct_hosts = 2;
  context->host_links = host_links();
  context->host_group = std::make_shared<PollingHostGroup>(
      hosts_[static_cast<std::size_t>(place.host)]->host_group(place.local),
      ranks_of_host(places_, place.host), context->progress);
  context->make_network = network_maker(rank, store);
  SharedTransportOptions shared;
  shared.staging_bytes = options_.staging_bytes;
  shared.spin_microseconds = options_.spin_microseconds;
  shared.oversubscribed = options_.size > options_.cores;
  return ClusterTransport::make_world(std::move(context), shared, waiting);
}

ClusterContext::MakeNetwork RankGroup::network_maker(int rank, Store& store) const {
  WatchedNetworks& watch = *networks_[static_cast<std::size_t>(rank)];
  if (mpi_ == nullptr)
    return [this, &store, &watch, lost = std::make_shared<tcp::LostRanks>()](
               std::span<const int> members, int self, int channels, const std::string& name, bool in_store,
               const WaitOptions& waiting) {
      TcpOptions tcp = tcp_options(self, static_cast<int>(members.size()), channels);
      tcp.job = name;
      tcp.lost_ranks = lost;
      tcp.world.assign(members.begin(), members.end());
      auto network = std::make_unique<TcpNetwork>(in_store ? &store : nullptr, tcp, waiting);
      return watched(std::move(network), watch, linked_peers(members, self));
    };
  return [session = mpi_->session(rank), &watch](std::span<const int> members, int self, int channels,
                                                 const std::string& name, bool, const WaitOptions&) {
    MpiOptions options = mpi_options(self, static_cast<int>(members.size()), channels, name);
    options.members.assign(members.begin(), members.end());
    return watched(std::make_unique<MpiNetwork>(session, options), watch, nullptr);
  };
}

HostLinks RankGroup::host_links() const {
  if (options_.transport == TransportKind::kClusterRing) return HostLinks::kRing;
  return options_.transport == TransportKind::kClusterLine ? HostLinks::kLine : HostLinks::kSwitch;
}

std::function<bool(int)> RankGroup::linked_peers(std::span<const int> members, int self) const {
  return [this, self, world = std::vector<int>(members.begin(), members.end())](int peer) {
    return have_link(host_links(), options_.hosts, host_of(world[static_cast<std::size_t>(self)]),
                     host_of(world[static_cast<std::size_t>(peer)]));
  };
}

std::vector<std::exception_ptr> RankGroup::run_threads(const std::function<void(int)>& body,
                                                       int* first) const {
  std::vector<std::exception_ptr> raised(static_cast<std::size_t>(options_.size));
  std::mutex mutex;  // guards all below
  std::vector<bool> running(raised.size(), true);
  *first = -1;
  const Watchdog watchdog(options_.time_limit, [&] {
    const std::lock_guard lock(mutex);
    std::string ranks;
    for (std::size_t rank = 0; rank < running.size(); ++rank)
      if (running[rank]) ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(rank);
    return ranks;
  });
  in_threads(options_.size, [&](int rank) {
    std::exception_ptr error;
    try {
      body(rank);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    running[static_cast<std::size_t>(rank)] = false;
    raised[static_cast<std::size_t>(rank)] = error;
    if (error && *first < 0) *first = rank;
  });
  return raised;
}

std::vector<std::exception_ptr> RankGroup::run_communicators(const Body& body, int* first) {
  store_ = std::make_unique<CountedStore>();
  renew_mpi();
  std::vector<std::shared_ptr<Communicator>> all(static_cast<std::size_t>(options_.size));
  Latch connected(options_.size);
  auto raised = run_threads(
      [&](int rank) {
        auto& communicator = all[static_cast<std::size_t>(rank)];
        communicator =
            std::make_shared<Communicator>(connect_all(rank, *store_, connected), options_.communicator);
        try {
          body(*communicator);
        } catch (const Error&) {
          throw;  // the ranks know already
        } catch (...) {
          communicator->abort("the test failed on rank " + std::to_string(rank));
          throw;
        }
      },
      first);
  // A progress thread that has just failed its work may hold the last reference, and would end its
  // communicator when the store and the networks are gone.
  for (const auto& communicator : all)
    if (communicator) communicator->close();
  return raised;
}

void RankGroup::run(const Body& body) {
  int first = -1;
  const auto raised = run_communicators(body, &first);
  if (first >= 0) std::rethrow_exception(raised[static_cast<std::size_t>(first)]);
}

std::vector<std::optional<Error>> RankGroup::outcomes(const Body& body) {
  int first = -1;
  std::vector<std::optional<Error>> result;
  for (const std::exception_ptr& raised : run_communicators(body, &first)) {
    result.emplace_back();
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const Error& error) {
      result.back() = error;
    }
  }
  return result;
}

void RankGroup::run_transports(const TransportBody& body) {
  store_ = std::make_unique<CountedStore>();
  renew_mpi();
  std::vector<std::shared_ptr<Transport>> all(static_cast<std::size_t>(options_.size));
  Latch connected(options_.size);
  int first = -1;
  const auto raised = run_threads(
      [&](int rank) {
        auto& transport = all[static_cast<std::size_t>(rank)];
        transport = connect_all(rank, *store_, connected);
        body(transport);
      },
      &first);
  if (first >= 0) std::rethrow_exception(raised[static_cast<std::size_t>(first)]);
}

}  // namespace multiring::testing
