// Peers that know the secret and send over TCP what they should not.

#include <string>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/network/raw_peer.h"
#include "support/network/tcp_group.h"
#include "transport/tcp/connections/frame.h"

namespace multiring {
namespace {

using namespace testing;

constexpr int kControl = tcp::ConnectionInfo::kControl;

/// Rank 0, and in place of rank 1 a process that knows the secret.
class TcpFrames : public ::testing::Test {
 protected:
  TcpFrames() {
    const std::jthread caller([&] {
      EXPECT_TRUE(control.introduce(options, facts_of_rank_1(options, kControl)));
      EXPECT_TRUE(data[0].introduce(options, facts_of_rank_1(options, 0, 0, 2)));
      EXPECT_TRUE(data[1].introduce(options, facts_of_rank_1(options, 0, 1, 2)));
    });
    network.connect(all_links(network), wait_seconds(20));
  }
  static void say_frame(RawPeer& peer, const tcp::FrameHeader& header, std::size_t payload) {
    peer.say(tcp::encode_frame_header(header));
    peer.say(pattern(payload, 1));
  }
  /// Waits for a message of 100 bytes.
  WaitResult wait() { return wait_until_it_fails(network, 1); }
  void expect_aborted(ErrorKind kind, const std::string& fragment) {
    EXPECT_EQ(wait().outcome, Outcome::kAborted);
    expect_text(abort_of(network, kind, 0).message, "rank 1 on 127.0.0.1 " + fragment);
  }

  TcpOptions options = tcp_options(0, 2);
  InprocStore store;
  TcpNetwork network{store, options};
  RawPeer control{network};
  RawPeer data[2] = {RawPeer(network), RawPeer(network)};
};

constexpr tcp::FrameKind kData = tcp::FrameKind::kData;

TEST_F(TcpFrames, PartsComeInAnyOrder) {
  say_frame(data[1], {kData, 0, 1, 100, 60, 40}, 40);
  say_frame(data[0], {kData, 0, 1, 100, 0, 60}, 60);
  EXPECT_TRUE(wait().ok());
}

TEST_F(TcpFrames, GarbageAborts) {
  data[0].say(std::string(1000, 'x'));
  expect_aborted(ErrorKind::kInternal, "sent something other than a frame");
}

TEST_F(TcpFrames, FramesOfAnotherChannelAbort) {
  say_frame(data[0], {kData, 1, 1, 100, 0, 100}, 100);
  expect_aborted(ErrorKind::kInternal, "sent something other than a frame of the message");
}

TEST_F(TcpFrames, PartsThatOverlapAbort) {
  say_frame(data[0], {kData, 0, 1, 100, 0, 60}, 60);
  say_frame(data[1], {kData, 0, 1, 100, 59, 41}, 41);
  expect_aborted(ErrorKind::kInternal, "sent a part of a message twice");
}

TEST_F(TcpFrames, LongerMessagesThanPostedAbort) {
  say_frame(data[0], {kData, 0, 1, 101, 0, 101}, 101);
  expect_aborted(ErrorKind::kMismatch, "sent 101 bytes");
}

TEST_F(TcpFrames, RepeatedMessagesAbort) {
  say_frame(data[0], {kData, 0, 1, 100, 0, 100}, 100);
  EXPECT_TRUE(wait().ok());
  say_frame(data[1], {kData, 0, 1, 100, 0, 100}, 100);
  expect_aborted(ErrorKind::kInternal, "sent a message twice");
}

TEST_F(TcpFrames, DataOnTheControlConnectionAborts) {
  say_frame(control, {kData, 0, 1, 100, 0, 100}, 100);
  expect_aborted(ErrorKind::kInternal, "sent something other than a control frame");
}

TEST_F(TcpFrames, AnAbortOfNoRankAborts) {
  control.say(tcp::encode_abort({ErrorKind::kTimeout, 2, "no such rank"}));
  expect_aborted(ErrorKind::kInternal, "sent an abort that cannot be read");
}

TEST_F(TcpFrames, AnAbortThatIsLaidToNoRankAborts) {
  ErrorContext about;
  about.odd = 2;
  control.say(tcp::encode_abort({ErrorKind::kMismatch, 1, "no such rank", about}));
  expect_aborted(ErrorKind::kInternal, "sent an abort that cannot be read");
}

TEST_F(TcpFrames, AnAbortWhoseTextsDoNotFitAborts) {
  std::vector<std::byte> frame = tcp::encode_abort({ErrorKind::kMismatch, 1, "short"});
  frame[tcp::kFrameHeaderBytes + tcp::kAbortNumberBytes - 1] = std::byte{6};  // bytes of the tensor's name
  control.say(frame);
  expect_aborted(ErrorKind::kInternal, "sent an abort that cannot be read");
}

TEST_F(TcpFrames, AbortsInPiecesAreHeard) {
  ErrorContext about;
  about.common = 0;
  about.odd = 1;
  about.operation = "allreduce";
  about.tensor = std::string(5000, 'n');
  const auto frame = tcp::encode_abort({ErrorKind::kTimeout, 1, std::string(4000, 'x'), about});
  std::size_t begin = 0;
  for (const std::size_t end : {std::size_t{20}, std::size_t{50}, frame.size()}) {
    control.say(std::span(frame).subspan(begin, end - begin));
    begin = end;
    for (int i = 0; i < 10; ++i) network.progress();
  }
  EXPECT_EQ(wait().outcome, Outcome::kAborted);
  const AbortRecord record = abort_of(network, ErrorKind::kTimeout, 1);
  EXPECT_EQ(record.message.size(), 4000u);
  EXPECT_EQ(record.about.common, 0);
  EXPECT_EQ(record.about.odd, 1);
  EXPECT_EQ(record.about.operation, "allreduce");
  EXPECT_EQ(record.about.tensor, std::string(AbortRecord::kTensorBytes, 'n'));
}

TEST_F(TcpFrames, TruncatedOnesAreOfALostPeer) {
  for (RawPeer& connection : data) {
    const tcp::FrameHeaderBytes header = tcp::encode_frame_header({kData, 0, 1, 100, 0, 100});
    connection.say(&connection == data ? std::span<const std::byte>(header) : std::span(header).first(13));
  }
  data[0].say(pattern(99, 1));
  for (RawPeer& connection : data) connection.hang_up();
  control.hang_up();
  expect_lost(wait(), 1, false);
}

// One connection alone ends, which no process that ends would do.
TEST_F(TcpFrames, AConnectionThatEndsAloneIsOfALostPeer) {
  data[1].hang_up();
  EXPECT_EQ(wait().outcome, Outcome::kPeerLost);
}

// The connections of a peer end in any order, and its goodbye may come late.
TEST_F(TcpFrames, AGoodbyeMayComeLongAfterTheEndOfADataConnection) {
  const std::jthread late([&] {
    for (RawPeer& connection : data) connection.hang_up();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // what is tested
    control.say(tcp::encode_goodbye());
  });
  expect_lost(wait(), 1, true);
}

}  // namespace
}  // namespace multiring
