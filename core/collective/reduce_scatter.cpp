// Reduce-scatter: rank i keeps block i of the rows (numpy.array_split's rule). Among ranks that share memory
// inputs in symmetric memory are read where they lie; others travel through staging memory, one section a
// block, or across hosts by a plan.

#include <vector>

#include "collective/cluster/plan_run.h"
#include "collective/collectives.h"
#include "collective/device/device_arrays.h"
#include "collective/device/peer_run.h"
#include "collective/staged/staged_copy.h"
#include "collective/sums/integer_average.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

/// Byte ranges of the ranks' blocks.
std::vector<Range> blocks_of(const Operation& operation, int size) {
  const std::size_t rows = operation.descriptor.rows;
  const std::size_t row_bytes = rows > 0 ? operation.descriptor.bytes / rows : 0;
  std::vector<Range> blocks;
  for (int rank = 0; rank < size; ++rank) {
    const Range block = block_range(rows, static_cast<std::size_t>(size), static_cast<std::size_t>(rank));
    blocks.push_back({block.begin * row_bytes, block.end * row_bytes});
  }
  return blocks;
}

void reduce_block(const Operation& operation, const std::vector<const void*>& inputs, std::byte* output,
                  std::size_t bytes) {
  void* const outputs[] = {output};
  reduce(operation.dtype(), operation.reduction(), inputs, outputs, bytes / operation.element_size());
}

/// By the plan of an allreduce, of whose result this rank keeps its block: for many small blocks, which are
/// not worth a message each. That sends twice the necessary bytes; staging memory would send all to every
/// host.
void reduce_whole(Exchange& exchange, const OperationCall& call, const Operation& operation, Range block,
                  const CrossingAlgorithm& algorithm) {
  Operation whole;
  whole.descriptor = operation.descriptor;
  whole.is_widened = operation.is_widened;
  whole.pieces = {{operation.input, nullptr, block.begin},
                  {operation.input + block.begin, operation.output, block.size()},
                  {operation.input + block.end, nullptr, operation.descriptor.bytes - block.end}};
  Operation* const operations[] = {&whole};
  const PieceList pieces(operations);
  allreduce_by_plan(exchange, call, operations, pieces, algorithm);
}

void reduce_across_hosts(Exchange& exchange, const OperationCall& call, const Operation& operation,
                         const std::vector<Range>& blocks, const CrossingAlgorithm& algorithm) {
  const auto self = static_cast<std::size_t>(exchange.rank());
  if (algorithm.kind == CrossingAlgorithm::Kind::kAllreducePlan)
    return reduce_whole(exchange, call, operation, blocks[self], algorithm);
  std::vector<Piece> pieces;
  for (const Range& block : blocks) pieces.push_back({operation.input + block.begin, nullptr, block.size()});
  pieces[self].output = operation.output;
  run_blocks(exchange, call, operation, Collective::kReduceScatter, pieces, algorithm);
}

/// What NCCL has for blocks of different lengths: a reduction of each to its rank.
std::vector<nccl::Call> calls_of(const Operation& operation, const std::vector<Range>& blocks,
                                 std::size_t self) {
  const std::size_t element = operation.element_size();
  if (blocks.front().size() == blocks.back().size())
    return {{nccl::Function::kReduceScatter, operation.input, operation.output, blocks[0].size() / element}};
  std::vector<nccl::Call> calls;
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
    const Range& block = blocks[rank];
    if (block.empty()) continue;
    calls.push_back({nccl::Function::kReduce, operation.input + block.begin,
                     rank == self ? operation.output : nullptr, block.size() / element,
                     static_cast<int>(rank)});
  }
  return calls;
}

}  // namespace

void reduce_scatter(Exchange& exchange, const OperationCall& call, Operation& operation) {
  if (averages_integers(operation.descriptor) && !operation.is_widened)
    return average_integers(exchange, call, operation);
  const auto size = static_cast<std::size_t>(exchange.size());
  const auto self = static_cast<std::size_t>(exchange.rank());
  const Descriptor& descriptor = operation.descriptor;
  const std::vector<Range> blocks = blocks_of(operation, exchange.size());
  std::vector<StagedCopy::Outgoing> outgoing(size);
  StagedCopy staged(exchange, call, outgoing, blocks[0].size());  // block 0 is the longest
  const auto stage_first = [&] {
    for (std::size_t rank = 0; rank < size; ++rank)
      outgoing[rank] = {operation.input + blocks[rank].begin, blocks[rank].size()};
    staged.stage_first();
  };
  operation.received.assign(1, block_range(descriptor.rows, size, self).size());

  const Transport& transport = exchange.transport();
  const CrossingAlgorithm& algorithm = exchange.plans().algorithm(transport, Collective::kReduceScatter,
                                                                  descriptor.bytes, descriptor.key.order);
  const HostChoice& choice = exchange.plans().host_choice(transport, Collective::kReduceScatter);
  const bool may_be_direct = descriptor.bytes >= choice.min_direct;
  operation.descriptor.key.algorithm = algorithm.is_rounds() ? choice.hash() : hash_of(algorithm);
  const auto stage = [&] {
    if (algorithm.is_rounds() && !(may_be_direct && descriptor.input_region != 0)) stage_first();
  };
  const bool on_devices = exchange.offers().match(exchange, call, operation, stage, [&] {
    // Blocks are of rows: (3, 4) is not (4, 3).
    if (!exchange.agreement().same(&Descriptor::rows)) exchange.throw_mismatch(call);
  });
  if (operation.output == nullptr) {
    operation.result.allocate(blocks[self].size());
    operation.output = operation.result.data();
  }
  if (on_devices && operation.descriptor.offers_peers)
    return reduce_scatter_in_peer_memory(exchange, call, operation, blocks);
  if (on_devices) return exchange.nccl().run(exchange, call, operation, calls_of(operation, blocks, self));
  if (algorithm.is_plan()) return reduce_across_hosts(exchange, call, operation, blocks, algorithm);
  std::vector<const void*> inputs(size);
  const SymmetricRanks symmetric =
      may_be_direct ? exchange.agreement().symmetric_ranks(false) : SymmetricRanks::kNone;
  if (symmetric == SymmetricRanks::kAll) {
    exchange.board().locate(*operation.input_region, &Descriptor::input_offset, blocks[self].begin,
                            std::span(inputs));
    reduce_block(operation, inputs, operation.output, blocks[self].size());
    return exchange.next(call, [] {});
  }
  // Ranks with symmetric inputs have not staged anything yet.
  if (symmetric == SymmetricRanks::kSome) exchange.next(call, stage_first);
  staged.for_each_segment([&](std::size_t segment) {
    const Range range = staged.range_of(blocks[self].size(), segment);
    for (int rank = 0; rank < exchange.size(); ++rank)
      inputs[static_cast<std::size_t>(rank)] = staged.staged_by(rank, segment);
    if (!range.empty()) reduce_block(operation, inputs, operation.output + range.begin, range.size());
  });
}

}  // namespace multiring
