#include "transport/mpi/mpi_session.h"

#include <dlfcn.h>

#include <array>
#include <cstring>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/timed_wait.h"

namespace multiring {
namespace {

using Reason = std::array<char, 1024>;

constexpr int kBroadcastTag = 0;
constexpr std::chrono::microseconds kBetweenTests(200);

/// The memory of a broadcast's messages.
struct Broadcast {
  std::string value;
  std::vector<multiring_mpi_request> requests;
};

/// Equal on all ranks (FNV-1a).
std::uint64_t hash(const std::string& name) {
  std::uint64_t value = 0xcbf29ce484222325ULL;
  for (const char each : name) value = (value ^ static_cast<unsigned char>(each)) * 0x100000001b3ULL;
  return value ^ (value >> 32);
}

const multiring_mpi& load_bridge(const std::string& bridge) {
  // MPI libraries load plugins that need their symbols.
  void* const library = ::dlopen(bridge.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr)
    throw Error(ErrorKind::kUsage, "the bridge to MPI cannot be loaded: " + std::string(::dlerror()) +
                                       ". Run `multiring build mpi` with the MPI that starts the job");
  const auto* const functions = static_cast<const multiring_mpi*>(::dlsym(library, MULTIRING_MPI_SYMBOL));
  if (functions == nullptr || functions->version != MULTIRING_MPI_VERSION)
    throw Error(ErrorKind::kUsage,
                bridge + " is not of this version of multiring: run `multiring build mpi` again");
  return *functions;
}

}  // namespace

std::shared_ptr<MpiSession> MpiSession::load(const std::string& bridge, const void* communicator) {
  return std::make_shared<MpiSession>(load_bridge(bridge), communicator);
}

std::string MpiSession::library_of(const std::string& bridge) { return load_bridge(bridge).library(); }

MpiSession::MpiSession(const multiring_mpi& functions, const void* communicator) : functions_(functions) {
  Reason why{};
  if (functions_.open(communicator, &group_, why.data(), why.size()) != 0)
    throw Error(ErrorKind::kUsage, std::string("MPI cannot be used: ") + why.data());
}

int MpiSession::reserve_tags(const std::string& name, int count) {
  const auto slots = static_cast<std::uint64_t>(functions_.largest_tag(group_) / count - 1);
  const int first = static_cast<int>(hash(name) % slots + 1) * count;
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = reserved_.emplace(first, name);
  if (!is_new)
    throw Error(ErrorKind::kInternal,
                "the groups '" + found->second + "' and '" + name + "' have the same MPI tags (" +
                    std::to_string(slots) +
                    " to choose from): start the job again, or with MULTIRING_TRANSPORT=tcp");
  return first;
}

std::string MpiSession::broadcast(const std::string& value, int root, const WaitOptions& waiting) {
  if (value.size() > kBroadcastBytes)
    throw Error(ErrorKind::kInternal, "a broadcast of " + std::to_string(value.size()) + " bytes by MPI");
  auto broadcast = std::make_shared<Broadcast>();
  broadcast->value = value;
  Reason why{};
  int failed = 0;
  if (rank() == root) {
    const multiring_mpi_part part{broadcast->value.data(), broadcast->value.size()};
    for (int peer = 0; peer < size() && failed == 0; ++peer)
      if (peer != root)
        failed = functions_.send(group_, &part, 1, peer, kBroadcastTag, &broadcast->requests.emplace_back(),
                                 why.data(), why.size());
  } else {
    broadcast->value.assign(kBroadcastBytes, '\0');
    failed = functions_.receive(group_, broadcast->value.data(), kBroadcastBytes, root, kBroadcastTag,
                                &broadcast->requests.emplace_back(), why.data(), why.size());
  }
  if (failed != 0) broadcast->requests.pop_back();
  std::vector<std::size_t> bytes(broadcast->requests.size());
  try {
    if (failed != 0) throw Error(ErrorKind::kInternal, std::string("MPI failed: ") + why.data());
    complete(broadcast->requests, bytes, waiting);
  } catch (...) {
    keep(broadcast);
    throw;
  }
  if (rank() != root) broadcast->value.resize(bytes[0]);
  return broadcast->value;
}

void MpiSession::keep(std::shared_ptr<const void> memory) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(memory));
}

void MpiSession::complete(std::span<multiring_mpi_request> requests, std::span<std::size_t> bytes,
                          const WaitOptions& waiting) const {
  TimedWait timed(waiting);
  Reason why{};
  std::vector<multiring_mpi_completion> done(requests.size());
  for (std::size_t left = requests.size(); left > 0;) {
    int count = 0;
    if (functions_.test(requests.data(), static_cast<int>(requests.size()), functions_.simulated, done.data(),
                        &count, why.data(), why.size()) != 0)
      throw Error(ErrorKind::kInternal, std::string("MPI failed: ") + why.data());
    for (int index = 0; index < count; ++index) {
      const multiring_mpi_completion& each = done[static_cast<std::size_t>(index)];
      if (each.outcome != MULTIRING_MPI_DONE)
        throw Error(ErrorKind::kInternal, "rank " + std::to_string(rank()) + ": MPI failed in init");
      bytes[static_cast<std::size_t>(each.index)] = each.bytes;
      --left;
    }
    if (left == 0) return;
    if (timed.expired())
      throw Error(ErrorKind::kTimeout, "rank " + std::to_string(rank()) + " of " + std::to_string(size()) +
                                           " waited in init for other ranks, by MPI: one has failed or "
                                           "has not called init. MULTIRING_TIMEOUT sets how long to wait.");
    if (count == 0) std::this_thread::sleep_for(kBetweenTests);
  }
}

}  // namespace multiring
