// Reduce-scatter among ranks that share memory: rank i keeps block i of the rows (numpy.array_split's rule).
// Inputs in symmetric memory are read where they lie; others travel through staging memory, one lane a block.

#include "collective/cluster/reduce_scatter.h"

#include <cstring>
#include <vector>

#include "collective/cluster/allreduce.h"
#include "collective/cluster/copy.h"
#include "collective/collectives.h"
#include "collective/sums/integer_average.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

constexpr std::size_t kDirectFrom = 16 * 1024;

bool all_symmetric(const Exchange& exchange) {
  for (int rank = 0; rank < exchange.size(); ++rank) {
    const std::uint32_t region = exchange.descriptor(rank).input_region;
    if (region == 0 || region != exchange.descriptor(0).input_region) return false;
  }
  return true;
}

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
void reduce_by_plan(Exchange& exchange, const OperationCall& call, const Operation& operation, Range block) {
  Operation whole;
  whole.descriptor = operation.descriptor;
  whole.is_widened = operation.is_widened;
  whole.pieces = {{operation.input, nullptr, block.begin},
                  {operation.input + block.begin, operation.output, block.size()},
                  {operation.input + block.end, nullptr, operation.descriptor.bytes - block.end}};
  Operation* const operations[] = {&whole};
  const PieceList pieces(operations);
  ClusterAllreduce(exchange, call, operations, pieces, *exchange.transport().hierarchy()).run();
}

void reduce_across_hosts(Exchange& exchange, const OperationCall& call, const Operation& operation,
                         const std::vector<Range>& blocks) {
  // Block 0 is the longest.
  if (worth_messages(exchange.transport(), operation.descriptor.bytes, blocks[0].size()))
    return ClusterReduceScatter(exchange, call, operation, blocks).run();
  reduce_by_plan(exchange, call, operation, blocks[static_cast<std::size_t>(exchange.rank())]);
}

}  // namespace

void reduce_scatter(Exchange& exchange, const OperationCall& call, Operation& operation) {
  if (averages_integers(operation.descriptor) && !operation.is_widened)
    return average_integers(exchange, call, operation, reduce_scatter);
  const auto size = static_cast<std::size_t>(exchange.size());
  const auto self = static_cast<std::size_t>(exchange.rank());
  const std::vector<Range> blocks = blocks_of(operation, exchange.size());
  const std::size_t lane_bytes = exchange.transport().staging_bytes() / size / 64 * 64;
  if (lane_bytes == 0)
    throw Error(ErrorKind::kUsage,
                "MULTIRING_STAGING_BYTES is too small for " + std::to_string(size) + " ranks");
  operation.received.assign(1, block_range(operation.descriptor.rows, size, self).size());
  if (operation.output == nullptr) {
    operation.result.allocate(blocks[self].size());
    operation.output = operation.result.data();
  }
  const auto fill = [&](std::size_t segment) {
    for (std::size_t rank = 0; rank < size; ++rank) {
      const Range range = segment_range(blocks[rank].size(), lane_bytes, segment);
      if (range.empty()) continue;
      std::memcpy(exchange.staging(exchange.rank()) + rank * lane_bytes,
                  operation.input + blocks[rank].begin + range.begin, range.size());
      exchange.staged(rank * lane_bytes + range.size());
    }
  };
  std::vector<const void*> inputs(size);

  const bool want_direct = operation.descriptor.bytes > kDirectFrom && operation.descriptor.input_region != 0;
  exchange.begin(operation.descriptor);
  const bool across =
      worth_messages(exchange.transport(), operation.descriptor.bytes, operation.descriptor.bytes);
  if (!want_direct && !across) fill(0);
  exchange.synchronise(call);
  exchange.require_match(call);
  for (int rank = 0; rank < exchange.size(); ++rank)  // blocks are of rows: (3, 4) is not (4, 3)
    if (exchange.descriptor(rank).rows != operation.descriptor.rows) exchange.throw_mismatch(call);
  if (across) return reduce_across_hosts(exchange, call, operation, blocks);
  if (operation.descriptor.bytes > kDirectFrom && all_symmetric(exchange)) {
    for (std::size_t rank = 0; rank < size; ++rank)
      inputs[rank] = operation.input_region->part(static_cast<int>(rank)) +
                     exchange.descriptor(static_cast<int>(rank)).input_offset + blocks[self].begin;
    reduce_block(operation, inputs, operation.output, blocks[self].size());
    exchange.begin(call.descriptor);
    return exchange.synchronise_again(call);
  }
  if (operation.descriptor.bytes > kDirectFrom) {  // ranks with symmetric inputs have not staged anything yet
    exchange.begin(call.descriptor);
    fill(0);
    exchange.synchronise_again(call);
  }
  const std::size_t segments = segment_count(blocks[0].size(), lane_bytes);  // block 0 is the longest
  for (std::size_t segment = 0; segment < segments; ++segment) {
    const Range range = segment_range(blocks[self].size(), lane_bytes, segment);
    for (std::size_t rank = 0; rank < size; ++rank)
      inputs[rank] = exchange.staging(static_cast<int>(rank)) + self * lane_bytes;
    if (!range.empty()) reduce_block(operation, inputs, operation.output + range.begin, range.size());
    if (segment + 1 == segments) break;
    exchange.begin(call.descriptor);
    fill(segment + 1);
    exchange.synchronise_again(call);
  }
}

}  // namespace multiring
