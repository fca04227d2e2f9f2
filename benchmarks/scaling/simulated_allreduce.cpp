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

/// Between mailboxes, which an allreduce does not use: receives are posted that nothing comes for.
class SilentNetwork final : public Network {
 public:
  SilentNetwork(int size, int rank, int channels) : size_(size), rank_(rank), channels_(channels) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int channels() const override { return channels_; }
  std::string host(int) override { return "simulated"; }
  void connect(std::span<const Link>, const WaitOptions&) override {}
  Ticket post_send(int, int, std::span<const std::span<const std::byte>>) override { return ++tickets_; }
  Ticket post_receive(int, int, std::span<std::byte>) override { return ++tickets_; }
  WaitResult wait(std::span<const Ticket>, const WaitOptions&) override { return {}; }
  WaitResult wait_any(std::span<const Ticket>, const WaitOptions&) override { return {}; }
  bool done(Ticket) const override { return false; }
  void give_up(std::span<const Ticket>) override {}
  void progress() override {}
  void abort(ErrorKind, const std::string&) override {}
  void relay(const AbortRecord&) override {}
  bool aborted(AbortRecord*) const override { return false; }
  void leave() override {}
  void abandon() override {}
  void wake() override {}

 private:
  const int size_;
  const int rank_;
  const int channels_;
  Ticket tickets_ = 0;
};

/// Of a rank: messages of rounds and of plans are charged differently.
struct Sessions {
  std::shared_ptr<MpiSession> rounds;
  std::shared_ptr<MpiSession> plans;
};

std::shared_ptr<Transport> join(const Sessions& sessions, int ranks_per_host) {
  const MpiSession* const session = sessions.plans.get();
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
  context->make_network = [sessions](std::span<const int> members, int rank, int channels,
                                     const std::string& name, bool,
                                     const WaitOptions&) -> std::unique_ptr<Network> {
    if (name.ends_with("-messages"))
      return std::make_unique<SilentNetwork>(static_cast<int>(members.size()), rank, channels);
    MpiOptions mpi;
    mpi.rank = rank;
    mpi.members.assign(members.begin(), members.end());
    mpi.hosts.assign(members.size(), "simulated");
    mpi.channels = channels;
    mpi.name = name;
    return std::make_unique<MpiNetwork>(name.ends_with("-rounds") ? sessions.rounds : sessions.plans,
                                        std::move(mpi));
  };
  return ClusterTransport::make_world(std::move(context), options, WaitOptions{});
}

/// Seconds that additions and copies take for each byte that a rank sends: they are charged where the core
/// does them, before it posts what they have made, so that they overlap with messages as they do in fact.
double memory_seconds_per_byte = 0.0;
/// The same for messages of rounds, whose bytes are only copied.
double copy_seconds_per_byte = 0.0;

template <const double& kSecondsPerByte>
int charged_send(multiring_mpi_group* group, const multiring_mpi_part* parts, size_t count, int destination,
                 int tag, multiring_mpi_request* request, char* why, size_t why_bytes) {
  std::size_t bytes = 0;
  for (std::size_t index = 0; index < count; ++index) bytes += parts[index].bytes;
  smpi_execute(static_cast<double>(bytes) * kSecondsPerByte);
  return multiring_mpi_bridge.send(group, parts, count, destination, tag, request, why, why_bytes);
}

template <const double& kSecondsPerByte>
std::shared_ptr<MpiSession> simulated_session() {
  static multiring_mpi functions = multiring_mpi_bridge;
  functions.send = charged_send<kSecondsPerByte>;
  // Never let go: here no receive is cancelled, and a goodbye may come to the memory of a rank that has
  // ended.
  static auto* const sessions = new std::vector<std::shared_ptr<MpiSession>>;
  sessions->push_back(std::make_shared<MpiSession>(functions, nullptr));
  return sessions->back();
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
      : transport_(
            join({simulated_session<copy_seconds_per_byte>(), simulated_session<memory_seconds_per_byte>()},
                 ranks_per_host)),
        exchange_(*transport_, "world") {
    if (const char* const order = std::getenv("MULTIRING_ORDER")) order_ = parse_order(order);
    if (const char* const mode = std::getenv("MULTIRING_MODE"))
      exchange_.plans().force(parse_algorithm(mode), *transport_);
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
