#include "collective/gathers.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "collective/cluster/cluster_copy.h"
#include "collective/cluster/plan_run.h"
#include "collective/collectives.h"
#include "collective/device/device_arrays.h"
#include "collective/device/peer_run.h"
#include "collective/kinds.h"

namespace multiring {

void publish_room(Operation& operation) {
  operation.descriptor.room = operation.output == nullptr ? Descriptor::kAllocated : operation.output_bytes;
}

void require_room(const RoundExchange& exchange, const OperationCall& call,
                  const std::function<std::size_t(int rank)>& total_of) {
  const auto is_other = [&](int rank) {
    const std::uint64_t room = exchange.board().of(rank).room;
    return room != Descriptor::kAllocated && room != total_of(rank);
  };
  const int odd = exchange.board().find(is_other);
  if (odd < 0) return;
  const Descriptor& theirs = exchange.board().of(odd);
  exchange.throw_mismatch_of(
      call,
      exchange.name_of(odd) + ": out of " + describe(theirs) + " has " + std::to_string(theirs.room) +
          " bytes where the ranks send " + std::to_string(total_of(odd)) +
          " together; omit out to have it allocated (raised on " + exchange.where(call) + ")",
      [&](int a, int b) { return is_other(a) == is_other(b); });
}

std::vector<StagedCopy::Incoming> join_rows(Operation& operation, const std::vector<std::uint64_t>& rows,
                                            std::size_t row_bytes) {
  operation.received = rows;
  if (operation.output == nullptr) {
    operation.result.allocate(std::accumulate(rows.begin(), rows.end(), std::size_t{0}) * row_bytes);
    operation.output = operation.result.data();
  }
  std::vector<StagedCopy::Incoming> incoming;
  std::byte* next = operation.output;
  for (const std::uint64_t count : rows) {
    incoming.push_back({next, count * row_bytes});
    next += count * row_bytes;
  }
  return incoming;
}

std::vector<nccl::Call> exchange_calls(std::span<const StagedCopy::Outgoing> outgoing,
                                       std::span<const StagedCopy::Incoming> incoming) {
  std::vector<nccl::Call> calls;
  for (std::size_t peer = 0; peer < outgoing.size(); ++peer) {
    const auto& [from, sent] = outgoing[peer];
    const auto& [to, received] = incoming[peer];
    const int rank = static_cast<int>(peer);
    if (sent > 0) calls.push_back({nccl::Function::kSend, from, nullptr, sent, rank});
    if (received > 0) calls.push_back({nccl::Function::kReceive, nullptr, to, received, rank});
  }
  return calls;
}

namespace {

/// Messages go to the root's host only.
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
  std::size_t total = 0;
};

Pieces pieces_of(const Exchange& exchange, const Operation& operation) {
  // key.count is the number of elements in a row.
  const std::size_t row_bytes = operation.descriptor.key.count * operation.element_size();
  Pieces pieces{exchange.board().each(&Descriptor::rows), row_bytes};
  for (const std::uint64_t rows : pieces.rows) {
    pieces.longest = std::max(pieces.longest, rows * row_bytes);
    pieces.total += rows * row_bytes;
  }
  return pieces;
}

/// What both gathers do. Ranks whose own piece would go in rounds stage it in the first round; where the
/// longest piece goes in rounds and others have not staged theirs, all do in another one.
class Gathering {
 public:
  Gathering(Exchange& exchange, const OperationCall& call, Operation& operation, Collective collective)
      : exchange_(exchange),
        call_(call),
        operation_(operation),
        collective_(collective),
        has_array_(traits_of(operation.descriptor).has_array),
        copy_(exchange, call, outgoing_, operation.descriptor.bytes) {}

  /// The longest piece decides on the algorithm, which is not known yet: that of this piece may differ. True:
  /// it runs on devices.
  bool match() {
    operation_.descriptor.key.algorithm = exchange_.plans().rules_hash(collective_);
    const auto stage = [&] {
      if (algorithm(operation_.descriptor.bytes).is_rounds()) stage_first();
    };
    const MatchKey& key = operation_.descriptor.key;
    if (key.kind != OpKind::kGather || key.root == exchange_.rank()) publish_room(operation_);
    return exchange_.offers().match(exchange_, call_, operation_, stage, [&] {
      pieces_ = pieces_of(exchange_, operation_);
      require_room(exchange_, call_, [&](int) { return pieces_.total; });
    });
  }

  const Pieces& pieces() const { return pieces_; }
  const CrossingAlgorithm& algorithm() { return algorithm(pieces_.longest); }

  void run_in_rounds(std::span<const StagedCopy::Incoming> incoming) {
    copy_.set_longest(pieces_.longest);
    const bool all_have_staged = std::ranges::all_of(pieces_.rows, [&](std::uint64_t rows) {
      const std::size_t piece = rows * pieces_.row_bytes;
      return piece == pieces_.longest || algorithm(piece).is_rounds();
    });
    if (!all_have_staged) exchange_.next(call_, [&] { stage_first(); });
    copy_.run(incoming);
  }

 private:
  void stage_first() {
    outgoing_[0] = {operation_.input, operation_.descriptor.bytes};
    copy_.stage_first();
  }
  const CrossingAlgorithm& algorithm(std::size_t piece) {
    return exchange_.plans().algorithm(exchange_.transport(), collective_, has_array_ ? piece : 0,
                                       Order::kAny);
  }

  Exchange& exchange_;
  const OperationCall& call_;
  Operation& operation_;
  const Collective collective_;
  const bool has_array_;
  StagedCopy::Outgoing outgoing_[1];
  StagedCopy copy_;
  Pieces pieces_;
};

/// What NCCL has for pieces of different lengths: a broadcast of each.
std::vector<nccl::Call> calls_of(const Exchange& exchange, const Operation& operation,
                                 const std::vector<StagedCopy::Incoming>& incoming) {
  const std::size_t bytes = operation.descriptor.bytes;
  const auto is_as_long = [&](const StagedCopy::Incoming& piece) { return piece.bytes == bytes; };
  if (std::ranges::all_of(incoming, is_as_long))
    return {{nccl::Function::kAllgather, operation.input, operation.output, bytes}};
  std::vector<nccl::Call> calls;
  for (int rank = 0; rank < exchange.size(); ++rank) {
    const StagedCopy::Incoming& piece = incoming[static_cast<std::size_t>(rank)];
    const void* const input = rank == exchange.rank() ? operation.input : piece.data;
    if (piece.bytes > 0) calls.push_back({nccl::Function::kBroadcast, input, piece.data, piece.bytes, rank});
  }
  return calls;
}

}  // namespace

void allgather(Exchange& exchange, const OperationCall& call, Operation& operation) {
  Gathering gathering(exchange, call, operation, Collective::kAllgather);
  const bool on_devices = gathering.match();
  const std::vector<StagedCopy::Incoming> incoming =
      join_rows(operation, gathering.pieces().rows, gathering.pieces().row_bytes);
  if (on_devices && operation.descriptor.offers_peers) {
    const StagedCopy::Outgoing own[] = {{operation.input, operation.descriptor.bytes}};
    return move_in_peer_memory(exchange, call, operation, own, incoming, gathering.pieces().longest);
  }
  if (on_devices)
    return exchange.nccl().run(exchange, call, operation, calls_of(exchange, operation, incoming));
  const CrossingAlgorithm& algorithm = gathering.algorithm();
  if (algorithm.is_rounds()) return gathering.run_in_rounds(incoming);
  std::vector<Piece> blocks;
  for (const StagedCopy::Incoming& piece : incoming) blocks.push_back({nullptr, piece.data, piece.bytes});
  blocks[static_cast<std::size_t>(exchange.rank())].input = operation.input;
  run_blocks(exchange, call, operation, Collective::kAllgather, blocks, algorithm);
}

void gather(Exchange& exchange, const OperationCall& call, Operation& operation) {
  Gathering gathering(exchange, call, operation, Collective::kGather);
  const bool on_devices = gathering.match();
  const auto& [rows, row_bytes, longest, total] = gathering.pieces();
  const auto root = static_cast<std::size_t>(operation.descriptor.key.root);
  std::vector<StagedCopy::Incoming> incoming(rows.size());
  if (exchange.rank() == operation.descriptor.key.root) incoming = join_rows(operation, rows, row_bytes);
  const StagedCopy::Outgoing own{operation.input, operation.descriptor.bytes};
  if (on_devices && operation.descriptor.offers_peers)
    return move_in_peer_memory(exchange, call, operation, {&own, 1}, incoming, longest);
  if (on_devices) {
    std::vector<StagedCopy::Outgoing> outgoing(rows.size());
    outgoing[root] = own;
    return exchange.nccl().run(exchange, call, operation, exchange_calls(outgoing, incoming));
  }
  if (gathering.algorithm().is_rounds()) return gathering.run_in_rounds(incoming);
  gather_by_messages(exchange, call, operation, incoming, longest);
}

}  // namespace multiring
