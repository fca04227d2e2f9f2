#include "collective/gathers.h"

#include <algorithm>
#include <numeric>

#include "collective/cluster/cluster_allgather.h"
#include "collective/cluster/cluster_copy.h"
#include "collective/collectives.h"

namespace multiring {

std::vector<StagedCopy::Incoming> join_rows(const Exchange& exchange, const OperationCall& call,
                                            Operation& operation, const std::vector<std::uint64_t>& rows,
                                            std::size_t row_bytes) {
  operation.received = rows;
  const std::size_t total = std::accumulate(rows.begin(), rows.end(), std::size_t{0}) * row_bytes;
  if (operation.output == nullptr) {
    operation.result.allocate(total);
    operation.output = operation.result.data();
  } else if (operation.output_bytes != total) {
    // The peers continue with the operation, so this rank has to fail it for all.
    exchange.throw_mismatch_with(call, -1,
                                 "rank " + std::to_string(exchange.rank()) + ": out of " +
                                     describe(operation.descriptor) + " has " +
                                     std::to_string(operation.output_bytes) + " bytes where the ranks send " +
                                     std::to_string(total) + " together; omit out to have it allocated");
  }
  std::vector<StagedCopy::Incoming> incoming;
  std::byte* next = operation.output;
  for (const std::uint64_t count : rows) {
    incoming.push_back({next, count * row_bytes});
    next += count * row_bytes;
  }
  return incoming;
}

namespace {

std::vector<std::uint64_t> rows_of_all(const Exchange& exchange) {
  std::vector<std::uint64_t> rows;
  for (int rank = 0; rank < exchange.size(); ++rank) rows.push_back(exchange.descriptor(rank).rows);
  return rows;
}

/// A large gather across hosts: messages go to the root's host only.
void gather_by_messages(Exchange& exchange, const OperationCall& call, const Operation& operation,
                        const std::vector<StagedCopy::Incoming>& incoming, std::size_t longest) {
  const Transport& transport = exchange.transport();
  const int root = operation.descriptor.key.root;
  std::vector<StagedCopy::Outgoing> outgoing(incoming.size());
  outgoing[static_cast<std::size_t>(root)] = {operation.input, operation.descriptor.bytes};
  const bool root_is_here = transport.host_number(root) == transport.host_number(exchange.rank());
  ClusterCopy(exchange, call, outgoing, incoming).run(root_is_here ? longest : 0);
}

/// Allgather and gather: every rank stages its piece; all ranks, or the root only, take all pieces.
void gather_pieces(Exchange& exchange, const OperationCall& call, Operation& operation, bool wanted) {
  const bool to_root = operation.descriptor.key.kind == OpKind::kGather;
  const auto by_messages = [&](std::size_t piece) {
    const Transport& transport = exchange.transport();
    return to_root ? worth_messages(transport, piece, piece)
                   : ClusterAllgather::is_worthwhile(transport, piece);
  };
  const StagedCopy::Outgoing outgoing[] = {{operation.input, operation.descriptor.bytes}};
  StagedCopy copy(exchange, call, outgoing);
  exchange.match(call, operation.descriptor, [&] {
    // All pieces are sent by messages if this one is: the longest decides.
    if (!by_messages(operation.descriptor.bytes)) copy.stage_first();
  });
  const std::vector<std::uint64_t> rows = rows_of_all(exchange);
  // key.count is the number of elements in a row.
  const std::size_t row_bytes = operation.descriptor.key.count * operation.element_size();
  const std::size_t longest = *std::max_element(rows.begin(), rows.end()) * row_bytes;
  std::vector<StagedCopy::Incoming> incoming(rows.size());
  if (wanted) incoming = join_rows(exchange, call, operation, rows, row_bytes);
  if (!by_messages(longest)) return copy.run(incoming, longest);
  if (to_root) return gather_by_messages(exchange, call, operation, incoming, longest);
  ClusterAllgather(exchange, call, outgoing[0], incoming).run(longest);
}

}  // namespace

void allgather(Exchange& exchange, const OperationCall& call, Operation& operation) {
  gather_pieces(exchange, call, operation, true);
}

void gather(Exchange& exchange, const OperationCall& call, Operation& operation) {
  gather_pieces(exchange, call, operation, exchange.rank() == operation.descriptor.key.root);
}

}  // namespace multiring
