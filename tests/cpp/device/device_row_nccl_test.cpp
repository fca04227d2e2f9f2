// What `multiring plan` says of arrays on devices of several hosts is what jobs do, on the stand-ins for NCCL
// and for the driver: ranks as threads, on two devices that they share.

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collective/kinds.h"
#include "collective/plan/device_row.h"
#include "support/device_array.h"
#include "support/nccl_folder.h"

namespace multiring {
namespace {

using namespace testing;

/// Hosts, and whether each reaches its neighbours alone.
struct Hosts {
  std::vector<int> ranks;
  bool is_ring = false;
};

class DeviceRowTest : public ::testing::TestWithParam<Hosts> {
 protected:
  static constexpr std::size_t kMany = 20'000;

  static OpKind kind_of(Collective collective) {
    for (int kind = 0; kind < static_cast<int>(OpKind::kCount); ++kind)
      if (traits_of(static_cast<OpKind>(kind)).name == std::string(collective_name(collective)))
        return static_cast<OpKind>(kind);
    return OpKind::kCount;
  }
  static DeviceRequest request(Collective collective, NcclScope scope) {
    return {collective, kMany * sizeof(float), DType::kFloat32, Order::kAny, scope, false};
  }

  std::string told(const DeviceRequest& request) const {
    Cluster cluster = make_cluster(GetParam().ranks, {{1e9, 1e-5}});
    if (GetParam().is_ring) cluster.links = HostLinks::kRing;
    return device_row(cluster, request).name;
  }
  /// Of NCCL, as long as they live.
  static std::size_t communicators_in(const NcclFolder& folder) {
    std::size_t found = 0;
    for (const auto& each : std::filesystem::directory_iterator(folder.path()))
      found += each.path().string().ends_with(".init.0") ? 1 : 0;
    return found;
  }
  /// By how many communicators NCCL has.
  std::string done(const DeviceRequest& request) const {
    const NcclFolder folder;
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    std::size_t found = 0;
    FakeGpu gpu;
    const auto devices = std::make_shared<Devices>(gpu.driver());
    GroupOptions options = Layout{GetParam().ranks, request.nccl}.options();
    if (GetParam().is_ring) options.transport = TransportKind::kClusterRing;
    options.communicator.order = request.order;
    if (request.has_mode) options.communicator.mode = "rounds";
    if (request.is_rounded) options.communicator.comm_dtype = CommDtype::kBFloat16;
    RankGroup(options).run([&](Communicator& communicator) {
      Request made{.kind = kind_of(request.collective), .rows = request.bytes / sizeof(float)};
      const OpTraits& traits = traits_of(made.kind);
      if (traits.has_root) made.root = 0;
      std::optional<DeviceArray> x;
      if (traits.needs_input || communicator.rank() == 0 || request.collective == Collective::kBroadcast)
        x.emplace(gpu, communicator.rank() % 2, std::vector<float>(made.rows, 1));
      if (!x) made.rows = 0;
      const bool has_output = traits.output == OpTraits::Output::kSame;
      Operation operation =
          on_devices(make_operation(made), devices, x ? &*x : nullptr, x && has_output ? &*x : nullptr);
      if (made.kind == OpKind::kAlltoall) {
        operation.splits.assign(static_cast<std::size_t>(communicator.size()), 1);
        operation.splits[0] += made.rows - operation.splits.size();
      }
      run(communicator, std::move(operation));
      run(communicator, barrier_operation());
      if (communicator.rank() == 0) found = communicators_in(folder);
      run(communicator, barrier_operation());
    });
    if (found == 0) return "pinned";
    return found == 1 ? "nccl" : found == GetParam().ranks.size() ? "hierarchical" : std::to_string(found);
  }
  void expect_told(const DeviceRequest& request) const {
    EXPECT_EQ(told(request), done(request))
        << collective_name(request.collective) << " of " << request.bytes << " bytes, "
        << nccl_scope_name(request.nccl) << ", in " << order_name(request.order) << " order, mode "
        << request.has_mode << ", rounded " << request.is_rounded;
  }
};

TEST_P(DeviceRowTest, IsWhatJobsRun) {
  for (int scope = 0; scope < kNcclScopeCount; ++scope)
    for (const Collective collective : kAllCollectives)
      expect_told(request(collective, static_cast<NcclScope>(scope)));
}

TEST_P(DeviceRowTest, DependsOnSizeOrderAndMode) {
  for (const NcclScope scope : {NcclScope::kHierarchical, NcclScope::kAll})
    for (const Collective collective :
         {Collective::kAllreduce, Collective::kReduceScatter, Collective::kAllgather}) {
      DeviceRequest made = request(collective, scope);
      for (const std::size_t bytes : {65'532U, 65'536U}) {
        made.bytes = bytes;
        expect_told(made);
      }
      made.is_rounded = true;
      expect_told(made);
      made.is_rounded = false;
      made.order = Order::kCanonical;
      expect_told(made);
      made.order = Order::kAny;
      made.has_mode = true;
      expect_told(made);
    }
}

INSTANTIATE_TEST_SUITE_P(Layouts, DeviceRowTest,
                         ::testing::Values(Hosts{{2, 2}}, Hosts{{1, 1}}, Hosts{{2, 1}},
                                           Hosts{{1, 1, 1, 1}, true}));

TEST(DeviceRow, SaysWhyArraysAreCopied) {
  const std::vector<Interface> interfaces{{1e9, 1e-5}};
  const Cluster cluster = make_cluster(std::vector{2, 2}, interfaces);
  const auto why = [&](DeviceRequest request) { return device_row(cluster, request).excluded; };
  const std::size_t bytes = std::size_t{1} << 20;
  using enum NcclScope;
  constexpr auto kSum = Collective::kAllreduce;
  EXPECT_TRUE(why({kSum, bytes, DType::kFloat32, Order::kAny, kOff}).ends_with(": MULTIRING_NCCL=off"));
  EXPECT_TRUE(why({kSum, bytes, DType::kFloat32, Order::kAny, kHost}).ends_with("groups on one host"));
  EXPECT_TRUE(why({kSum, bytes, DType::kInt16, Order::kAny, kAll}).ends_with("NCCL adds no int16"));
  EXPECT_TRUE(why({kSum, bytes, DType::kFloat32, Order::kAny, kAll}).ends_with("not predicted"));
}

}  // namespace
}  // namespace multiring
