#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/arithmetic/comm_dtype.h"
#include "base/arithmetic/order.h"
#include "base/export.h"
#include "base/host_links.h"
#include "base/nccl_scope.h"

namespace multiring {

/// What a user may set for a job. An environment variable sets each: MULTIRING_TIMEOUT sets `timeout`.
///
/// The bindings, Python's table of variables and the comparison over ranks read `visit_settings`: a new
/// setting is a member here, its row there, and a row of multiring/config.py.
struct JobSettings {
  double timeout = 300.0;              ///< seconds that `init` or an operation waits for other ranks
  double stall_warning = 8.0;          ///< seconds of waiting before a warning; 0: never
  double spin_microseconds = 40.0;     ///< that a wait spins, or yields if oversubscribed, before it sleeps
  std::size_t staging_bytes = 262144;  ///< of the segment that each rank stages arrays through
  double heartbeat = 5.0;              ///< seconds, about, until a host that has vanished counts as lost
  std::string host;  ///< ranks with the same name share memory; empty: the kernel's identity
  std::vector<std::string> interfaces;  ///< between hosts, see InterfaceFilter; empty: the default
  std::string tcp_congestion;           ///< congestion control between hosts, see transport/tcp/sockets.h
  /// Between hosts, a name of transport/world/networks.cpp; empty: as the launcher says.
  std::string transport;
  HostLinks host_links = HostLinks::kSwitch;
  /// How allreduces across hosts are divided (topology/dimensions.h); empty: chosen by size.
  std::string mode;
  /// Costs of allreduces, and algorithms by size (collective/plan/tuning.h); kNoTuning: none, and none is
  /// measured.
  std::string tuning;
  CommDtype comm_dtype = CommDtype::kFloat32;  ///< of allreduces of float32 that do not say
  Order order = Order::kCanonical;             ///< of allreduces that do not say
  NcclScope nccl = NcclScope::kHost;           ///< where arrays on devices pass by it
  bool peer_memory =
      false;  ///< allreduces in the canonical order of arrays on devices of one host stay there
};

inline constexpr const char* kNoTuning = "off";

enum class SettingScope : std::uint8_t {
  kRank,  ///< each rank may have its own
  kJob,   ///< has to be the same on all ranks
};

/// Calls `visit(name, member, scope)` for every setting.
template <class Visit>
void visit_settings(const Visit& visit) {
  visit("timeout", &JobSettings::timeout, SettingScope::kRank);
  visit("stall_warning", &JobSettings::stall_warning, SettingScope::kRank);
  visit("spin_microseconds", &JobSettings::spin_microseconds, SettingScope::kRank);
  visit("staging_bytes", &JobSettings::staging_bytes, SettingScope::kJob);
  visit("heartbeat", &JobSettings::heartbeat, SettingScope::kRank);
  visit("host", &JobSettings::host, SettingScope::kRank);
  visit("interfaces", &JobSettings::interfaces, SettingScope::kRank);
  visit("tcp_congestion", &JobSettings::tcp_congestion, SettingScope::kRank);
  visit("transport", &JobSettings::transport, SettingScope::kRank);
  visit("host_links", &JobSettings::host_links, SettingScope::kJob);
  visit("mode", &JobSettings::mode, SettingScope::kJob);
  visit("tuning", &JobSettings::tuning, SettingScope::kJob);
  visit("comm_dtype", &JobSettings::comm_dtype, SettingScope::kJob);
  visit("order", &JobSettings::order, SettingScope::kJob);
  visit("nccl", &JobSettings::nccl, SettingScope::kJob);
  visit("peer_memory", &JobSettings::peer_memory, SettingScope::kJob);
}

/// The settings of the job, to be compared: values by the names of their variables.
MULTIRING_API std::map<std::string, std::string> values_of_job(const JobSettings& settings);

}  // namespace multiring
