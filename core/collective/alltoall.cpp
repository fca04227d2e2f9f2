#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "collective/cluster/cluster_copy.h"
#include "collective/collectives.h"
#include "collective/device/device_arrays.h"
#include "collective/device/peer_run.h"
#include "collective/gathers.h"
#include "collective/staged/staged_copy.h"

namespace multiring {
namespace {

/// What the splits of all ranks say, in rows.
struct Rows {
  std::vector<std::uint64_t> to_me;  ///< by the rank that sends them
  std::vector<std::uint64_t> to;     ///< by the rank that receives them
  std::uint64_t longest = 0;         ///< from one rank to another or itself
  std::uint64_t longest_here = 0;    ///< between two ranks of this host
};

Rows rows_of_all(const Exchange& exchange) {
  const Transport& transport = exchange.transport();
  const auto size = static_cast<std::size_t>(exchange.size());
  const int host = transport.host_number(exchange.rank());
  const auto is_here = [&](std::size_t rank) {
    return transport.host_number(static_cast<int>(rank)) == host;
  };
  Rows rows{std::vector<std::uint64_t>(size), std::vector<std::uint64_t>(size)};
  std::vector<std::uint64_t> splits(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    std::memcpy(splits.data(), exchange.staging(static_cast<int>(rank)), size * sizeof(std::uint64_t));
    rows.to_me[rank] = splits[static_cast<std::size_t>(exchange.rank())];
    const bool is_sent_here = is_here(rank);
    for (std::size_t reader = 0; reader < size; ++reader) {
      rows.to[reader] += splits[reader];
      rows.longest = std::max(rows.longest, splits[reader]);
      if (is_sent_here && reader != rank && is_here(reader))
        rows.longest_here = std::max(rows.longest_here, splits[reader]);
    }
  }
  return rows;
}

/// Raises a mismatch error where other numbers of rows come than this rank expects.
void require_expected(const Exchange& exchange, const OperationCall& call, const Operation& operation,
                      const std::vector<std::uint64_t>& rows) {
  if (operation.expected.empty() || operation.expected == rows) return;
  const auto listed = [](const std::vector<std::uint64_t>& numbers) {
    std::string text;
    for (const std::uint64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
    return "[" + text + "]";
  };
  const auto [theirs, expected] = std::ranges::mismatch(rows, operation.expected);
  const int peer = theirs == rows.end() ? -1 : static_cast<int>(theirs - rows.begin());
  exchange.throw_mismatch_with(call, peer,
                               exchange.where(call) + ": the ranks sent " + listed(rows) +
                                   " elements where it expects " + listed(operation.expected));
}

}  // namespace

// The first round carries every rank's splits in staging memory, the following ones the rows, one section for
// each reader.
void alltoall(Exchange& exchange, const OperationCall& call, Operation& operation) {
  const auto size = static_cast<std::size_t>(exchange.size());
  const std::size_t row_bytes = operation.descriptor.key.count * operation.element_size();
  const std::size_t table_bytes = size * sizeof(std::uint64_t);
  if (table_bytes > exchange.transport().staging_bytes())
    throw Error(ErrorKind::kUsage,
                "MULTIRING_STAGING_BYTES is too small for an alltoall of " + std::to_string(size) + " ranks");

  operation.descriptor.key.algorithm = exchange.plans().rules_hash(Collective::kAlltoall);
  if (operation.expected.empty()) publish_room(operation);  // or this rank itself knows more than its room
  exchange.match(call, operation.descriptor, [&] {
    std::memcpy(exchange.staging(exchange.rank()), operation.splits.data(), table_bytes);
    exchange.staged(table_bytes);
  });

  const Rows rows = rows_of_all(exchange);
  require_expected(exchange, call, operation, rows.to_me);
  require_room(exchange, call, [&](int rank) { return rows.to[static_cast<std::size_t>(rank)] * row_bytes; });
  const bool is_offered = any_offers(exchange);
  const bool on_devices = is_offered && exchange.offers().agree(exchange, call, operation);
  // A rank that has what it needs may leave, which those who still copy their arrays would take for a loss.
  if (is_offered && !on_devices) exchange.next(call, [] {});
  std::vector<StagedCopy::Outgoing> outgoing(size);
  const std::byte* next = operation.input;
  for (std::size_t rank = 0; rank < size; ++rank) {
    outgoing[rank] = {next, operation.splits[rank] * row_bytes};
    next += outgoing[rank].bytes;
  }
  const std::vector<StagedCopy::Incoming> incoming = join_rows(operation, rows.to_me, row_bytes);
  const std::size_t longest = rows.longest * row_bytes;
  if (on_devices && operation.descriptor.offers_peers)
    return move_in_peer_memory(exchange, call, operation, outgoing, incoming, longest);
  if (on_devices) return exchange.nccl().run(exchange, call, operation, exchange_calls(outgoing, incoming));
  if (longest == 0) return;
  const CrossingAlgorithm& algorithm =
      exchange.plans().algorithm(exchange.transport(), Collective::kAlltoall, longest * size, Order::kAny);
  if (!algorithm.is_rounds())
    return ClusterCopy(exchange, call, outgoing, incoming).run(rows.longest_here * row_bytes);
  StagedCopy copy(exchange, call, outgoing, longest);
  exchange.next(call, [&] { copy.stage_first(); });
  copy.run(incoming);
}

}  // namespace multiring
