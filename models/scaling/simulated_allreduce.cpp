// The core's allreduce, or the MPI library's own, among ranks that SimGrid's SMPI simulates, one after the
// other in one process: smpirun ... simulated_allreduce multiring|mpi|mpi-timing RANKS_PER_HOST MODE BYTES
// [BYTES ...]
//
// The core is what runs everywhere: matching, plans, segments, messages over the MPI transport. The ranks of
// a host meet in memory of this process. Simulated time passes in the network and for each message (smpirun's
// options), for the messages of matching rounds as RoundCost says (three numbers), and for what the core adds
// and copies (MEMORY_SECONDS for each byte that a rank sends).
//
// With mpi-timing the library's messages carry no data once sums have been checked: they take as long, and
// the library needs no memory for copies of the arrays on each rank.
//
// MODE is as MULTIRING_MODE, "-" for the automatic one. Prints "BYTES SECONDS" for each size, after it has
// checked the sums of all elements on all ranks.

// SMPI's compiler turns calls of these into its own, and so the core's functions of the same name.
#undef sleep

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <simgrid/s4u.hpp>
#include <string>
#include <tuple>
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
class SimulatedLink final : public HostLink {
 public:
  explicit SimulatedLink(std::shared_ptr<HostLink> memory) : memory_(std::move(memory)) {}
  int rank() const override { return memory_->rank(); }
  int size() const override { return memory_->size(); }
  std::string host() const override { return memory_->host(); }
  std::int64_t process_id(int rank) const override { return rank; }
  std::shared_ptr<SharedBlock> share(std::size_t bytes, std::span<const int> members, std::uint64_t tag,
                                     const Waiting& waiting) override {
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
  std::shared_ptr<HostLink> memory_;
};

/// What the messages of matching rounds cost: a rank exchanges one with every other host, of the size of a
/// header. A thousand ranks would have a quarter of a million on the way at once, of which SimGrid would work
/// out how each slows down each; their bytes are few, so they are charged by formula: the sender's and the
/// receiver's processor and its share of the link for each, and the latency.
struct RoundCost {
  double message_seconds = 0.0;
  double latency = 0.0;
  double bytes_per_second = 0.0;  // of one rank's share of its host's link
};

/// Messages that pass through the memory of this process, at that cost. For the ranks' rounds; messages
/// between two ranks of a user's ("mail") have receives posted that nothing comes for.
class ModelledNetwork final : public Network {
 public:
  ModelledNetwork(std::string name, std::span<const int> members, int rank, int channels,
                  const RoundCost& cost)
      : name_(std::move(name)),
        size_(static_cast<int>(members.size())),
        rank_(rank),
        channels_(channels),
        cost_(cost) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int channels() const override { return channels_; }
  std::string host(int) override { return "simulated"; }
  void connect(std::span<const Link>, const Waiting&) override {}

  Ticket post_send(int peer, int channel, std::span<const std::span<const std::byte>> parts) override {
    Letter letter;
    for (const auto part : parts) letter.bytes.insert(letter.bytes.end(), part.begin(), part.end());
    letter.sent = simgrid::s4u::Engine::get_clock() + charge(letter.bytes.size());
    Box& box = boxes()[{name_, rank_, peer, channel}];
    box.letters.push_back(std::move(letter));
    if (const auto sleeper = std::exchange(box.sleeper, nullptr)) sleeper->wake();
    return ++tickets_;
  }
  Ticket post_receive(int peer, int channel, std::span<std::byte> buffer) override {
    receives_[++tickets_] = {peer, channel, buffer};
    return tickets_;
  }
  WaitResult wait(std::span<const Ticket> tickets, const Waiting&) override {
    for (const Ticket ticket : tickets)
      if (receives_.contains(ticket)) take(ticket);
    const double now = simgrid::s4u::Engine::get_clock();
    if (due_ > now) simgrid::s4u::this_actor::sleep_for(due_ - now);
    return {};
  }
  bool done(Ticket ticket) const override { return !receives_.contains(ticket); }
  void give_up(std::span<const Ticket> tickets) override {
    for (const Ticket ticket : tickets) receives_.erase(ticket);
  }
  void progress() override {}
  void abort(ErrorKind, const std::string&) override {}
  void relay(const AbortRecord&) override {}
  bool aborted(AbortRecord*) const override { return false; }
  void leave() override {}
  void abandon() override {}
  void wake() override {}

 private:
  struct Letter {
    std::vector<std::byte> bytes;
    double sent = 0.0;
  };
  struct Box {
    std::deque<Letter> letters;
    std::shared_ptr<Bed> sleeper;
  };
  struct Receive {
    int peer;
    int channel;
    std::span<std::byte> buffer;
  };
  static std::map<std::tuple<std::string, int, int, int>, Box>& boxes() {
    static std::map<std::tuple<std::string, int, int, int>, Box> all;
    return all;
  }
  /// Seconds from now until this rank has dealt with one more message.
  double charge(std::size_t bytes) {
    const double now = simgrid::s4u::Engine::get_clock();
    const double seconds = cost_.message_seconds + static_cast<double>(bytes) / cost_.bytes_per_second;
    due_ = std::max(due_, now) + seconds;
    return due_ - now;
  }
  void take(Ticket ticket) {
    const Receive receive = receives_.at(ticket);
    receives_.erase(ticket);
    Box& box = boxes()[{name_, receive.peer, rank_, receive.channel}];
    while (box.letters.empty()) {
      const auto bed = std::make_shared<Bed>();
      box.sleeper = bed;
      bed->sleep();
    }
    const Letter letter = std::move(box.letters.front());
    box.letters.pop_front();
    std::memcpy(receive.buffer.data(), letter.bytes.data(), letter.bytes.size());
    due_ = std::max(due_, letter.sent + cost_.latency);
    charge(0);
  }

  const std::string name_;
  const int size_;
  const int rank_;
  const int channels_;
  const RoundCost cost_;
  Ticket tickets_ = 0;
  std::map<Ticket, Receive> receives_;
  double due_ = 0.0;
};

std::shared_ptr<Transport> join(const std::shared_ptr<MpiSession>& session, int ranks_per_host,
                                const RoundCost& cost) {
  const int host = session->rank() / ranks_per_host;
  std::shared_ptr<InprocHub>& hub = machine.hosts[host];
  SharedTransportOptions options;
  options.spin_microseconds = 0.0;
  options.crowded = true;
  if (hub == nullptr) hub = std::make_shared<InprocHub>(ranks_per_host, InprocHub::Options{options, 1});
  auto context = std::make_shared<ClusterContext>();
  context->rank = session->rank();
  for (int rank = 0; rank < session->size(); ++rank)
    context->ranks.push_back({rank / ranks_per_host, rank % ranks_per_host, "simulated", rank});
  context->link = std::make_shared<SimulatedLink>(hub->link(session->rank() % ranks_per_host));
  context->make_network = [session, cost](std::span<const int> members, int rank, int channels,
                                          const std::string& name) -> std::unique_ptr<Network> {
    if (!name.ends_with("-plans"))
      return std::make_unique<ModelledNetwork>(name, members, rank, channels, cost);
    MpiOptions mpi;
    mpi.rank = rank;
    mpi.members.assign(members.begin(), members.end());
    mpi.hosts.assign(members.size(), "simulated");
    mpi.channels = channels;
    mpi.name = name;
    return std::make_unique<MpiNetwork>(session, std::move(mpi));
  };
  std::vector<int> members(static_cast<std::size_t>(session->size()));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<ClusterTransport>(std::move(context), std::move(members), 1, options, Waiting{});
}

/// Seconds that additions and copies take for each byte that a rank sends: they are charged where the core
/// does them, before it posts what they have made, so that they overlap with messages as they do in fact.
double memory_seconds_per_byte = 0.0;

int charged_send(multiring_mpi_group* group, const multiring_mpi_part* parts, size_t count, int destination,
                 int tag, multiring_mpi_request* request, char* why, size_t why_bytes) {
  std::size_t bytes = 0;
  for (std::size_t index = 0; index < count; ++index) bytes += parts[index].bytes;
  smpi_execute(static_cast<double>(bytes) * memory_seconds_per_byte);
  return multiring_mpi_bridge.send(group, parts, count, destination, tag, request, why, why_bytes);
}

std::shared_ptr<MpiSession> simulated_session() {
  static multiring_mpi functions = multiring_mpi_bridge;
  functions.send = charged_send;
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
  CoreAllreduce(int ranks_per_host, const std::string& mode, const RoundCost& cost)
      : transport_(join(simulated_session(), ranks_per_host, cost)), exchange_(*transport_, "world") {
    if (mode != "-") exchange_.plans().force_mode(parse_mode(mode), *transport_);
  }
  void run(const std::vector<float>& input, std::vector<float>& output) override {
    Operation operation;
    Descriptor& descriptor = operation.descriptor;
    descriptor.key.kind = OpKind::kAllreduce;
    descriptor.key.count = input.size();
    descriptor.key.prescale = 1.0;
    descriptor.key.postscale = 1.0;
    descriptor.dtype = DType::kFloat32;
    descriptor.rows = input.size();
    descriptor.bytes = input.size() * sizeof(float);
    operation.input = reinterpret_cast<const std::byte*>(input.data());
    operation.output = reinterpret_cast<std::byte*>(output.data());
    operation.output_bytes = descriptor.bytes;
    allreduce(exchange_, Call{descriptor, {}}, operation);
  }

 private:
  std::shared_ptr<Transport> transport_;
  Exchange exchange_;
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
  if (argc < 9) {
    std::fprintf(stderr,
                 "simulated_allreduce multiring|mpi|mpi-timing RANKS_PER_HOST MODE MESSAGE_SECONDS LATENCY "
                 "BYTES_PER_SECOND MEMORY_SECONDS BYTES [BYTES ...]\n");
    return 2;
  }
  MPI_Init(&argc, &argv);
  memory_seconds_per_byte = std::atof(argv[7]);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  {
    std::unique_ptr<Allreduce> allreduce;
    const bool core = std::strcmp(argv[1], "multiring") == 0;
    if (core)
      allreduce = std::make_unique<CoreAllreduce>(
          std::atoi(argv[2]), argv[3], RoundCost{std::atof(argv[4]), std::atof(argv[5]), std::atof(argv[6])});
    else
      allreduce = std::make_unique<LibraryAllreduce>();
    check_sums(*allreduce, rank, size);
    if (std::strcmp(argv[1], "mpi-timing") == 0) stop_carrying_data(rank);
    for (int index = 8; index < argc; ++index) {
      const std::size_t count = std::strtoull(argv[index], nullptr, 10) / sizeof(float);
      const double seconds = measure(*allreduce, count, size, core);
      if (rank == 0) std::printf("%s %.9f\n", argv[index], seconds);
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);  // all have said goodbye
  MPI_Finalize();
  return 0;
}
