#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "base/immovable.h"
#include "support/operations.h"
#include "support/rank_group.h"

// So that the stand-in is linked, and found by the core.
extern "C" int ncclGetVersion(int* version);

namespace multiring::testing {

/// Where the stand-in for NCCL has its files, as long as a test runs.
class NcclFolder : Immovable {
 public:
  NcclFolder() {
    int version = 0;
    ncclGetVersion(&version);
    static const std::string kParent = ::testing::TempDir();  // which TMPDIR changes
    std::string folder = kParent + "multiring-nccl-XXXXXX";
    path_ = ::mkdtemp(folder.data());
    ::setenv("TMPDIR", folder.c_str(), 1);
  }
  ~NcclFolder() {
    ::unsetenv("FAKE_NCCL");
    ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
    std::filesystem::remove_all(path_);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// How many ranks each host has, and among which of several hosts NCCL is asked for.
struct Layout {
  std::vector<int> ranks;
  NcclScope scope = NcclScope::kAll;

  int size() const { return std::accumulate(ranks.begin(), ranks.end(), 0); }
  GroupOptions options() const {
    const bool one_host = ranks.size() == 1;
    GroupOptions made(one_host ? TransportKind::kInproc : TransportKind::kCluster, size(), kSmallStaging);
    if (one_host) return made;
    made.layout = ranks;
    made.communicator.nccl = scope;
    return made;
  }
};

}  // namespace multiring::testing
