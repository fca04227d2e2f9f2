#pragma once

#include <cstdint>

#include "base/export.h"
#include "collective/descriptor.h"

namespace multiring {

class Exchange;
struct Operation;
struct OperationCall;

/// What is known of a kind of operation before it runs. The one table of kinds, in kinds.cpp, feeds
/// validation, messages, the C ABI, the bindings and the native code of adapters.
struct OpTraits {
  /// What has to be the same on all ranks.
  enum class Compared : std::uint8_t {
    kElements,  ///< number of elements and dtype
    kRow,       ///< elements of a row and dtype: ranks may have different numbers of rows
    kNothing,   ///< there is no array, or one rank alone knows it
  };
  /// Size of the result. The values are part of the C ABI (mr_output).
  enum class Output : std::uint8_t {
    kNone = 0,
    kSame = 1,    ///< as the input (for a receive: as the descriptor says); the caller has to give memory
    kBlock = 2,   ///< this rank's share of the rows
    kJoined = 3,  ///< the rows that come from all ranks
  };
  /// Where the output may lie.
  enum class Overlap : std::uint8_t {
    kAny,       ///< for example where the input is in a gathered result
    kWhole,     ///< in the input itself, or apart from it
    kDisjoint,  ///< apart from it: it would be read after it was written
  };

  const char* name;
  /// Null for point-to-point messages, which PointToPoint runs.
  void (*run)(Exchange& exchange, const OperationCall& call, Operation& operation);
  Compared compared;
  Output output;
  Overlap overlap = Overlap::kAny;
  bool needs_input = false;  ///< on every rank
  bool has_root = false;     ///< or a peer
  bool reduces = false;      ///< has a reduction, and reads symmetric memory directly
  bool has_array = true;
};

MULTIRING_API const OpTraits& traits_of(OpKind kind);
inline const OpTraits& traits_of(const Descriptor& descriptor) { return traits_of(descriptor.key.kind); }

/// Whether the dtype that is sent between hosts can be chosen.
constexpr bool has_comm_dtype(const Descriptor& descriptor) {
  return descriptor.key.kind == OpKind::kAllreduce && descriptor.dtype == DType::kFloat32;
}

/// Sets rows, bytes and what is compared of them, as kind, dtype and shape of `descriptor` say.
MULTIRING_API void set_extents(Descriptor& descriptor);

}  // namespace multiring
