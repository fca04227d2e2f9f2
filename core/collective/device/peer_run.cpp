#include "collective/device/peer_run.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/cache.h"
#include "base/immovable.h"
#include "collective/device/device_arrays.h"
#include "collective/device/peer_buffers.h"
#include "device/peer_kernels.h"

namespace multiring {
namespace {

/// What is done with each segment of `bytes`. All but `combine` may be null.
struct Steps {
  std::function<void(Range)> fill;       ///< this rank's buffer
  std::function<void(Range)> combine;    ///< when all have: reads the buffers of all ranks
  std::function<void(Range)> copy_back;  ///< when all have: reads this rank's buffer alone
  std::function<void()> meanwhile;       ///< once, on the host
};

/// One operation on this rank.
class PeerRun : Immovable {
 public:
  PeerRun(Exchange& exchange, const OperationCall& call, const Operation& operation)
      : exchange_(exchange), call_(call), operation_(operation), buffers_(begin(exchange, operation)) {}

  std::size_t buffer_bytes() const { return buffers_.bytes; }
  std::byte* buffer(std::size_t rank) const { return buffers_.addresses[rank]; }
  std::byte* own_buffer() const { return buffer(static_cast<std::size_t>(exchange_.rank())); }

  /// In segments of `step` bytes; the same on all ranks.
  void run(std::size_t bytes, std::size_t step, const Steps& steps) {
    std::size_t begin = 0;
    do {
      const Range segment{begin, std::min(begin + step, bytes)};
      on_device([&] { steps.fill(segment); });
      if (begin == 0 && steps.meanwhile) steps.meanwhile();
      if (begin == 0) await_part(operation_, Staging::kAll, exchange_, call_);  // for an error that says so
      await_stream();
      exchange_.next(call_, [] {});       // all buffers hold what their ranks contribute
      exchange_.throw_if_aborted(call_);  // a peer that has failed meanwhile may be gone, with its buffer
      on_device([&] { steps.combine(segment); });
      await_stream();
      exchange_.next(call_, [] {});  // no rank but this one works on its buffer
      if (steps.copy_back) on_device([&] { steps.copy_back(segment); });
      begin = segment.end;
    } while (begin < bytes);
    if (steps.copy_back) await_stream(false);
    exchange_.peer_memory().end();
  }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes == 0 || to == from) return;
    const cuda::Driver& driver = buffers_.devices->driver();
    driver.check(driver.copy_on_device(reinterpret_cast<cuda::Pointer>(to),
                                       reinterpret_cast<cuda::Pointer>(from), bytes, buffers_.stream),
                 cuda::on("cuMemcpyDtoDAsync", buffers_.device));
  }

  /// Whether kernels can read and write a part of this rank's arrays where it lies.
  bool is_aligned(const Piece& part) const {
    const auto bits =
        reinterpret_cast<std::uintptr_t>(part.input) | reinterpret_cast<std::uintptr_t>(part.output);
    return bits % operation_.element_size() == 0;
  }

  /// Reduces `own`, and what the others' buffers have from `offset` on, to the output of `own`; `to_all`: and
  /// to these.
  void reduce(std::size_t offset, const Piece& own, bool to_all) {
    if (own.bytes == 0) return;
    const Reduction reduction = operation_.reduction();
    const auto self = static_cast<std::size_t>(exchange_.rank());
    peer::ReduceJob job{};
    for (std::size_t rank = 0; rank < buffers_.addresses.size(); ++rank)
      job.inputs[rank] = job.outputs[rank] = buffer(rank) + offset;
    job.inputs[self] = own.input;
    job.outputs[to_all ? self : 0] = own.output;
    job.count = own.bytes / operation_.element_size();
    job.prescale = reduction.prescale;
    job.postscale = reduction.postscale;
    job.ranks = static_cast<unsigned>(exchange_.size());
    job.written = to_all ? job.ranks : 1;
    job.op = static_cast<unsigned>(reduction.op);
    job.divisor = reduction.op == ReduceOp::kAverage ? job.ranks : 1;
    peer::launch(*buffers_.devices, buffers_.device,
                 buffers_.kernels.at(static_cast<int>(operation_.dtype())), job, buffers_.stream);
  }

 private:
  /// Once for all copies of a segment: a bucket has hundreds of pieces.
  void on_device(const std::function<void()>& work) {
    const Devices::Current current(*buffers_.devices, buffers_.device);
    work();
  }

  static PeerBuffers& begin(Exchange& exchange, const Operation& operation) {
    PeerBuffers& buffers = exchange.peer_memory().begin(operation);
    // Copies that have not been needed read the arrays as long as they run.
    operation.on_devices->staging->order_before(buffers.device, buffers.stream);
    return buffers;
  }

  /// `needs_peers`: which have not done all of their part then.
  void await_stream(bool needs_peers = true) {
    Devices& devices = *buffers_.devices;
    const cuda::Driver& driver = devices.driver();
    cuda::Event done = nullptr;
    {
      const Devices::Current current(devices, buffers_.device);
      done = devices.take_event(buffers_.device);
      driver.check(driver.event_record(done, buffers_.stream), cuda::on("cuEventRecord", buffers_.device));
    }
    const auto is_done = [&] {
      const Devices::Current current(devices, buffers_.device);
      const cuda::Result result = driver.event_query(done);
      if (result != cuda::kNotReady)
        driver.check(result, cuda::on("the work in peer memory", buffers_.device));
      return result != cuda::kNotReady;
    };
    poll(exchange_, call_, is_done, "the device to finish its work in peer memory.", needs_peers);
    devices.release_event(buffers_.device, done);
  }

  Exchange& exchange_;
  const OperationCall& call_;
  const Operation& operation_;
  PeerBuffers& buffers_;
};

}  // namespace

void allreduce_in_peer_memory(Exchange& exchange, const OperationCall& call, const Operation& operation,
                              const PieceList& arrays, const std::function<void()>& meanwhile) {
  PeerRun peers(exchange, call, operation);
  const auto slice_of = [&](Range segment) {
    const Range slice = aligned_block_range(segment.size(), static_cast<std::size_t>(exchange.size()),
                                            static_cast<std::size_t>(exchange.rank()), kCacheLine);
    return Range{segment.begin + slice.begin, segment.begin + slice.end};
  };
  // The rank's own slice is read and written where it is, unless it is of several arrays.
  const auto in_place = [&](Range slice) {
    std::size_t cursor = 0;
    const std::optional<Piece> part = arrays.piece_of(cursor, slice);
    return part && peers.is_aligned(*part) ? part : std::nullopt;
  };
  // Calls copy(piece, offset, place in the buffer, bytes) for what passes through the buffer.
  const auto for_each_copy = [&](Range segment, const auto& copy) {
    const Range slice = slice_of(segment);
    const bool is_whole = !in_place(slice);
    const Range parts[] = {{segment.begin, is_whole ? segment.end : slice.begin},
                           {is_whole ? segment.end : slice.end, segment.end}};
    std::size_t cursor = 0;
    for (const Range part : parts)
      arrays.for_each_share(
          cursor, part, [&](const Piece& piece, std::size_t offset, std::size_t place, std::size_t bytes) {
            copy(piece, offset, part.begin - segment.begin + place, bytes);
          });
  };
  std::byte* const buffer = peers.own_buffer();
  const auto fill = [&](const Piece& piece, std::size_t offset, std::size_t place, std::size_t bytes) {
    peers.copy(buffer + place, piece.input + offset, bytes);
  };
  const auto copy_back = [&](const Piece& piece, std::size_t offset, std::size_t place, std::size_t bytes) {
    peers.copy(piece.output + offset, buffer + place, bytes);
  };
  const auto combine = [&](Range segment) {
    const Range slice = slice_of(segment);
    const std::size_t place = slice.begin - segment.begin;
    peers.reduce(place, in_place(slice).value_or(Piece{buffer + place, buffer + place, slice.size()}), true);
  };
  peers.run(arrays.bytes(), peers.buffer_bytes(),
            {.fill = [&](Range segment) { for_each_copy(segment, fill); },
             .combine = combine,
             .copy_back = [&](Range segment) { for_each_copy(segment, copy_back); },
             .meanwhile = meanwhile});
}

void reduce_scatter_in_peer_memory(Exchange& exchange, const OperationCall& call, const Operation& operation,
                                   std::span<const Range> blocks) {
  PeerRun peers(exchange, call, operation);
  const auto self = static_cast<std::size_t>(exchange.rank());
  const std::size_t longest = blocks[0].size();
  const std::size_t step = blocks.back().end <= peers.buffer_bytes()
                               ? longest
                               : peers.buffer_bytes() / blocks.size() / kCacheLine * kCacheLine;
  std::byte* const buffer = peers.own_buffer();
  // A segment has a part of each block; in the buffer they lie one after the other.
  const auto part_of = [&](std::size_t rank, Range segment) {
    const Range part = intersect({0, blocks[rank].size()}, segment);
    return Range{blocks[rank].begin + part.begin, blocks[rank].begin + part.end};
  };
  const auto place_of = [&](std::size_t rank, Range segment) {
    std::size_t place = 0;
    for (std::size_t before = 0; before < rank; ++before) place += part_of(before, segment).size();
    return place;
  };
  // The rank's own part is read and written where it is.
  const Piece whole{operation.input + blocks[self].begin, operation.output, blocks[self].size()};
  const bool in_place = peers.is_aligned(whole);
  const auto fill = [&](Range segment) {
    for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
      const Range part = part_of(rank, segment);
      if (rank != self || !in_place)
        peers.copy(buffer + place_of(rank, segment), operation.input + part.begin, part.size());
    }
  };
  const auto combine = [&](Range segment) {
    const std::size_t place = place_of(self, segment);
    const Range part = intersect({0, whole.bytes}, segment);
    std::byte* const output = operation.output + part.begin;
    if (in_place) return peers.reduce(place, {whole.input + part.begin, output, part.size()}, false);
    peers.reduce(place, {buffer + place, buffer + place, part.size()}, false);
    peers.copy(output, buffer + place, part.size());
  };
  peers.run(longest, step, {.fill = fill, .combine = combine, .copy_back = {}, .meanwhile = {}});
}

void move_in_peer_memory(Exchange& exchange, const OperationCall& call, const Operation& operation,
                         std::span<const StagedCopy::Outgoing> outgoing,
                         std::span<const StagedCopy::Incoming> incoming, std::size_t longest) {
  PeerRun peers(exchange, call, operation);
  const auto self = static_cast<std::size_t>(exchange.rank());
  // What is for all is one section of a buffer; else there is one for each reader but the rank itself.
  const bool is_for_all = outgoing.size() == 1;
  const std::size_t sections = is_for_all ? 1 : outgoing.size() - 1;
  const std::size_t section = peers.buffer_bytes() / sections / kCacheLine * kCacheLine;
  const auto offset_of = [&](std::size_t reader, std::size_t source) {
    return is_for_all ? 0 : (reader - (reader > source ? 1 : 0)) * section;
  };
  const auto fill = [&](Range segment) {
    for (std::size_t reader = 0; reader < outgoing.size(); ++reader) {
      const Range part = intersect({0, outgoing[reader].bytes}, segment);
      if (is_for_all || reader != self)
        peers.copy(peers.own_buffer() + offset_of(reader, self), outgoing[reader].data + part.begin,
                   part.size());
    }
  };
  const auto combine = [&](Range segment) {
    // Start with the next rank: not all read the same memory at once.
    for (std::size_t step = 1; step <= incoming.size(); ++step) {
      const std::size_t source = (self + step) % incoming.size();
      const Range part = intersect({0, incoming[source].bytes}, segment);
      const std::byte* const from = source == self ? outgoing[is_for_all ? 0 : self].data + part.begin
                                                   : peers.buffer(source) + offset_of(self, source);
      peers.copy(incoming[source].data + part.begin, from, part.size());
    }
  };
  peers.run(longest, section, {.fill = fill, .combine = combine, .copy_back = {}, .meanwhile = {}});
}

}  // namespace multiring
