#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/arithmetic/comm_dtype.h"
#include "base/arithmetic/dtype.h"
#include "base/arithmetic/order.h"
#include "base/arithmetic/reduction.h"
#include "base/export.h"

namespace multiring {

/// The values are part of the C ABI (multiring.h); what each needs is in collective/kinds.cpp. First what is
/// part of other calls, then messages, then the collectives, to which a new one is added at the end.
enum class OpKind : std::uint8_t {
  kSplit,
  kAllocate,
  kSend,
  kReceive,
  kAllreduce,
  kReduceScatter,
  kAllgather,
  kBroadcast,
  kAlltoall,
  kGather,
  kScatter,
  kBarrier,
  kCount,  ///< no kind
};
constexpr bool is_collective(OpKind kind) { return kind >= OpKind::kAllreduce && kind < OpKind::kCount; }

/// What has to be equal on all ranks before data moves; fields that an operation does not compare are 0.
struct MatchKey {
  std::uint64_t name_hash = 0;
  std::uint64_t count = 0;  ///< elements in all; of one row where ranks may have different numbers of rows
  double prescale = 0.0;
  double postscale = 0.0;
  /// Asynchronous operations: number in the order of submission, from 1; 0: synchronous.
  std::uint64_t sequence = 0;
  std::int32_t root = -1;
  std::uint32_t fused = 1;  ///< operations fused into this one
  OpKind kind = OpKind::kBarrier;
  std::uint8_t dtype = 0;
  ReduceOp op = ReduceOp::kSum;
  CommDtype comm_dtype = CommDtype::kDefault;  ///< never the default in an allreduce of float32
  Order order = Order::kDefault;               ///< never the default in what reduces
  std::uint8_t unused = 0;
  /// How it crosses hosts: a hash of the algorithm (0: rounds), or where that is not known yet, of what
  /// decides on it (PlanCache::rules_hash).
  std::uint16_t algorithm = 0;
};
static_assert(sizeof(MatchKey) == 56, "compared as bytes: no padding");

/// What one rank asked for, as all ranks read it in the header of a round. Trivially copyable.
struct MULTIRING_API Descriptor {
  static constexpr int kMaxDims = 8;
  static constexpr std::size_t kNameBytes = 120;
  static constexpr std::uint64_t kAllocated = UINT64_MAX;

  MatchKey key;
  std::uint64_t round = 0;      ///< round in whose header this lies
  std::uint64_t submitted = 0;  ///< asynchronous operations this rank has submitted so far
  std::uint64_t bytes = 0;      ///< that this rank contributes
  std::uint64_t rows = 0;       ///< this rank's extent along axis 0
  /// Bytes of the memory that this rank gives for rows of all ranks (OpTraits::Output::kJoined); kAllocated:
  /// it gives none. Compared with what it receives (gathers.h).
  std::uint64_t room = kAllocated;
  // Regions and offsets of buffers in symmetric memory (region 0: other memory); not compared.
  std::uint64_t input_offset = 0;
  std::uint64_t output_offset = 0;
  std::uint32_t input_region = 0;
  std::uint32_t output_region = 0;
  DType dtype = DType::kUInt8;
  bool asynchronous = false;
  std::uint8_t dims = 0;
  /// An operation that shares memory with an earlier one was passed over in this choice. Not compared
  bool held_back = false;
  bool offers_peers = false;  ///< what it offers is peer memory, not NCCL. Not compared
  /// The rank's number of the device on which it offers to work (device_offers.h); negative: it does not. Not
  /// compared.
  std::int8_t offered_device = -1;
  /// Where it offers that: a hash of which bytes of the array lie on the device (0: all). Not compared.
  std::uint64_t offered_division = 0;
  std::array<std::uint64_t, kMaxDims> shape{};
  std::array<char, kNameBytes> name{};  ///< cut if longer; name_hash covers all of it

  void set_name(std::string_view text);
  std::string_view name_view() const;
};

MULTIRING_API std::uint64_t hash_name(std::string_view name);

bool same_key(const MatchKey& a, const MatchKey& b);

/// Whether every number of a descriptor from another process is in its range. To be checked before any use.
MULTIRING_API bool is_plausible(const Descriptor& descriptor);
/// Whether shape and dtype give as many bytes as the descriptor says.
MULTIRING_API bool is_whole_array(const Descriptor& descriptor);

/// Whether it receives what the sender sends, of any dtype and shape.
bool takes_any_array(const Descriptor& descriptor);

/// "allreduce 'conv1.weight' sum float32[64, 3, 7, 7]", "recv from rank 3", for messages.
MULTIRING_API std::string describe(const Descriptor& descriptor);

}  // namespace multiring
