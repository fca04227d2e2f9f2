#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "base/error.h"
#include "transport/abort_record.h"

namespace multiring {

/// Channels that a network over MPI may have.
inline constexpr int kMpiChannels = 5;
/// Tags of a network: one for each channel, then one for control messages.
inline constexpr int kMpiTags = kMpiChannels + 1;
inline constexpr int kMpiControlTag = kMpiChannels;

/// Messages that the sender has posted on each channel.
struct StreamCounts {
  std::array<std::uint64_t, kMpiChannels> sent{};
  std::array<std::uint64_t, kMpiChannels> received{};
};

/// An abort or a goodbye. Sent as it is in memory: all processes of an MPI job have the same layout.
struct ControlMessage {
  enum class Type : std::uint32_t { kAbort = 1, kGoodbye = 2 };

  Type type = Type::kAbort;
  std::int32_t rank = 0;  ///< the sender
  ErrorKind kind = ErrorKind::kAborted;
  std::int32_t origin = 0;
  StreamCounts counts;  ///< of a goodbye
  // Of an abort: see AbortRecord.
  std::int32_t common = -1;
  std::int32_t odd = -1;
  char operation[AbortRecord::kOperationBytes + 1] = {};
  char tensor[AbortRecord::kTensorBytes + 1] = {};
  char text[1024] = {};
};
static_assert(std::is_trivially_copyable_v<ControlMessage>);

}  // namespace multiring
