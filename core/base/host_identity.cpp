#include "base/host_identity.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <fstream>

namespace multiring {

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  return std::getline(file, boot_id) ? boot_id : host_name();
}

std::string network_identity() {
  char target[64] = {};  // "net:[4026531840]"; empty where it may not be read
  return ::readlink("/proc/self/ns/net", target, sizeof target - 1) > 0 ? target : "";
}

int cpu_quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (!(file >> quota >> period) || period <= 0) return INT_MAX;  // "max", or no control group of version 2
  return std::max(1, static_cast<int>(std::ceil(quota / period)));
}

}  // namespace multiring
