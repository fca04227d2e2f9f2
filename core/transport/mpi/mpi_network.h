#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/export.h"
#include "transport/mpi/control_message.h"
#include "transport/mpi/mpi_session.h"
#include "transport/network.h"

namespace multiring {

struct MpiOptions {
  int rank = 0;
  std::vector<int> members;        ///< ranks of the session, in the order of their ranks here
  std::vector<std::string> hosts;  ///< names of the members' hosts
  int channels = 1;                ///< at most kMpiChannels
  std::string name;                ///< see MpiSession::reserve_tags
};

/// Messages by MPI's point-to-point operations, over any fabric that MPI supports.
///
/// A stream is a tag: MPI keeps the order of messages with the same sender, receiver and tag. MPI connects
/// processes itself. Aborts and goodbyes are messages with a tag of their own, which every rank receives from
/// any.
///
/// **Lost peers.** MPI does not report that a process has ended; launchers (mpirun, srun) end the whole job
/// then. Messages that MPI reports as failed are lost, and the deadline ends the other waits.
///
/// Lock: `mutex_` guards everything; none is taken under it.
class MULTIRING_API MpiNetwork final : public Network {
 public:
  MpiNetwork(std::shared_ptr<MpiSession> session, MpiOptions options);
  /// Waits half a second at most for what MPI has not finished.
  ~MpiNetwork() override;

  int rank() const override { return options_.rank; }
  int size() const override { return static_cast<int>(options_.members.size()); }
  int channels() const override { return options_.channels; }
  std::string host(int rank) override { return options_.hosts[static_cast<std::size_t>(rank)]; }
  void connect(std::span<const Link> links, const WaitOptions& waiting) override;
  Ticket post_send(int peer, int channel, std::span<const std::span<const std::byte>> parts) override;
  Ticket post_receive(int peer, int channel, std::span<std::byte> buffer) override;
  WaitResult wait(std::span<const Ticket> tickets, const WaitOptions& waiting) override;
  WaitResult wait_any(std::span<const Ticket> tickets, const WaitOptions& waiting) override;
  bool done(Ticket ticket) const override;
  void give_up(std::span<const Ticket> tickets) override;
  void progress() override;
  bool outlasts_give_up() const override { return true; }
  void keep(std::shared_ptr<const void> memory) override;
  void abort(const Error& error) override;
  void relay(const AbortRecord& record) override;
  bool aborted(AbortRecord* record) const override;
  /// Waits half a second at most for what MPI has not finished.
  void leave() override;
  void abandon() override { abandoned_.store(true, std::memory_order_release); }
  void wake() override {}  // no wait sleeps for long

 private:
  enum class State : std::uint8_t { kPending, kDone, kLost, kOutOfStep };
  struct Message {
    State state = State::kPending;
    bool is_send = false;
    int peer = 0;
    int channel = 0;
    std::uint64_t sequence = 0;
    std::size_t bytes = 0;
  };
  /// What one end of a link has posted on a channel.
  struct Stream {
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    bool out_of_step = false;
  };
  struct Peer {
    bool connected = false;
    bool left = false;
    bool lost = false;
    StreamCounts posted;  ///< by it, as its goodbye says
    std::array<Stream, kMpiChannels> streams;
  };
  // Owners of requests that do not belong to a message.
  static constexpr Ticket kControl = 0;             // the receive for control messages
  static constexpr Ticket kDiscarded = ~Ticket{0};  // given up, or a control message that was sent
  static constexpr Ticket kCancelled = kDiscarded - 1;
  using Reason = std::array<char, 1024>;

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  std::string named(int rank) const;
  Stream& stream_to_post(int peer, int channel, std::size_t bytes);
  template <class Start>
  Ticket post(Message message, std::uint64_t& counter, const Start& start);
  bool cannot_complete(const Message& message) const;
  /// `tag`: a channel, or kMpiControlTag.
  void own(int tag, const multiring_mpi_request& request, Ticket owner);
  bool has_requests(const std::function<bool(Ticket owner)>& wanted) const;
  bool usable() const;
  void require_usable() const;
  // Under the lock.
  void advance();
  void advance(int tag);
  std::array<bool, kMpiTags> tags_of(std::span<const Ticket> tickets) const;
  void await(std::span<const Ticket> tickets);
  void finish(Ticket owner, const multiring_mpi_completion& completion);
  void finish_message(Ticket ticket, const multiring_mpi_completion& completion);
  void post_control_receive();
  void on_control_message(const ControlMessage& message);
  void fail_pending(int peer);
  bool check_tickets(std::span<const Ticket> tickets, WaitResult* result);
  [[noreturn]] void throw_out_of_step(const Message& message) const;
  void send_control(int peer, const ControlMessage& message);
  std::vector<StreamCounts> posted_counts() const;
  void cancel_receives();
  /// Waits until no request of a `wanted` owner is left, half a second at most.
  void await_requests(const std::function<bool(Ticket)>& wanted);
  void propagate_abort(const AbortRecord& record, int from);
  [[noreturn]] void throw_failed(const char* why) const;

  std::shared_ptr<MpiSession> session_;
  const multiring_mpi& mpi_;
  MpiOptions options_;
  const int tag_;
  mutable std::mutex mutex_;
  std::atomic<bool> abandoned_{false};
  std::vector<Peer> peers_;
  std::unordered_map<Ticket, Message> messages_;
  Ticket next_ticket_ = 1;
  // Requests that MPI has not finished, and their owners, by tag.
  struct Requests {
    std::vector<multiring_mpi_request> all;
    std::vector<Ticket> owners;
  };
  std::array<Requests, kMpiTags> requests_;
  std::vector<multiring_mpi_completion> completions_;
  std::unique_ptr<ControlMessage> control_input_;
  std::vector<std::unique_ptr<ControlMessage>> control_output_;
  std::vector<std::shared_ptr<const void>> kept_;
  std::optional<AbortRecord> abort_;
  bool left_ = false;
};

}  // namespace multiring
