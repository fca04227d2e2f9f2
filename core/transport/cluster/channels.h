#pragma once

namespace multiring {

/// What the one network of a group carries, each on a channel of its own.
enum NetworkChannel : int {
  kRounds,  ///< what ranks publish in rounds
  kGossip,  ///< who has reached the round, where rounds pass from host to host
  kPlans,   ///< messages of collectives that follow a plan
  kChunks,  ///< of point-to-point messages
  kAcks,    ///< which chunks have been read
};
inline constexpr int kClusterChannels = 5;

}  // namespace multiring
