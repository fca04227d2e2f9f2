#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "support/device_array.h"

// So that the stand-in is linked, and found by the core.
extern "C" int nvrtcVersion(int* major, int* minor);

namespace multiring::testing {

/// Ranks with their arrays on one device, which use peer memory.
struct PeerJob {
  FakeGpu gpu;
  std::shared_ptr<Devices> devices = std::make_shared<Devices>(gpu.driver());
  std::mutex mutex;
  std::vector<std::string> warnings;
  RankGroup group;

  explicit PeerJob(int size, Progress progress = Progress::kLate, std::uint64_t seed = 0)
      : group(options(size)) {
    int major = 0;
    nvrtcVersion(&major, &major);
    gpu.set_progress(progress, seed);
  }
  GroupOptions options(int size) {
    GroupOptions made(TransportKind::kInproc, size, kSmallStaging);
    made.communicator.peer_memory = true;
    made.communicator.nccl = NcclScope::kOff;  // which a process may find, or not
    made.communicator.warn = [this](const std::string& text) {
      const std::lock_guard lock(mutex);
      warnings.push_back(text);
    };
    return made;
  }
  DeviceArray array(std::size_t count, float value) { return {gpu, 0, std::vector<float>(count, value)}; }
  int copies() { return gpu.calls("copy_to_host"); }
  /// As a stream sees it that waits for nothing.
  std::vector<float> seen_at_once(const DeviceArray& array) {
    std::vector<float> seen;
    const std::uintptr_t stream = gpu.make_stream(0);
    gpu.launch(stream, [&] { seen = array.values(); });
    gpu.synchronize(stream);
    return seen;
  }
};

}  // namespace multiring::testing
