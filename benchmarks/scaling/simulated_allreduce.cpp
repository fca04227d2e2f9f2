// The core's allreduce, or the MPI library's own, among ranks that SimGrid's SMPI simulates, one after the
// other in one process: smpirun ... simulated_allreduce multiring|mpi|mpi-timing RANKS_PER_HOST COPY_SECONDS
// MEMORY_SECONDS BYTES [BYTES ...]
//
// The core is what runs everywhere: matching, plans, segments, messages over the MPI transport. The ranks of
// a host meet in memory of this process. Simulated time passes in the network and for each message (smpirun's
// options), and for what the core adds and copies (MEMORY_SECONDS for each byte that a rank sends in a plan,
// COPY_SECONDS for each of a matching round).
//
// With mpi-timing the library's messages carry no data once sums have been checked: they take as long, and
// the library needs no memory for copies of the arrays on each rank.
//
// Prints "BYTES SECONDS" for each size, after it has checked the sums of all elements on all ranks.

// SMPI's compiler turns calls of these into its own, and so the core's functions of the same name.
#undef sleep

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <simgrid/s4u.hpp>
#include <string>
#include <utility>
#include <vector>

#include "collective/collectives.h"
#include "collective/exchange.h"
#include "topology/dimensions.h"
#include "transport/cluster/channels.h"
#include "transport/cluster/cluster_transport.h"
#include "transport/inproc/inproc_hub.h"
#include "transport/mpi/mpi_network.h"

extern "C" const struct multiring_mpi multiring_mpi_bridge;

namespace multiring {
namespace {

/// Where a rank sleeps in simulated time. (Actors that are suspended would keep their messages from moving.)
class Bed {
 public:
  void sleep() { asleep_->acquire(); }
  void wake() { asleep_->release(); }

 private:
  simgrid::s4u::SemaphorePtr asleep_ = simgrid::s4u::Semaphore::create(0);
};

// The memory of all simulated hosts: SMPI runs all ranks in this process, one at a time.
struct Machine {
  std::map<int, std::shared_ptr<InprocHub>> hosts;
  std::map<const WaitPoint*, std::vector<std::shared_ptr<Bed>>> sleepers;
};
Machine machine;

/// The memory of a host, whose ranks sleep in simulated time.
class SimulatedLink final : public HostGroup {
 public:
  explicit SimulatedLink(std::shared_ptr<HostGroup> memory) : memory_(std::move(memory)) {}
  int rank() const override { return memory_->rank(); }
  int size() const override { return memory_->size(); }
  std::string host() const override { return memory_->host(); }
  std::int64_t process_id(int rank) const override { return rank; }
  std::shared_ptr<SharedBlock> share(std::size_t bytes, std::span<const int> members, std::uint64_t tag,
                                     const WaitOptions& waiting) override {
    return memory_->share(bytes, members, tag, waiting);
  }
  bool is_lost(int) override { return false; }
  void abandon() override {}
  int cores() const override { return memory_->size(); }

  // No other rank runs between the caller's look at its condition and its lying down.
  void sleep(WaitPoint& point, std::uint32_t, double) override {
    const auto bed = std::make_shared<Bed>();
    machine.sleepers[&point].push_back(bed);
    bed->sleep();
  }
  void wake(WaitPoint& point) override {
    std::vector<std::shared_ptr<Bed>> sleepers;
    sleepers.swap(machine.sleepers[&point]);
    for (const auto& sleeper : sleepers) sleeper->wake();
  }

 private:
  std::shared_ptr<HostGroup> memory_;
};

/// Seconds that additions and copies take for each byte that a rank sends in a plan: they are charged where
/// the core does them, before it posts what they have made, so that they overlap with messages as they do in
/// fact.
double memory_seconds_per_byte = 0.0;
/// The same for messages of rounds, whose bytes are only copied.
double copy_seconds_per_byte = 0.0;

/// Messages by SMPI. Mailboxes, which an allreduce does not use, post receives that nothing comes for.
class SimulatedNetwork final : public Network {
 public:
  SimulatedNetwork(std::shared_ptr<MpiSession> session, MpiOptions options)
      : mpi_(std::move(session), std::move(options)) {}
  int rank() const override { return mpi_.rank(); }
  int size() const override { return mpi_.size(); }
  int channels() const override { return mpi_.channels(); }
  std::string host(int rank) override { return mpi_.host(rank); }
  void connect(std::span<const Link> links, const WaitOptions& waiting) override {
    mpi_.connect(links, waiting);
  }
  Ticket post_send(int peer, int channel, std::span<const std::span<const std::byte>> parts) override {
    std::size_t bytes = 0;
    for (const auto& part : parts) bytes += part.size();
    smpi_execute(static_cast<double>(bytes) *
                 (channel == kPlans ? memory_seconds_per_byte : copy_seconds_per_byte));
    return mpi_.post_send(peer, channel, parts);
  }
  Ticket post_receive(int peer, int channel, std::span<std::byte> buffer) override {
    return channel == kChunks || channel == kAcks ? kNever : mpi_.post_receive(peer, channel, buffer);
  }
  WaitResult wait(std::span<const Ticket> tickets, const WaitOptions& waiting) override {
    return mpi_.wait(tickets, waiting);
  }
  WaitResult wait_any(std::span<const Ticket> tickets, const WaitOptions& waiting) override {
    return mpi_.wait_any(tickets, waiting);
  }
  bool done(Ticket ticket) const override { return ticket != kNever && mpi_.done(ticket); }
  void give_up(std::span<const Ticket> tickets) override {
    for (const Ticket ticket : tickets)
      if (ticket != kNever) mpi_.give_up({&ticket, 1});
  }
  void progress() override { mpi_.progress(); }
  bool outlasts_give_up() const override { return mpi_.outlasts_give_up(); }
  void keep(std::shared_ptr<const void> memory) override { mpi_.keep(std::move(memory)); }
  void abort(const Error& error) override { mpi_.abort(error); }
  void relay(const AbortRecord& record) override { mpi_.relay(record); }
  bool aborted(AbortRecord* record) const override { return mpi_.aborted(record); }
  void leave() override { mpi_.leave(); }
  void abandon() override { mpi_.abandon(); }
  void wake() override { mpi_.wake(); }

 private:
  static constexpr Ticket kNever = ~Ticket{0};
  MpiNetwork mpi_;
};

std::shared_ptr<MpiSession> simulated_session() {
  // Never let go: here no receive is cancelled, and a goodbye may come to the memory of a rank that has
  // ended.
  static auto* const sessions = new std::vector<std::shared_ptr<MpiSession>>;
  sessions->push_back(std::make_shared<MpiSession>(multiring_mpi_bridge, nullptr));
  return sessions->back();
}

std::shared_ptr<Transport> join(const std::shared_ptr<MpiSession>& session, int ranks_per_host) {
  const int host = session->rank() / ranks_per_host;
  std::shared_ptr<InprocHub>& hub = machine.hosts[host];
  SharedTransportOptions options;
  options.spin_microseconds = 0.0;
  options.oversubscribed = true;
  if (hub == nullptr) hub = std::make_shared<InprocHub>(ranks_per_host, InprocHub::Options{options, 1});
  auto context = std::make_shared<ClusterContext>();
  context->rank = session->rank();
  for (int rank = 0; rank < session->size(); ++rank)
    context->ranks.push_back({rank / ranks_per_host, rank % ranks_per_host, "simulated", rank});
  context->host_group = std::make_shared<SimulatedLink>(hub->host_group(session->rank() % ranks_per_host));
  context->make_network = [session](std::span<const int> members, int rank, int channels,
                                    const std::string& name, bool,
                                    const WaitOptions&) -> std::unique_ptr<Network> {
    MpiOptions mpi;
    mpi.rank = rank;
    mpi.members.assign(members.begin(), members.end());
    mpi.hosts.assign(members.size(), "simulated");
    mpi.channels = channels;
    mpi.name = name;
    return std::make_unique<SimulatedNetwork>(session, std::move(mpi));
  };
  return ClusterTransport::make_world(std::move(context), options, WaitOptions{});
}

/// An allreduce of float32 sums.
class Allreduce {
 public:
  virtual ~Allreduce() = default;
  virtual void run(const std::vector<float>& input, std::vector<float>& output) = 0;
};

class CoreAllreduce final : public Allreduce {
 public:
  explicit CoreAllreduce(int ranks_per_host)
      : transport_(join(simulated_session(), ranks_per_host)), exchange_(*transport_, "world") {
    if (const char* const order = std::getenv("MULTIRING_ORDER")) order_ = parse_order(order);
    if (const char* const mode = std::getenv("MULTIRING_MODE"))
      exchange_.plans().force(parse_algorithm(mode), *transport_);
    if (const char* const tuning = std::getenv("MULTIRING_TUNING"))  // the text, not a file
      exchange_.plans().set_tuning(Tuning::parse(tuning), *transport_);
  }
  void run(const std::vector<float>& input, std::vector<float>& output) override {
    Operation operation;
    Descriptor& descriptor = operation.descriptor;
    descriptor.key.kind = OpKind::kAllreduce;
    descriptor.key.count = input.size();
    descriptor.key.prescale = 1.0;
    descriptor.key.postscale = 1.0;
    descriptor.key.order = order_;
    descriptor.dtype = DType::kFloat32;
    descriptor.rows = input.size();
    descriptor.bytes = input.size() * sizeof(float);
    operation.input = reinterpret_cast<const std::byte*>(input.data());
    operation.output = reinterpret_cast<std::byte*>(output.data());
    operation.output_bytes = descriptor.bytes;
    allreduce(exchange_, OperationCall{descriptor, {}}, operation);
  }

 private:
  std::shared_ptr<Transport> transport_;
  Exchange exchange_;
  Order order_ = Order::kCanonical;
};

class LibraryAllreduce final : public Allreduce {
 public:
  void run(const std::vector<float>& input, std::vector<float>& output) override {
    MPI_Allreduce(input.data(), output.data(), static_cast<int>(input.size()), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
  }
};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

/// Every rank contributes something else; sums of such small whole numbers are exact.
void check_sums(Allreduce& allreduce, int rank, int size) {
  constexpr std::size_t kCount = 20011;
  std::vector<float> input(kCount);
  std::vector<float> output(kCount);
  for (std::size_t i = 0; i < kCount; ++i) input[i] = static_cast<float>((i + 7 * rank) % 13);
  allreduce.run(input, output);
  for (std::size_t i = 0; i < kCount; ++i) {
    int sum = 0;
    for (int other = 0; other < size; ++other) sum += static_cast<int>((i + 7 * other) % 13);
    require(output[i] == static_cast<float>(sum), "the sum of contributions that differ");
  }
}

/// From here on this rank's messages have their sizes but no contents, and SMPI shares its copies of arrays
/// between all ranks, as when it replays a trace.
void stop_carrying_data(int rank) {
  smpi_replay_init(simgrid::s4u::Actor::self()->get_property("instance_id"), rank, 0.0);
  MPI_Barrier(MPI_COMM_WORLD);
}

/// Simulated seconds of an allreduce of `count` elements, as the slowest rank sees it. All ranks have the
/// same input and write the same sums to one output: a thousand copies would not fit. (The core writes
/// nothing but results there; libraries keep partial sums in it, so theirs cannot be looked at.)
double measure(Allreduce& allreduce, std::size_t count, int size, bool check) {
  static std::vector<float> input;
  static std::vector<float> output;
  static double slowest;        // the ranks' common memory: a message might carry no data
  MPI_Barrier(MPI_COMM_WORLD);  // all have looked at the sums of the size before
  if (input.size() != count) {
    input.resize(count);
    output.assign(count, 0.0F);
    for (std::size_t i = 0; i < count; ++i) input[i] = static_cast<float>(i % 251);
  }
  slowest = 0.0;
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  allreduce.run(input, output);
  slowest = std::max(slowest, MPI_Wtime() - start);
  MPI_Barrier(MPI_COMM_WORLD);
  for (std::size_t i = 0; check && i < count; i += 1009)
    require(output[i] == static_cast<float>(i % 251) * static_cast<float>(size), "the sum");
  return slowest;
}

}  // namespace
}  // namespace multiring

int main(int argc, char** argv) {
  using namespace multiring;
  if (argc < 6) {
    std::fprintf(stderr,
                 "simulated_allreduce multiring|mpi|mpi-timing RANKS_PER_HOST COPY_SECONDS MEMORY_SECONDS "
                 "BYTES [BYTES ...]\n");
    return 2;
  }
  MPI_Init(&argc, &argv);
  copy_seconds_per_byte = std::atof(argv[3]);
  memory_seconds_per_byte = std::atof(argv[4]);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  {
    std::unique_ptr<Allreduce> allreduce;
    const bool core = std::strcmp(argv[1], "multiring") == 0;
    if (core)
      allreduce = std::make_unique<CoreAllreduce>(std::atoi(argv[2]));
    else
      allreduce = std::make_unique<LibraryAllreduce>();
    check_sums(*allreduce, rank, size);
    if (std::strcmp(argv[1], "mpi-timing") == 0) stop_carrying_data(rank);
    for (int index = 5; index < argc; ++index) {
      const std::size_t count = std::strtoull(argv[index], nullptr, 10) / sizeof(float);
      const double seconds = measure(*allreduce, count, size, core);
      if (rank == 0) std::printf("%s %.9f\n", argv[index], seconds);
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);  // all have said goodbye
  MPI_Finalize();
  return 0;
}
