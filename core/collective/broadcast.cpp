#include <vector>

#include "base/arithmetic/kernels/copy.h"
#include "collective/cluster/plan_run.h"
#include "collective/collectives.h"
#include "collective/device/device_arrays.h"
#include "collective/device/peer_run.h"
#include "collective/staged/staged_copy.h"

namespace multiring {
namespace {

/// What the root has is its result as well.
void keep(const Operation& operation, bool is_root) {
  if (is_root && operation.output != operation.input && operation.descriptor.bytes > 0)
    copy_bytes(operation.output, operation.input, operation.descriptor.bytes);
}

}  // namespace

void broadcast(Exchange& exchange, const OperationCall& call, Operation& operation) {
  const int root = operation.descriptor.key.root;
  const std::size_t bytes = operation.descriptor.bytes;
  const bool is_root = exchange.rank() == root;
  const CrossingAlgorithm& algorithm =
      exchange.plans().algorithm(exchange.transport(), Collective::kBroadcast, bytes, Order::kAny);
  operation.descriptor.key.algorithm = hash_of(algorithm);
  StagedCopy::Outgoing outgoing[1];
  StagedCopy copy(exchange, call, outgoing, bytes);
  const auto stage = [&] {
    if (algorithm.is_plan()) return;
    outgoing[0] = {operation.input, is_root ? bytes : 0};
    copy.stage_first();
  };
  const bool on_devices = exchange.offers().match(exchange, call, operation, stage, [] {});
  if (on_devices && !operation.descriptor.offers_peers) {
    const nccl::Call calls[] = {{nccl::Function::kBroadcast, operation.input, operation.output, bytes, root}};
    return exchange.nccl().run(exchange, call, operation, calls);
  }
  if (algorithm.is_plan()) {
    std::vector<Piece> blocks(static_cast<std::size_t>(exchange.size()));
    blocks[static_cast<std::size_t>(root)] = {operation.input, is_root ? nullptr : operation.output, bytes};
    run_blocks(exchange, call, operation, Collective::kBroadcast, blocks, algorithm);
    return keep(operation, is_root);
  }
  std::vector<StagedCopy::Incoming> incoming(static_cast<std::size_t>(exchange.size()));
  if (!is_root || on_devices) incoming[static_cast<std::size_t>(root)] = {operation.output, bytes};
  if (on_devices) {
    outgoing[0] = {operation.input, is_root ? bytes : 0};
    return move_in_peer_memory(exchange, call, operation, outgoing, incoming, bytes);
  }
  copy.run(incoming);
  keep(operation, is_root);
}

}  // namespace multiring
