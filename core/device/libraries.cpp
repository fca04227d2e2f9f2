#include "device/libraries.h"

#include <functional>
#include <optional>
#include <utility>

#include "device/driver.h"
#include "device/nccl.h"
#include "device/nvrtc.h"
#include "device/shared_library.h"

namespace multiring {
namespace {

using GetNumber = int (*)(int*);

// What collectives by NCCL take, RCCL by the same names.
constexpr const char* kNcclFunctions[] = {
    "ncclGetVersion",   "ncclGetErrorString", "ncclGetUniqueId",   "ncclCommInitRankConfig", "ncclCommSplit",
    "ncclCommFinalize", "ncclCommDestroy",    "ncclCommAbort",     "ncclCommGetAsyncError",  "ncclGroupStart",
    "ncclGroupEnd",     "ncclAllReduce",      "ncclReduceScatter", "ncclAllGather",          "ncclBroadcast",
    "ncclReduce",       "ncclSend",           "ncclRecv"};

std::string nccl_version_of(const SharedLibrary& library) {
  const auto ask = reinterpret_cast<GetNumber>(library.find("ncclGetVersion"));
  int version = 0;
  return ask != nullptr && ask(&version) == 0 ? nccl::version_text(version) : "unknown";
}

struct Wanted {
  const char* name;
  std::vector<SharedLibrary::Candidate> candidates;
  SharedLibrary::Refusal refuse;
  std::function<void(const SharedLibrary&, DeviceLibrary&)> describe;
};

DeviceLibrary look_for(const Wanted& wanted) {
  DeviceLibrary found;
  found.name = wanted.name;
  const auto library = SharedLibrary::open(wanted.candidates, wanted.refuse, &found.why);
  if (!library) return found;
  found.path = library->path();
  found.origin = library->origin();
  wanted.describe(*library, found);
  return found;
}

std::vector<SharedLibrary::Candidate> places_of(const std::vector<std::string>& files,
                                                const std::string& wheel = {},
                                                std::span<const std::string> sites = {}) {
  return SharedLibrary::candidates(files, wheel, sites);
}

Wanted collectives(const char* name, std::vector<SharedLibrary::Candidate> candidates) {
  const auto refuse = [](const SharedLibrary& library) -> std::string {
    for (const char* function : kNcclFunctions)
      if (library.find(function) == nullptr)
        return "version " + nccl_version_of(library) + " has no function " + function +
               ": a newer one is needed";
    return {};
  };
  const auto describe = [](const SharedLibrary& library, DeviceLibrary& found) {
    found.version = nccl_version_of(library);
  };
  return {name, std::move(candidates), refuse, describe};
}

std::optional<std::vector<std::pair<int, int>>> pairs_without_access(const cuda::Driver& driver, int count) {
  if (driver.can_access_peer == nullptr) return std::nullopt;
  const auto reaches = [&](int from, int to) {
    cuda::Device device = 0;
    cuda::Device peer = 0;
    int can = 0;
    return driver.device_get(&device, from) == cuda::kSuccess &&
           driver.device_get(&peer, to) == cuda::kSuccess &&
           driver.can_access_peer(&can, device, peer) == cuda::kSuccess && can != 0;
  };
  std::vector<std::pair<int, int>> found;
  for (int first = 0; first < count; ++first)
    for (int second = first + 1; second < count; ++second)
      if (!reaches(first, second) || !reaches(second, first)) found.emplace_back(first, second);
  return found;
}

Wanted driver(const char* name, const std::vector<std::string>& files) {
  const auto refuse = [](const SharedLibrary& library) { return cuda::Driver().load(library); };
  const auto describe = [](const SharedLibrary& library, DeviceLibrary& found) {
    cuda::Driver driver;
    driver.load(library);
    found.version = driver.version();
    if (driver.device_count(&found.devices) != cuda::kSuccess) found.devices = 0;
    found.pairs_without_access = pairs_without_access(driver, found.devices);
  };
  return {name, places_of(files), refuse, describe};
}

Wanted compiler(std::span<const std::string> sites) {
  const auto refuse = [](const SharedLibrary& library) { return nvrtc::Library().load(library); };
  const auto describe = [](const SharedLibrary& library, DeviceLibrary& found) {
    nvrtc::Library loaded;
    loaded.load(library);
    found.version = loaded.version();
  };
  return {"NVRTC", nvrtc::Library::candidates(nvrtc::kNewestCuda, sites), refuse, describe};
}

}  // namespace

std::vector<DeviceLibrary> find_device_libraries(std::span<const std::string> sites) {
  const Wanted kWanted[] = {
      driver("CUDA driver", {"libcuda.so.1"}),
      collectives("NCCL", places_of({"libnccl.so.2"}, "nvidia/nccl/lib", sites)),
      compiler(sites),
      driver("HIP", {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}),
      collectives("RCCL", places_of({"librccl.so.1"})),
  };
  std::vector<DeviceLibrary> found;
  for (const Wanted& wanted : kWanted) found.push_back(look_for(wanted));
  return found;
}

}  // namespace multiring
