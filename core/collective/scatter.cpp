#include <string>
#include <vector>

#include "collective/cluster/cluster_copy.h"
#include "collective/collectives.h"
#include "collective/staged/staged_copy.h"
#include "topology/chunks.h"

namespace multiring {

// The root alone knows what is scattered: the others take dtype and shape from its descriptor, and this
// rank's descriptor is filled in for the caller.
void scatter(Exchange& exchange, const OperationCall& call, Operation& operation) {
  const auto size = static_cast<std::size_t>(exchange.size());
  const int root = operation.descriptor.key.root;
  std::vector<StagedCopy::Outgoing> outgoing(size);
  if (exchange.rank() == root) {
    const std::size_t rows = operation.descriptor.rows;
    const std::size_t row_bytes = rows > 0 ? operation.descriptor.bytes / rows : 0;
    for (std::size_t rank = 0; rank < size; ++rank) {
      const Range block = block_range(rows, size, rank);
      outgoing[rank] = {operation.input + block.begin * row_bytes, block.size() * row_bytes};
    }
  }
  const auto in_rounds = [&](std::size_t bytes) {
    return exchange.plans()
        .algorithm(exchange.transport(), Collective::kScatter, bytes, Order::kAny)
        .is_rounds();
  };
  operation.descriptor.key.algorithm = exchange.plans().rules_hash(Collective::kScatter);
  StagedCopy copy(exchange, call, outgoing, outgoing[0].bytes);  // block 0 is the longest
  exchange.match(call, operation.descriptor, [&] {
    if (in_rounds(operation.descriptor.bytes)) copy.stage_first();
  });

  const Descriptor sent = exchange.board().of(root);
  const std::size_t row_bytes = sent.rows > 0 ? sent.bytes / sent.rows : 0;
  const std::size_t rows = block_range(sent.rows, size, static_cast<std::size_t>(exchange.rank())).size();
  operation.descriptor.dtype = sent.dtype;
  operation.descriptor.dims = sent.dims;
  operation.descriptor.shape = sent.shape;
  operation.descriptor.rows = rows;
  operation.descriptor.shape[0] = rows;
  operation.received.assign(1, rows);
  if (operation.output == nullptr) {
    operation.result.allocate(rows * row_bytes);
    operation.output = operation.result.data();
  } else if (operation.output_bytes != rows * row_bytes) {
    exchange.throw_mismatch_with(call, root,
                                 exchange.where(call) + ": out has " +
                                     std::to_string(operation.output_bytes) + " bytes where " +
                                     exchange.name_of(root) + " sends " + std::to_string(rows * row_bytes));
  }
  std::vector<StagedCopy::Incoming> incoming(size);
  incoming[static_cast<std::size_t>(root)] = {operation.output, rows * row_bytes};
  const std::size_t longest = block_range(sent.rows, size, 0).size() * row_bytes;  // block 0 is it
  if (in_rounds(sent.bytes)) {
    copy.set_longest(longest);
    return copy.run(incoming);
  }
  const bool root_is_here =
      exchange.transport().host_number(root) == exchange.transport().host_number(exchange.rank());
  ClusterCopy(exchange, call, outgoing, incoming).run(root_is_here ? longest : 0);
}

}  // namespace multiring
