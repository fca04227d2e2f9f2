#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "base/export.h"
#include "base/reduction.h"

namespace multiring {

/// The values are part of the C ABI (multiring.h).
enum class OpKind : std::uint8_t {
  kAllreduce = 0,
  kReduceScatter = 1,
  kAllgather = 2,
  kBroadcast = 3,
  kAlltoall = 4,
  kGather = 5,
  kScatter = 6,
  kBarrier = 7,
  kSend = 8,
  kReceive = 9,
  kSplit = 10,
  kAllocate = 11,
};
inline constexpr int kOpKindCount = 12;

MULTIRING_API const char* op_kind_name(OpKind kind);

/// As what the elements of an allreduce of float32 cross from host to host: narrower, they take half of the
/// time there and are rounded (ADR 15).
enum class Wire : std::uint8_t {
  kDefault = 0,  ///< what the communicator says; as what they are, where an operation has no such choice
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
};
inline constexpr int kWireCount = 4;

/// "default", "float32", "float16", "bfloat16".
MULTIRING_API const char* wire_name(Wire wire);
constexpr bool is_rounded(Wire wire) { return wire == Wire::kFloat16 || wire == Wire::kBFloat16; }
/// Of a rounded one.
constexpr DType wire_dtype(Wire wire) { return wire == Wire::kFloat16 ? DType::kFloat16 : DType::kBFloat16; }

/// What has to be equal on all ranks before data moves; fields that an operation does not compare are 0.
struct MatchKey {
  std::uint64_t name_hash = 0;
  std::uint64_t count = 0;  ///< elements in all; of one row where ranks may have different numbers of rows
  double prescale = 0.0;
  double postscale = 0.0;
  /// Asynchronous operations are matched by the order of submission: 1 for the first of the communicator,
  /// ...; 0: a synchronous one.
  std::uint64_t sequence = 0;
  std::int32_t root = -1;
  std::uint32_t fused = 1;  ///< operations fused into this one
  OpKind kind = OpKind::kBarrier;
  std::uint8_t dtype = 0;
  ReduceOp op = ReduceOp::kSum;
  Wire wire = Wire::kDefault;  ///< not the default where an allreduce of float32 is compared
  std::array<std::uint8_t, 4> unused{};
};
static_assert(sizeof(MatchKey) == 56, "compared as bytes: no padding");

/// What one rank asked for, as it lies in the header of a round for all to read. Trivially copyable.
struct MULTIRING_API Descriptor {
  static constexpr int kMaxDims = 8;
  static constexpr std::size_t kNameBytes = 120;

  MatchKey key;
  std::uint64_t round = 0;      ///< round in whose header this lies
  std::uint64_t submitted = 0;  ///< asynchronous operations this rank has submitted so far
  std::uint64_t bytes = 0;      ///< that this rank contributes
  std::uint64_t rows = 0;       ///< this rank's extent along axis 0
  // Where the buffers lie if in symmetric memory (region 0: elsewhere); not compared.
  std::uint64_t input_offset = 0;
  std::uint64_t output_offset = 0;
  std::uint32_t input_region = 0;
  std::uint32_t output_region = 0;
  DType dtype = DType::kUInt8;
  bool asynchronous = false;
  std::uint8_t dims = 0;
  std::array<std::uint64_t, kMaxDims> shape{};
  std::array<char, kNameBytes> name{};  ///< cut if longer; name_hash covers all of it

  void set_name(std::string_view text);
  std::string_view name_view() const;
};

MULTIRING_API std::uint64_t hash_name(std::string_view name);

bool same_key(const MatchKey& a, const MatchKey& b);

/// Whether what another process has written can be a descriptor: every number is in its range. To be asked
/// before anything else is done with it.
MULTIRING_API bool is_plausible(const Descriptor& descriptor);
/// Whether shape and dtype are of as many bytes as a descriptor says.
MULTIRING_API bool is_whole_array(const Descriptor& descriptor);

/// "allreduce 'conv1.weight' sum float32[64, 3, 7, 7]", for messages.
MULTIRING_API std::string describe(const Descriptor& descriptor);

}  // namespace multiring
