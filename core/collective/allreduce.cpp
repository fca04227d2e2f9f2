// One allreduce, from what each rank has to the sum of all, told once: the other files of collective/ tell
// their own part and point here.
//
// The nouns, for N ranks:
//   operation   what one call asks for: `count` elements of a dtype at `input`, whose reduction over all
//               ranks goes to `output`. They lie in one piece, or in many, as a list of gradients does
//               (sums/piece_list.h).
//   descriptor  the operation in fewer than 500 bytes and without addresses: kind, dtype, count, reduction,
//               algorithm, and where in symmetric memory its buffers lie.
//   round       a step that all ranks take together (agreement/round_exchange.h). A rank publishes a
//               descriptor, writes its staging memory, arrives, and waits until all have arrived. What it
//               reads of the peers then stays as it is until it arrives at the next round; so each rank has
//               two staging memories, which it uses in turn, and a round costs one synchronisation.
//   segment     as many bytes as pass through staging memory at once. S segments are the bytes of the
//               operation divided by those of staging memory, rounded up.
//   slice       the part of a segment that one rank adds. The N slices of a segment are cut at cache lines,
//               so that two ranks never write to one line; they differ by one line at most, and the last may
//               be empty.
//   plan        how elements cross hosts, as messages between ranks (topology/plan.h).
//
// What happens:
//   1. Every rank looks the algorithm up in the table (plan/algorithm_table.h), by bytes, order of additions,
//      ranks and hosts. All know the same of these and have agreed on the costs, so all choose the same.
//   2. The first round compares the descriptors, and with them the choice. Ranks stage their first segment in
//      the same round, before they know whether they match: what is small needs no other.
//   3. One of these runs:
//        rounds   Every rank stages everything and adds everything: S rounds, the first of which is that of
//                 step 2, and N inputs read by each rank. This is for what is small, and for ranks without
//                 common memory.
//        direct   All buffers lie in symmetric memory. Rank i adds slice i of all N inputs and writes the sum
//                 to all N outputs, without a copy. Two rounds: after that of step 2 inputs may be read,
//                 after the other outputs are whole.
//        staged   Rank i adds slice i of each segment in the staging memories of all
//                 (staged/staged_allreduce.h). A segment is staged in round k, added in round k + 1, and its
//                 sums are taken in round k + 2, in which the segment after the next is staged in their
//                 place. So S + 1 rounds, the first of which is that of step 2; the last sums are taken
//                 behind the last round.
//        planned  Across hosts: the ranks of a host add one share each of what their host has, the shares
//                 cross as the plan says, and the sums come back (cluster/plan_run.h). Segments overlap.
//        nccl     In any order, where all arrays lie on devices and all ranks agree to reduce there:
//                 device/nccl_groups.h, and across hosts device/nccl_hierarchy.h.
//        peers    The same in the canonical order within a host, by kernels of our own: device/peer_run.h.
//
// Which bits come out: unless any order is allowed, every algorithm adds in the canonical order
// (base/arithmetic/reduction.h), and rounds the same sums with a half-precision comm_dtype. So they depend on
// the inputs and on N, and not on sizes, places or the algorithm.

#include <algorithm>

#include "base/cache.h"
#include "collective/cluster/plan_run.h"
#include "collective/collectives.h"
#include "collective/device/device_arrays.h"
#include "collective/device/nccl_hierarchy.h"
#include "collective/device/peer_run.h"
#include "collective/staged/staged_allreduce.h"
#include "collective/sums/integer_average.h"
#include "collective/sums/rank_pointers.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

CrossingAlgorithm algorithm_of(Exchange& exchange, const Descriptor& descriptor) {
  const Transport& transport = exchange.transport();
  const bool rounded = is_rounded(descriptor.key.comm_dtype);
  const Order order = descriptor.key.order;
  // Chains would round other sums of each chunk.
  if (rounded && order != Order::kAny && !transport.fully_linked()) return {CrossingAlgorithm::Kind::kRounds};
  return exchange.plans().algorithm(transport, Collective::kAllreduce, descriptor.bytes, order, rounded);
}

/// What ranks compare of it.
std::uint16_t compared_hash(Exchange& exchange, const CrossingAlgorithm& algorithm) {
  if (algorithm.is_plan()) return hash_of(algorithm);
  return exchange.plans().host_choice(exchange.transport(), Collective::kAllreduce).hash();
}

void reduce_direct(Exchange& exchange, const OperationCall& call, const Operation& operation) {
  const auto size = static_cast<std::size_t>(exchange.size());
  const std::size_t element = operation.element_size();
  const Range slice = aligned_block_range(operation.descriptor.key.count, size,
                                          static_cast<std::size_t>(exchange.rank()), kCacheLine / element);
  RankPointers<const void*> inputs(exchange.size());
  RankPointers<void*> outputs(exchange.size());
  const std::size_t begin = slice.begin * element;
  exchange.board().locate(*operation.input_region, &Descriptor::input_offset, begin, inputs.all());
  exchange.board().locate(*operation.output_region, &Descriptor::output_offset, begin, outputs.all());
  reduce(operation.dtype(), operation.reduction(), inputs.all(), outputs.all(), slice.size());
  exchange.next(call, [] {});
}

void reduce_alone(const Operation& operation) {
  const auto reduce_piece = [&](const Piece& piece) {
    const void* const inputs[] = {piece.input};
    void* const outputs[] = {piece.output};
    reduce(operation.dtype(), operation.reduction(), inputs, outputs, piece.bytes / operation.element_size());
  };
  if (operation.pieces.empty()) reduce_piece({operation.input, operation.output, operation.descriptor.bytes});
  for (const Piece& piece : operation.pieces) reduce_piece(piece);
}

/// One operation, or several of the same reduction; `descriptor` is that of all together.
void reduce_together(Exchange& exchange, const OperationCall& call, Descriptor descriptor,
                     std::span<Operation* const> operations) {
  if (const CrossingAlgorithm algorithm = algorithm_of(exchange, descriptor); algorithm.is_plan()) {
    descriptor.key.algorithm = hash_of(algorithm);
    exchange.match(call, descriptor);
    const PieceList pieces(operations);
    return allreduce_by_plan(exchange, call, operations, pieces, algorithm);
  }
  const HostChoice& choice = exchange.plans().host_choice(exchange.transport(), Collective::kAllreduce);
  descriptor.key.algorithm = choice.hash();
  StagedAllreduce staged(exchange, call, operations, descriptor.bytes <= choice.max_rounds);
  const bool large = descriptor.bytes >= choice.min_direct;
  const bool want_direct = large && descriptor.input_region != 0 && descriptor.output_region != 0;
  exchange.match(call, descriptor, [&] {
    if (!want_direct) staged.stage_first();
  });
  const SymmetricRanks symmetric = large ? exchange.agreement().symmetric_ranks(true) : SymmetricRanks::kNone;
  if (symmetric == SymmetricRanks::kAll) {
    exchange.throw_if_aborted(call);  // do not write into buffers of a peer that has failed meanwhile
    return reduce_direct(exchange, call, *operations[0]);
  }
  // Those with symmetric buffers, or that have offered to work on devices, have not staged anything yet.
  if (symmetric == SymmetricRanks::kSome || any_offers(exchange))
    exchange.next(call, [&] { staged.stage_first(); });
  staged.run();
}

/// Those pieces of an array that lie on the device, or those that do not; they are the same on all ranks. An
/// array that is not in pieces is one piece on the device.
Operation part_of(const Operation& operation, bool on_device) {
  Operation part;
  part.descriptor = operation.descriptor;
  if (operation.pieces.empty() && on_device)
    part.pieces = {{operation.input, operation.output, operation.descriptor.bytes}};
  for (std::size_t i = 0; i < operation.pieces.size(); ++i) {
    const Buffer& piece = operation.on_devices->pieces[i];
    if (piece.on_device() != on_device) continue;
    // What the operation itself names may be a copy in host memory.
    part.pieces.push_back(on_device ? Piece{piece.address, piece.address, piece.bytes} : operation.pieces[i]);
  }
  return part;
}

/// On the host, when ranks have been matched and have staged nothing. `algorithm`: what they have compared.
void reduce_matched(Exchange& exchange, const OperationCall& call, Operation& operation,
                    const CrossingAlgorithm& algorithm) {
  Operation* const operations[] = {&operation};
  const PieceList pieces(operations);
  if (pieces.bytes() == 0) return;
  if (algorithm.is_plan()) return allreduce_by_plan(exchange, call, operations, pieces, algorithm);
  const HostChoice& choice = exchange.plans().host_choice(exchange.transport(), Collective::kAllreduce);
  StagedAllreduce staged(exchange, call, operations, pieces.bytes() <= choice.max_rounds);
  exchange.next(call, [&] { staged.stage_first(); });
  staged.run();
}

std::vector<nccl::Call> calls_of(const Operation& operation) {
  std::vector<nccl::Call> calls;
  for (const Piece& piece : operation.pieces)
    if (piece.bytes > 0)
      calls.push_back(
          {nccl::Function::kAllreduce, piece.input, piece.output, piece.bytes / operation.element_size()});
  return calls;
}

/// All ranks have agreed to.
void reduce_where_it_lies(Exchange& exchange, const OperationCall& call, Operation& operation,
                          const CrossingAlgorithm& algorithm) {
  Operation part = part_of(operation, true);
  const auto meanwhile = [&] {
    Operation rest = part_of(operation, false);
    if (!rest.pieces.empty()) reduce_matched(exchange, call, rest, algorithm);
  };
  if (operation.descriptor.offers_peers) {
    Operation* const parts[] = {&part};
    return allreduce_in_peer_memory(exchange, call, operation, PieceList(parts), meanwhile);
  }
  if (exchange.nccl().is_hierarchical(exchange))
    return hierarchical_allreduce(exchange, call, operation, part.pieces, algorithm.mode, meanwhile);
  exchange.nccl().run(exchange, call, operation, calls_of(part), meanwhile);
}

/// Of a rank that offers to reduce where its array lies: so if all do and it can be, else as the others do.
void reduce_on_devices(Exchange& exchange, const OperationCall& call, Operation& operation) {
  Descriptor descriptor = operation.descriptor;
  const CrossingAlgorithm algorithm = algorithm_of(exchange, descriptor);
  descriptor.key.algorithm = compared_hash(exchange, algorithm);
  exchange.match(call, descriptor);
  if (exchange.offers().agree(exchange, call, operation))
    return reduce_where_it_lies(exchange, call, operation, algorithm);
  reduce_matched(exchange, call, operation, algorithm);
}

}  // namespace

void allreduce(Exchange& exchange, const OperationCall& call, Operation& operation) {
  if (averages_integers(operation.descriptor) && !operation.is_widened)
    return average_integers(exchange, call, operation);
  if (exchange.size() == 1) return reduce_alone(operation);
  if (operation.descriptor.offered_device >= 0) return reduce_on_devices(exchange, call, operation);
  Operation* const operations[] = {&operation};
  reduce_together(exchange, call, operation.descriptor, operations);
}

void fused_allreduce(Exchange& exchange, const OperationCall& call, std::span<Operation* const> operations) {
  reduce_together(exchange, call, call.descriptor, operations);
}

Descriptor fused_descriptor(std::span<Operation* const> operations) {
  Descriptor fused = operations[0]->descriptor;
  fused.key.fused = static_cast<std::uint32_t>(operations.size());
  fused.input_region = fused.output_region = 0;
  std::string names;
  std::uint64_t count = 0;
  std::uint64_t hash = 0;
  for (const Operation* operation : operations) {
    const Descriptor& one = operation->descriptor;
    names += (names.empty() ? "" : ", ") + std::string(one.name_view()) + "[" +
             std::to_string(one.key.count) + "]";
    // With the sequence: unnamed ones of the same count must not match each other.
    hash =
        ((hash ^ one.key.name_hash) * 0x100000001b3ULL ^ one.key.sequence) * 0x100000001b3ULL + one.key.count;
    count += one.key.count;
  }
  fused.set_name(names);
  fused.key.name_hash = hash;
  fused.key.count = count;
  fused.bytes = count * operations[0]->element_size();
  fused.dims = 1;
  fused.shape[0] = count;
  return fused;
}

}  // namespace multiring
