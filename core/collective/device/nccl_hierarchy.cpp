#include "collective/device/nccl_hierarchy.h"

#include <memory>
#include <span>
#include <vector>

#include "collective/cluster/plan_run.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {
namespace {

/// The pieces of an array, as one sequence of elements, of which each rank of the host
/// has a share.
class Shares {
 public:
  Shares(std::span<const Piece> pieces, std::size_t element, int ranks, int own)
      : element_(element), ranks_(static_cast<std::size_t>(ranks)), own_(static_cast<std::size_t>(own)) {
    for (const Piece& piece : pieces)
      if (piece.bytes > 0) pieces_.push_back(piece);
    for (const Piece& piece : pieces_) count_ += piece.bytes / element_;
  }

  std::size_t own_bytes() const { return share(own_).size() * element_; }

  /// Calls body(piece) for what this rank's share has of each piece.
  template <class Body>
  void for_each_of_own(const Body& body) const {
    for_each_part(own_, body);
  }
  /// What NCCL has for shares of different lengths: a reduction of each to its rank.
  std::vector<nccl::Call> reduce_calls() const {
    if (is_even())
      return {{nccl::Function::kReduceScatter, pieces_[0].input, own_begin(), share(own_).size()}};
    std::vector<nccl::Call> calls;
    for (std::size_t rank = 0; rank < ranks_; ++rank)
      for_each_part(rank, [&](const Piece& part) {
        calls.push_back({nccl::Function::kReduce, part.input, rank == own_ ? part.output : nullptr,
                         part.bytes / element_, static_cast<int>(rank)});
      });
    return calls;
  }
  std::vector<nccl::Call> return_calls() const {
    if (is_even()) return {{nccl::Function::kAllgather, own_begin(), pieces_[0].output, share(own_).size()}};
    std::vector<nccl::Call> calls;
    for (std::size_t rank = 0; rank < ranks_; ++rank)
      for_each_part(rank, [&](const Piece& part) {
        calls.push_back({nccl::Function::kBroadcast, part.output, part.output, part.bytes / element_,
                         static_cast<int>(rank)});
      });
    return calls;
  }

 private:
  bool is_even() const { return pieces_.size() == 1 && count_ % ranks_ == 0; }
  Range share(std::size_t rank) const { return block_range(count_, ranks_, rank); }
  std::byte* own_begin() const { return pieces_[0].output + share(own_).begin * element_; }

  template <class Body>
  void for_each_part(std::size_t rank, const Body& body) const {
    const Range wanted = {share(rank).begin * element_, share(rank).end * element_};
    std::size_t begin = 0;
    for (const Piece& piece : pieces_) {
      const Range part = intersect({begin, begin + piece.bytes}, wanted);
      if (!part.empty()) {
        const std::size_t offset = part.begin - begin;
        body(Piece{piece.input + offset, piece.output + offset, part.size()});
      }
      begin += piece.bytes;
    }
  }

  const std::size_t element_;
  const std::size_t ranks_;
  const std::size_t own_;
  std::vector<Piece> pieces_;
  std::size_t count_ = 0;
};

}  // namespace

void hierarchical_allreduce(Exchange& exchange, const OperationCall& call, const Operation& operation,
                            std::span<const Piece> pieces, const Mode& mode,
                            const std::function<void()>& meanwhile) {
  NcclGroups& nccl = exchange.nccl();
  nccl::Communicator& comm = nccl.communicator();
  Devices& devices = comm.devices();
  const Shares shares(pieces, operation.element_size(), comm.size(), comm.rank());
  const std::shared_ptr<std::byte> memory = devices.pinned(comm.device(), shares.own_bytes());
  nccl.keep(memory);

  nccl.begin(exchange, call, operation, shares.reduce_calls());
  std::byte* at = memory.get();
  shares.for_each_of_own([&](const Piece& part) {
    const Devices::Current current(devices, comm.device());
    devices.driver().check(devices.driver().copy_to_host(at, reinterpret_cast<cuda::Pointer>(part.output),
                                                         part.bytes, comm.stream()),
                           cuda::on("cuMemcpyDtoHAsync", comm.device()));
    at += part.bytes;
  });
  meanwhile();
  nccl.await_inputs(exchange, call, operation);
  nccl.await(exchange, call);

  allreduce_across_hosts(exchange, call, operation, memory.get(), shares.own_bytes(), mode);

  at = memory.get();
  shares.for_each_of_own([&](const Piece& part) {
    const Devices::Current current(devices, comm.device());
    devices.driver().check(devices.driver().copy_to_device(reinterpret_cast<cuda::Pointer>(part.output), at,
                                                           part.bytes, comm.stream()),
                           cuda::on("cuMemcpyHtoDAsync", comm.device()));
    at += part.bytes;
  });
  nccl.begin(exchange, call, operation, shares.return_calls());
  nccl.await(exchange, call);
  nccl.finish(exchange, call);
}

}  // namespace multiring
