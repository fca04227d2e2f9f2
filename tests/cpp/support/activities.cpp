#include "support/activities.h"

#include "collective/kinds.h"

namespace multiring::testing {
namespace {

constexpr std::uint64_t kCount = 9000;  // 36 KB of float32: nine segments, above the direct way's threshold
constexpr std::uint64_t kMessage = 100000;

/// A collective of float32 on memory of its own.
Request request_of(Communicator& communicator, OpKind kind, std::vector<float>& array) {
  array.assign(kCount, 1.0f);
  Request request{.kind = kind, .rows = kCount, .input = array.data(), .name = "activity"};
  const OpTraits& traits = traits_of(kind);
  if (traits.has_root) request.root = 0;
  if (traits.output == OpTraits::Output::kSame) request.output = array.data();
  if (kind == OpKind::kScatter && communicator.rank() != 0) request.rows = 0;
  if (kind == OpKind::kBarrier) request.rows = 0;
  if (kind == OpKind::kAlltoall) {
    const auto size = static_cast<std::uint64_t>(communicator.size());
    request.rows = kCount / size * size;
    request.splits.assign(size, kCount / size);
  }
  return request;
}

Activity collective(OpKind kind) {
  return {traits_of(kind).name, [kind](Communicator& communicator, const CallOptions& options) {
            std::vector<float> array;
            run(communicator, make_operation(request_of(communicator, kind, array)), options);
          }};
}

Activity submitted(OpKind kind) {
  return {std::string(traits_of(kind).name) + "_async",
          [kind](Communicator& communicator, const CallOptions&) {
            std::vector<float> array;
            auto operation = make_operation(request_of(communicator, kind, array));
            communicator.submit(std::move(operation), 0, nullptr)->wait(Deadline::never(), {});
          }};
}

void direct_allreduce(Communicator& communicator, const CallOptions& options) {
  const auto region = communicator.allocate_symmetric(kCount * 4, options);
  std::byte* array = region->part(communicator.rank());
  for (int repeat = 0; repeat < 20; ++repeat) {
    run(communicator, allreduce_of(DType::kFloat32, kCount, array, array, "direct"), options);
  }
}

void ring_of_messages(Communicator& communicator, const CallOptions& options) {
  const int rank = communicator.rank();
  const int size = communicator.size();
  std::vector<float> array(kMessage);
  Operation send = send_of(DType::kFloat32, kMessage, array.data(), (rank + 1) % size, "ring");
  Operation receive =
      make_operation({.kind = OpKind::kReceive, .root = (rank + size - 1) % size, .name = "ring"});
  if (rank % 2 == 1) communicator.receive(receive, 0, options);
  communicator.send(send, 0, options);
  if (rank % 2 == 0) communicator.receive(receive, 0, options);
}

void split_twice(Communicator& communicator, const CallOptions& options) {
  const auto parity = communicator.split(communicator.rank() % 2, 0, options);
  const auto reversed = communicator.split(0, -communicator.rank(), options);
}

/// Calls `visit` with every collective that can be asked for.
template <class Visit>
void for_each_collective(const Visit& visit) {
  for (auto kind = OpKind{}; kind < OpKind::kCount; kind = static_cast<OpKind>(static_cast<int>(kind) + 1))
    if (is_collective(kind)) visit(kind);
}

}  // namespace

std::vector<Activity> all_activities() {
  std::vector<Activity> activities;
  for_each_collective([&](OpKind kind) { activities.push_back(collective(kind)); });
  activities.push_back({"direct_allreduce", direct_allreduce});
  activities.push_back({"send_receive", ring_of_messages});
  activities.push_back({"split", split_twice});
  activities.push_back({"symmetric_empty", [](Communicator& communicator, const CallOptions& options) {
                          communicator.allocate_symmetric(5000, options);
                        }});
  for_each_collective([&](OpKind kind) { activities.push_back(submitted(kind)); });
  return activities;
}

}  // namespace multiring::testing
