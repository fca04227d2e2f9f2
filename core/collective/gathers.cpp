#include "collective/gathers.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "collective/cluster/cluster_copy.h"
#include "collective/cluster/plan_run.h"
#include "collective/collectives.h"
#include "collective/kinds.h"

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

/// What is gathered, in bytes.
struct Pieces {
  std::vector<std::uint64_t> rows;  ///< of each rank
  std::size_t row_bytes = 0;
  std::size_t longest = 0;
};

Pieces pieces_of(const Exchange& exchange, const Operation& operation) {
  // key.count is the number of elements in a row.
  Pieces pieces{rows_of_all(exchange), operation.descriptor.key.count * operation.element_size()};
  pieces.longest = *std::ranges::max_element(pieces.rows) * pieces.row_bytes;
  return pieces;
}

}  // namespace

/// Every rank stages its piece, or sends it by a plan, and takes all pieces.
void allgather(Exchange& exchange, const OperationCall& call, Operation& operation) {
  const bool has_array = traits_of(operation.descriptor).has_array;
  const auto algorithm = [&](std::size_t piece) -> const CrossingAlgorithm& {
    return exchange.plans().algorithm(exchange.transport(), Collective::kAllgather, has_array ? piece : 0,
                                      Order::kAny);
  };
  operation.descriptor.key.algorithm = exchange.plans().allgather_rules();
  // The longest piece decides, which is not known yet: that of this piece may differ.
  const StagedCopy::Outgoing outgoing[] = {{operation.input, operation.descriptor.bytes}};
  StagedCopy copy(exchange, call, outgoing, operation.descriptor.bytes);
  exchange.match(call, operation.descriptor, [&] {
    if (algorithm(operation.descriptor.bytes).staged) copy.stage_first();
  });
  const Pieces pieces = pieces_of(exchange, operation);
  const std::vector<StagedCopy::Incoming> incoming =
      join_rows(exchange, call, operation, pieces.rows, pieces.row_bytes);
  if (const CrossingAlgorithm& chosen = algorithm(pieces.longest); !chosen.staged) {
    std::vector<Piece> blocks;
    for (const StagedCopy::Incoming& piece : incoming) blocks.push_back({nullptr, piece.data, piece.bytes});
    blocks[static_cast<std::size_t>(exchange.rank())].input = operation.input;
    return run_blocks(exchange, call, operation, Collective::kAllgather, blocks, chosen);
  }
  copy.set_longest(pieces.longest);
  const bool all_have_staged = std::ranges::all_of(pieces.rows, [&](std::uint64_t rows) {
    const std::size_t piece = rows * pieces.row_bytes;
    return piece == pieces.longest || algorithm(piece).staged;
  });
  if (!all_have_staged) exchange.next(call, [&] { copy.stage_first(); });
  copy.run(incoming);
}

/// The same, but only the root takes all pieces.
void gather(Exchange& exchange, const OperationCall& call, Operation& operation) {
  const auto by_messages = [&](std::size_t piece) {
    return worth_messages(exchange.transport(), piece, piece);
  };
  const StagedCopy::Outgoing outgoing[] = {{operation.input, operation.descriptor.bytes}};
  StagedCopy copy(exchange, call, outgoing, operation.descriptor.bytes);
  exchange.match(call, operation.descriptor, [&] {
    // All pieces are sent by messages if this one is: the longest decides.
    if (!by_messages(operation.descriptor.bytes)) copy.stage_first();
  });
  const Pieces pieces = pieces_of(exchange, operation);
  std::vector<StagedCopy::Incoming> incoming(pieces.rows.size());
  if (exchange.rank() == operation.descriptor.key.root)
    incoming = join_rows(exchange, call, operation, pieces.rows, pieces.row_bytes);
  if (by_messages(pieces.longest))
    return gather_by_messages(exchange, call, operation, incoming, pieces.longest);
  copy.set_longest(pieces.longest);
  copy.run(incoming);
}

}  // namespace multiring
