// How a wait for messages of several ranks of other hosts ends when none comes.

#include "transport/cluster/remote_messages.h"

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/network/tcp_group.h"
#include "transport/cluster/channels.h"
#include "transport/rounds.h"

namespace multiring {
namespace {

using namespace testing;

constexpr int kSize = 3;

/// Rank 0 waits for ranks 1 and 2. Rank 1 is there and sends nothing.
class RemoteMessagesTest : public ::testing::Test {
 protected:
  TcpOptions options(int rank) const { return tcp_options(rank, kSize, kClusterChannels); }

  void connect_two() {
    const auto links = [](int peer) {
      std::vector<Network::Link> all;
      for (int channel = 0; channel < kClusterChannels; ++channel) all.push_back({peer, channel});
      return all;
    };
    const std::jthread thread([&] { two_->connect(links(0), wait_seconds(20)); });
    zero_.connect(links(2), wait_seconds(20));
  }

  /// Waits as rank 0 while rank 1 makes progress.
  WaitResult wait(AnySource& any) {
    WaitResult result;
    MailboxMemory memory;
    memory.header = [this](int source, int, std::uint64_t) { return headers_[source].data(); };
    memory.payload = memory.header;
    memory.on_written = [](int, std::uint64_t) {};
    memory.on_read = [](int, std::uint64_t) {};
    RemoteMessages messages(zero_, 0, {1, 2}, memory);
    std::exception_ptr raised;
    beside(one_, [&] {
      try {
        result = messages.await_any(any, any.sources(), wait_seconds(20));
      } catch (const Error&) {
        raised = std::current_exception();
      }
    });
    messages.leave();
    if (raised) std::rethrow_exception(raised);
    return result;
  }
  static bool nothing_comes(int, bool) { return true; }
  static bool never() { return false; }

  InprocStore store_;
  std::vector<std::byte> headers_[kSize] = {std::vector<std::byte>(Rounds::kHeaderBytes),
                                            std::vector<std::byte>(Rounds::kHeaderBytes),
                                            std::vector<std::byte>(Rounds::kHeaderBytes)};
  TcpNetwork zero_{store_, options(0)};
  TcpNetwork one_{store_, options(1)};
  std::unique_ptr<TcpNetwork> two_ = std::make_unique<TcpNetwork>(store_, options(2));
};

TEST_F(RemoteMessagesTest, ARankThatDies) {
  connect_two();
  two_.reset();
  AnySource any({1, 2}, {}, never, nothing_comes);
  expect_lost(wait(any), 2, false);
}

TEST_F(RemoteMessagesTest, ARankThatDiesAfterItsMessageWasTold) {
  connect_two();
  two_.reset();
  AnySource any({1, 2}, {}, never, [](int source, bool left) { return source != 2 || !left; });
  expect_lost(wait(any), 2, false);
}

TEST_F(RemoteMessagesTest, ARankThatLeavesIsNotMissed) {
  connect_two();
  two_->leave();
  two_.reset();
  AnySource* noted = nullptr;
  AnySource any({1, 2}, {}, [&] { return noted->has_left(2); }, nothing_comes);
  noted = &any;
  EXPECT_TRUE(wait(any).ok());
}

// It may have left or died: it must not be waited for as long as anybody may take.
TEST_F(RemoteMessagesTest, ARankThatIsGoneBeforeItWasConnected) {
  two_.reset();
  AnySource any({1, 2}, {}, never, nothing_comes);
  const WaitResult result = wait(any);
  expect_lost(result, 2, false);
  EXPECT_TRUE(result.peer_gone);
}

TEST_F(RemoteMessagesTest, ARankThatCannotBeReachedConcernsItsMessagesAlone) {
  two_.reset();
  TcpNetwork two(store_, tcp_options(2, kSize, kClusterChannels + 1));  // other settings
  beside(two, [&] {
    AnySource* noted = nullptr;
    AnySource any({1, 2}, {}, [&] { return noted->is_unreachable(2); }, nothing_comes);
    noted = &any;
    EXPECT_TRUE(wait(any).ok());
    AnySource with_two({1, 2}, {2}, never, nothing_comes);
    error_of(ErrorKind::kUsage, [&] { wait(with_two); }, "other settings");
  });
}

}  // namespace
}  // namespace multiring
