#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "collective/descriptor.h"
#include "collective/strided.h"
#include "device/staging.h"
#include "transport/transport.h"

namespace multiring {

/// Memory for a result whose size is known only after the ranks have compared descriptors. Small while there
/// is none, because every operation has one.
class ResultBuffer {
 public:
  /// Memory for `buffer.bytes`; sets where it lies, unless that is the host.
  using Allocate = std::function<std::shared_ptr<std::byte>(Buffer& buffer)>;

  /// Where memory comes from; plain host memory if this is not called. `allocate` has to stay.
  void allocate_by(const Allocate* allocate) { allocate_ = allocate; }
  void allocate(std::size_t bytes) {
    Buffer buffer{.bytes = bytes};
    std::shared_ptr<std::byte> memory = allocate_ != nullptr ? (*allocate_)(buffer) : host_memory(bytes);
    replace(std::move(memory), buffer);
  }
  /// The result lies in `memory` from now on, which `buffer` describes but for its address.
  void replace(std::shared_ptr<std::byte> memory, const Buffer& buffer) {
    contents_ = std::make_unique<Contents>(Contents{std::move(memory), buffer});
    contents_->buffer.address = contents_->memory.get();
  }
  std::shared_ptr<std::byte> memory() const { return contents_ == nullptr ? nullptr : contents_->memory; }
  std::byte* data() const { return contents_ == nullptr ? nullptr : contents_->buffer.address; }
  std::size_t bytes() const { return contents_ == nullptr ? 0 : contents_->buffer.bytes; }
  Buffer buffer() const { return contents_ == nullptr ? Buffer{} : contents_->buffer; }

 private:
  struct Contents {
    std::shared_ptr<std::byte> memory;
    Buffer buffer;
  };

  static std::shared_ptr<std::byte> host_memory(std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    auto* const made = static_cast<std::byte*>(
        std::aligned_alloc(kLine, (std::max<std::size_t>(bytes, 1) + kLine - 1) / kLine * kLine));
    if (made == nullptr) throw std::bad_alloc();
    return {made, [](std::byte* memory) { std::free(memory); }};
  }

  const Allocate* allocate_ = nullptr;
  std::unique_ptr<Contents> contents_;
};

/// The arrays of an operation that lie on devices: there is one at least. The operation itself runs on host
/// memory in their place (collective/device/device_arrays.h), unless it runs where they lie.
struct DeviceArrays {
  std::shared_ptr<Devices> devices;
  Buffer input;  ///< host memory, as is `output`, where it is not on a device
  Buffer output;
  std::vector<Buffer> pieces;  ///< as many as Operation::pieces, or none
  ResultBuffer::Allocate allocate_result;
  bool stays = false;                ///< nothing is copied: the operation works on the arrays where they lie
  bool in_parts = false;             ///< the operation asks for its input, and gives its output, part by part
  std::size_t returned = 0;          ///< bytes of the output that are on their way back
  std::unique_ptr<Staging> staging;  ///< from when the operation is given to a communicator until it is done
};

/// Whole elements of an array that is not contiguous.
struct Piece {
  const std::byte* input;
  std::byte* output;  ///< may be the input; null: no result wanted
  std::size_t bytes;
};

/// One collective call of one rank: what to do, on which memory, and what came out.
///
/// `descriptor.rows` and `descriptor.key.count` give the extents: allreduce and broadcast see one flat array;
/// reduce_scatter, allgather, alltoall, gather and scatter split or join along rows (axis 0).
struct Operation {
  Descriptor descriptor;
  const std::byte* input = nullptr;
  /// Null: the collective allocates `result` (not for allreduce and broadcast).
  std::byte* output = nullptr;
  std::size_t output_bytes = 0;         ///< room at `output`
  std::vector<Piece> pieces;            ///< the array, where `input` and `output` are null
  std::vector<std::uint64_t> splits;    ///< alltoall: rows for each rank
  std::vector<std::uint64_t> received;  ///< allgather, alltoall, gather: rows that came from each rank
  ResultBuffer result;
  // Kept so that the memory stays mapped while peers use it.
  std::shared_ptr<SymmetricRegion> input_region;
  std::shared_ptr<SymmetricRegion> output_region;
  std::unique_ptr<DeviceArrays> on_devices;  ///< null: all arrays lie in host memory
  std::unique_ptr<StridedArrays> strided;    ///< null: each array is contiguous, or on a device
  /// For an alltoall: rows that this rank expects of each rank; empty: any number.
  std::vector<std::uint64_t> expected;
  bool is_widened = false;  ///< sums are int64 for another dtype (sums/integer_average.h)

  /// Dtype of what is added or moved.
  DType dtype() const { return is_widened ? DType::kInt64 : descriptor.dtype; }
  std::size_t element_size() const { return dtype_size(dtype()); }
  Reduction reduction() const {
    if (is_widened) return {};
    return {descriptor.key.op, descriptor.key.prescale, descriptor.key.postscale};
  }
};

}  // namespace multiring
