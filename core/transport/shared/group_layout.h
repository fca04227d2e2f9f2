#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/cache.h"
#include "transport/abort_record.h"
#include "transport/mailboxes.h"
#include "transport/rounds.h"
#include "transport/shared/wait_point.h"

namespace multiring {

// The shared block of a transport, in this order. All parts start on 128-byte boundaries, so that two ranks
// never write to the same cache line, or to one and the line that the processor prefetches with it.
//
//   GroupControl | RankState[size] | headers[size][2] | mailboxes[size][size] | staging[size][2]
//
// A zero-filled block is a valid initial state.

struct GroupControl {
  WaitPoint rounds;                                       ///< where ranks sleep for a round
  alignas(128) std::atomic<std::uint32_t> abort_claimed;  ///< 1: a rank writes the record
  std::atomic<std::uint32_t> abort_published;             ///< 1: the record below is complete
  std::uint8_t abort_kind;
  std::int32_t abort_origin;
  std::int32_t abort_common;
  std::int32_t abort_odd;
  char abort_operation[AbortRecord::kOperationBytes + 1];
  char abort_tensor[AbortRecord::kTensorBytes + 1];
  char abort_message[4096];
};

/// Read by all ranks, and written by one, except remote_arrival.
struct RankState {
  alignas(128) std::atomic<std::uint64_t> arrived;
  alignas(128) std::atomic<std::uint32_t> left;
  std::atomic<std::uint64_t> remote_arrival;  ///< the last round that other ranks report it to have reached
  WaitPoint mailboxes;  ///< where this rank sleeps for its mailboxes; notified by its peers
};

struct MailboxState {
  alignas(128) std::atomic<std::uint64_t> written;  ///< by the source
  alignas(128) std::atomic<std::uint64_t> read;     ///< by the destination
};

/// Offsets of the parts in the block.
struct GroupLayout {
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kMailboxChunkBytes = 64 * 1024;

  GroupLayout(int ranks, std::size_t staging)
      : size(static_cast<std::size_t>(ranks)), staging_bytes(staging) {
    states = round_up(sizeof(GroupControl), kPage);
    headers = round_up(states + size * sizeof(RankState), kPage);
    mailboxes = round_up(headers + size * 2 * Rounds::kHeaderBytes, kPage);
    staging_begin = round_up(mailboxes + size * size * mailbox_stride(), kPage);
    bytes = staging_begin + size * 2 * staging_stride();
  }

  static constexpr std::size_t mailbox_stride() {
    return round_up(
        sizeof(MailboxState) + Mailboxes::kMailboxChunks * (Rounds::kHeaderBytes + kMailboxChunkBytes),
        kPage);
  }
  std::size_t staging_stride() const { return round_up(staging_bytes, kPage); }

  std::size_t size;
  std::size_t staging_bytes;
  std::size_t states;
  std::size_t headers;
  std::size_t mailboxes;
  std::size_t staging_begin;
  std::size_t bytes;
};

}  // namespace multiring
