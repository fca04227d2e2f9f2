// What travels over TCP, as functions: frames, the handshake, addresses, stripes.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/text.h"
#include "support/errors.h"
#include "transport/tcp/connections/connection_balance.h"
#include "transport/tcp/connections/frame.h"
#include "transport/tcp/connections/stripes.h"
#include "transport/tcp/handshake/address.h"
#include "transport/tcp/handshake/handshake_messages.h"

namespace multiring::tcp {
namespace {

TEST(Frame, HeadersComeBack) {
  const FrameHeader headers[] = {{FrameKind::kData, 3, 7, 1000, 960, 40},
                                 {FrameKind::kData, 0, 1, 0, 0, 0},
                                 {FrameKind::kData, 1, UINT64_MAX, UINT64_MAX, 0, UINT64_MAX},
                                 {FrameKind::kGoodbye, 0, 0, 0, 0, 0},
                                 {FrameKind::kAbort, 0, 0, 0, 0, kMaxAbortBytes}};
  for (const FrameHeader& header : headers)
    EXPECT_EQ(parse_frame_header(encode_frame_header(header)), header);
}

TEST(Frame, HeadersThatDisagreeWithThemselvesAreNone) {
  const FrameHeader headers[] = {{FrameKind::kData, 0, 1, 100, 60, 41},           // beyond its message
                                 {FrameKind::kData, 0, 1, 100, 101, 0},           // begins beyond it
                                 {FrameKind::kData, 0, 1, 100, UINT64_MAX, 101},  // which overflows
                                 {FrameKind::kData, 0, 1, 100, 50, UINT64_MAX},   // so does this
                                 {FrameKind::kData, 0, 1, 100, 0, 0},             // moves nothing
                                 {FrameKind::kData, 0, 0, 100, 0, 100},           // numbers begin at 1
                                 {FrameKind::kGoodbye, 0, 0, 0, 0, 1},            // has no payload
                                 {FrameKind::kAbort, 0, 0, 0, 0, kMaxAbortBytes + 1},
                                 {FrameKind::kAbort, 0, 0, 0, 0, kAbortNumberBytes - 1}};
  for (const FrameHeader& header : headers)
    EXPECT_FALSE(parse_frame_header(encode_frame_header(header)).has_value());
  FrameHeaderBytes bytes = encode_frame_header({FrameKind::kData, 0, 1, 8, 0, 8});
  for (const std::size_t place : {0, 4, 5, 12}) {  // magic, kind, what has to be 0
    FrameHeaderBytes other = bytes;
    other[place] ^= std::byte{0x80};
    EXPECT_FALSE(parse_frame_header(other).has_value()) << place;
  }
  for (std::size_t length = 0; length < kFrameHeaderBytes; ++length)
    EXPECT_FALSE(parse_frame_header(std::span(bytes).first(length)).has_value());
}

TEST(Frame, AbortsComeBackCutToTheirLimit) {
  for (const std::size_t length : {0, 1, 4095, 4096, 100000}) {
    const std::vector<std::byte> frame = encode_abort({ErrorKind::kMismatch, 2, std::string(length, 'x')});
    const auto header = parse_frame_header(std::span(frame).first(kFrameHeaderBytes));
    ASSERT_TRUE(header.has_value());
    ASSERT_EQ(header->bytes, frame.size() - kFrameHeaderBytes);
    const auto record = parse_abort(std::span(frame).subspan(kFrameHeaderBytes), 3);
    ASSERT_TRUE(record.has_value());
    EXPECT_EQ(record->kind, ErrorKind::kMismatch);
    EXPECT_EQ(record->origin, 2);
    EXPECT_EQ(record->message, std::string(std::min<std::size_t>(length, kAbortTextBytes), 'x'));
    EXPECT_FALSE(parse_abort(std::span(frame).subspan(kFrameHeaderBytes), 2).has_value()) << "no such rank";
  }
  std::vector<std::byte> payload(kAbortNumberBytes);
  for (const int kind : {0, 7, 255}) {
    payload[0] = static_cast<std::byte>(kind);
    EXPECT_FALSE(parse_abort(payload, 3).has_value());
  }
}

class HandshakeTest : public ::testing::Test {
 protected:
  HandshakeKey key = derive_handshake_key("secret", "job");
  Nonce listener = random_nonce();
  Nonce caller = random_nonce();
  ConnectionInfo facts = {3, 1, 4, 2, 1, 5, 1000, 77};
  ClientHelloBytes hello = encode_client_hello(key, listener, caller, facts);
};

TEST_F(HandshakeTest, BothSidesBelieveEachOther) {
  EXPECT_EQ(parse_challenge(encode_challenge(listener)), listener);
  const auto heard = parse_client_hello(key, listener, hello);
  ASSERT_TRUE(heard && heard->authenticated);
  EXPECT_EQ(heard->info, facts);
  EXPECT_EQ(heard->client_nonce, caller);
  for (const Verdict verdict : {Verdict::kAccepted, Verdict::kDuplicate}) {
    const auto welcome = parse_server_hello(key, listener, caller, facts,
                                            encode_server_hello(key, listener, caller, facts, verdict));
    ASSERT_TRUE(welcome && welcome->authenticated);
    EXPECT_EQ(welcome->verdict, verdict);
  }
}

TEST_F(HandshakeTest, OnlyTheKeyOfSecretAndJobProves) {
  for (const HandshakeKey& other : {derive_handshake_key("Secret", "job"),
                                    derive_handshake_key("secret", "other"), derive_handshake_key("", "")}) {
    const auto heard = parse_client_hello(other, listener, hello);
    ASSERT_TRUE(heard.has_value());
    EXPECT_FALSE(heard->authenticated);
    EXPECT_EQ(heard->info, ConnectionInfo{}) << "what is not authenticated is not read";
    const auto welcome =
        parse_server_hello(key, listener, caller, facts,
                           encode_server_hello(other, listener, caller, facts, Verdict::kAccepted));
    EXPECT_FALSE(welcome->authenticated);
  }
}

TEST_F(HandshakeTest, EveryBitOfAHelloCounts) {
  for (std::size_t bit = 0; bit < 8 * hello.size(); ++bit) {
    ClientHelloBytes other = hello;
    other[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    const auto heard = parse_client_hello(key, listener, other);
    EXPECT_FALSE(heard && heard->authenticated) << bit;
  }
}

TEST_F(HandshakeTest, NothingCanBeReplayedOrReflected) {
  EXPECT_FALSE(parse_client_hello(key, random_nonce(), hello)->authenticated)
      << "a hello of another connection";
  const ServerHelloBytes welcome = encode_server_hello(key, listener, caller, facts, Verdict::kAccepted);
  EXPECT_FALSE(parse_server_hello(key, listener, random_nonce(), facts, welcome)->authenticated);
  ConnectionInfo other = facts;
  other.channel = 3;
  EXPECT_FALSE(parse_server_hello(key, listener, caller, other, welcome)->authenticated)
      << "for another channel";
  // The caller's own proof, sent back to it.
  ServerHelloBytes reflected = welcome;
  std::copy(hello.end() - 32, hello.end(), reflected.end() - 32);
  EXPECT_FALSE(parse_server_hello(key, listener, caller, facts, reflected)->authenticated);
}

TEST_F(HandshakeTest, WhatIsShortOrOfAnotherVersionIsNone) {
  for (std::size_t length = 0; length < hello.size(); ++length) {
    EXPECT_FALSE(parse_client_hello(key, listener, std::span(hello).first(length)).has_value());
    EXPECT_TRUE(is_client_hello_prefix(std::span(hello).first(length)));
  }
  hello[7] ^= std::byte{3};
  EXPECT_FALSE(parse_client_hello(key, listener, hello).has_value());
  EXPECT_FALSE(is_client_hello_prefix(std::span(hello).first(8)));
  EXPECT_FALSE(is_client_hello_prefix(bytes_of("GET / HTTP/1.1")));
  EXPECT_FALSE(parse_challenge(hello).has_value());
  EXPECT_FALSE(parse_server_hello(key, listener, caller, facts, hello).has_value());
}

InterfaceAddress at(const std::string& interface, const std::string& address, int prefix) {
  return {interface, *SocketAddress::parse(address, 1), prefix, 0};
}

TEST(Address, TextsComeBack) {
  EXPECT_EQ(SocketAddress::parse("10.1.2.3", 80)->text(), "10.1.2.3:80");
  EXPECT_EQ(SocketAddress::parse("fd00::1", 80)->text(), "[fd00::1]:80");
  for (const char* text : {"", "10.1.2", "10.1.2.3.4", "host", "fd00::1::2", "10.1.2.3/8"})
    EXPECT_FALSE(SocketAddress::parse(text, 80).has_value()) << text;
  Endpoint endpoint{"host-a", 4711, {at("eth0", "10.1.2.3", 24), at("ib0", "fd00::1", 64)}};
  endpoint.addresses[1].megabits = 100000;
  const auto parsed = parse_endpoint(format_endpoint(endpoint));
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(format_endpoint(*parsed), format_endpoint(endpoint));
  for (const char* text :
       {"", "host", "host\n1", "host\nx\neth0 10.1.2.3 24 80 0", "host\n1\neth0 10.1.2.3 33 80 0",
        "host\n1\neth0 10.1.2.3 24 0 0", "host\n1\neth0 10.1.2.3 24 80", "host\n1\n"})
    EXPECT_FALSE(parse_endpoint(text).has_value()) << text;
}

TEST(Address, PairsPreferTheSameNetwork) {
  const std::vector<InterfaceAddress> a = {at("eth0", "10.0.0.1", 24), at("eth1", "10.0.1.1", 24)};
  const std::vector<InterfaceAddress> b = {at("p1", "10.0.1.2", 24), at("p0", "10.0.0.2", 24)};
  EXPECT_EQ(pair_addresses(a, b), (std::vector<AddressPair>{{0, 1}, {1, 0}}));
  // Only one network is shared: the other interfaces may not reach each other at all.
  const std::vector<InterfaceAddress> c = {at("eth0", "192.168.0.1", 24), at("eth1", "10.0.1.3", 24)};
  EXPECT_EQ(pair_addresses(a, c), (std::vector<AddressPair>{{1, 1}}));
  // None is: routers are between.
  const std::vector<InterfaceAddress> d = {at("eth0", "192.168.0.1", 24), at("eth1", "192.168.1.1", 24)};
  EXPECT_EQ(pair_addresses(a, d), (std::vector<AddressPair>{{0, 0}, {1, 1}}));
  // Both families on one interface are one way, not two.
  const std::vector<InterfaceAddress> e = {at("eth0", "fd00::1", 64), at("eth0", "10.0.0.1", 24)};
  const std::vector<InterfaceAddress> f = {at("eth0", "10.0.0.2", 24), at("eth0", "fd00::2", 64)};
  EXPECT_EQ(pair_addresses(e, f), (std::vector<AddressPair>{{1, 0}}));
  const std::vector<InterfaceAddress> g = {at("eth0", "fd00::3", 64)};
  EXPECT_EQ(pair_addresses(e, g), (std::vector<AddressPair>{{0, 0}}));
  EXPECT_TRUE(pair_addresses(a, g).empty());
}

std::string chosen(const std::vector<std::string>& filter, bool local = false) {
  const std::vector<InterfaceAddress> all = {at("lo", "127.0.0.1", 8),     at("lo", "::1", 128),
                                             at("eth0", "10.0.0.1", 24),   at("eth0", "fe80::1", 64),
                                             at("ib0", "192.168.0.1", 16), at("docker0", "172.17.0.1", 16)};
  std::string text;
  for (const InterfaceAddress& address : choose_addresses(all, filter, local))
    text += address.address.host_text() + " ";
  return text;
}

TEST(Interfaces, FilterChooses) {
  EXPECT_EQ(chosen({}), "10.0.0.1 192.168.0.1 ");
  EXPECT_EQ(chosen({}, true), "127.0.0.1 ::1 ");
  EXPECT_EQ(chosen({"::1"}, true), "::1 ");
  EXPECT_EQ(chosen({"ib0"}), "192.168.0.1 ");
  EXPECT_EQ(chosen({"10.0.0.0/8", "dock*"}), "10.0.0.1 172.17.0.1 ");
  EXPECT_EQ(chosen({"^eth0"}), "192.168.0.1 ");
  EXPECT_EQ(chosen({"eth0"}), "10.0.0.1 ");
  EXPECT_EQ(chosen({"*", "^192.168.0.0/16", "^lo"}), "10.0.0.1 172.17.0.1 ");
}

TEST(Interfaces, WhatIsNotUnderstoodOrLeavesNothingIsAnError) {
  for (const char* item : {"", "^", "10.0.0.0/33", "10.0.0.0/", "eth0/8", "10.0.0.0/8x"})
    EXPECT_THROW(chosen({item}), Error) << item;
  testing::expect_usage([] { chosen({"eth7"}); }, "eth0 10.0.0.1, eth0 fe80::1, ib0");
}

using Weights = std::vector<std::uint32_t>;

ConnectionBalance balance_of(const Weights& weights, std::size_t stripe_threshold) {
  ConnectionBalance balance(weights.size(), stripe_threshold);
  balance.fix_weights(weights);
  return balance;
}

/// Expects that the ranges, one after the other, are `bytes` bytes.
void expect_covered(const std::vector<StripeRange>& ranges, std::size_t bytes) {
  ASSERT_FALSE(ranges.empty());
  std::size_t end = 0;
  for (const StripeRange& range : ranges) {
    ASSERT_EQ(range.offset, end);
    ASSERT_TRUE(range.bytes > 0 || bytes == 0);
    end += range.bytes;
  }
  ASSERT_EQ(end, bytes);
}

TEST(ConnectionBalance, EveryByteIsInOneStripe) {
  std::vector<StripeRange> ranges;
  for (const Weights& weights : {Weights{1}, {1, 1}, {1, 4}, {4, 1, 0}, {0, 0, 5}, {7, 1, 3}, {1, 1, 1, 1}}) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 1000, 4095, 4096, 1000003}) {
      for (const std::size_t stripe_threshold : {0, 4096}) {
        ConnectionBalance balance = balance_of(weights, stripe_threshold);
        for (int message = 0; message < 3; ++message) {
          balance.divide(bytes, std::vector<std::size_t>(weights.size(), 0), ranges);
          ASSERT_NO_FATAL_FAILURE(expect_covered(ranges, bytes));
          for (const StripeRange& range : ranges) EXPECT_GT(weights[range.stripe], 0u);
          EXPECT_TRUE(bytes >= stripe_threshold || ranges.size() == 1);
        }
      }
    }
  }
}

TEST(ConnectionBalance, EveryByteIsInOneStripeWhateverTheBacklogs) {
  std::vector<StripeRange> ranges;
  std::vector<std::size_t> backlogs(5, 0);
  std::size_t random = 1;
  for (const std::size_t stripe_threshold : {0, 4096}) {
    ConnectionBalance balance(backlogs.size(), stripe_threshold);
    for (int message = 0; message < 10000; ++message) {
      random = random * 6364136223846793005ULL + 1442695040888963407ULL;
      const std::size_t bytes = (random >> 33) % (message % 3 == 0 ? 100 : 3'000'000);
      for (std::size_t link = 0; link < backlogs.size(); ++link)
        backlogs[link] = (random >> (20 + 3 * link)) % (link % 2 == 0 ? 10 : 2'000'000);
      balance.divide(bytes, backlogs, ranges);
      ASSERT_NO_FATAL_FAILURE(expect_covered(ranges, bytes));
    }
  }
}

TEST(ConnectionBalance, SharesFollowTheWeights) {
  std::vector<StripeRange> ranges;
  ConnectionBalance balance = balance_of({1000, 250}, 4096);
  balance.divide(1 << 20, std::vector<std::size_t>{0, 0}, ranges);
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_NEAR(static_cast<double>(ranges[0].bytes) / (1 << 20), 0.8, 0.001);
}

TEST(ConnectionBalance, ShortMessagesGoOverAllLinksInTurn) {
  std::vector<StripeRange> ranges;
  ConnectionBalance balance = balance_of({400, 100, 0}, 4096);
  std::vector<std::size_t> backlogs(3, 0);
  for (int message = 0; message < 1000; ++message) {
    balance.divide(1000 + static_cast<std::size_t>(message % 7), backlogs, ranges);
    ASSERT_EQ(ranges.size(), 1u);
    backlogs[ranges[0].stripe] += ranges[0].bytes;
  }
  EXPECT_NEAR(static_cast<double>(backlogs[0]) / static_cast<double>(backlogs[1]), 4.0, 0.1);
  EXPECT_EQ(backlogs[2], 0u);
}

TEST(ConnectionBalance, ShortMessagesToDifferentPeersGoOverDifferentLinks) {
  std::vector<StripeRange> ranges;
  std::vector<std::size_t> messages(3, 0);
  for (std::size_t peer = 0; peer < 7; ++peer) {
    ConnectionBalance balance(3, 4096, peer);
    balance.divide(1000, std::vector<std::size_t>{0, 0, 0}, ranges);
    ASSERT_EQ(ranges.size(), 1u);
    ++messages[ranges[0].stripe];
    std::vector<std::size_t> busy{0, 0, 0};
    busy[ranges[0].stripe] = 1000;
    const std::size_t before = ranges[0].stripe;
    balance.divide(1000, busy, ranges);
    EXPECT_NE(ranges[0].stripe, before) << "it is busy";
  }
  EXPECT_EQ(messages, (std::vector<std::size_t>{3, 2, 2}));
}

TEST(ConnectionBalance, ShortMessagesGoWhereTheyAreDoneFirst) {
  std::vector<StripeRange> ranges;
  const auto connection = [&](std::size_t bytes, const std::vector<std::size_t>& backlogs,
                              std::uint32_t speed) {
    ConnectionBalance balance(2, 64 * 1024, 1);
    balance.set_weight(0, 1000);
    balance.set_weight(1, speed);
    balance.divide(bytes, backlogs, ranges);
    return ranges[0].stripe;
  };
  EXPECT_EQ(connection(1000, {0, 0}, 500), 0u) << "the other one is slower";
  EXPECT_EQ(connection(1000, {0, 0}, 990), 1u) << "as fast, as far as can be measured";
  EXPECT_EQ(connection(16 << 10, {1000, 0}, 500), 0u) << "done first though it begins later";
  EXPECT_EQ(connection(1000, {16 << 10, 0}, 500), 1u);
  EXPECT_EQ(connection(0, {0, 0}, 500), 0u);
}

TEST(ConnectionBalance, BusyLinksGetLess) {
  std::vector<StripeRange> ranges;
  ConnectionBalance balance(2, 4096);
  balance.divide(300'000, std::vector<std::size_t>{0, 100'000}, ranges);
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_NEAR(static_cast<double>(ranges[0].bytes), 200'000, 64);
  balance.divide(300'000, std::vector<std::size_t>{900'000, 100'000}, ranges);
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].stripe, 1u);
}

/// Links that pass what they get at given speeds, while a message is posted whenever the one before the last
/// has passed. What the kernel tells of busy time is in ticks.
class Links {
 public:
  explicit Links(std::size_t count) : free_at_(count, 0.0), progress_(count), backlogs_(count, 0) {}

  /// The fraction of the links' speed that the last quarter of the messages reaches.
  double run(ConnectionBalance& balance, const std::vector<double>& speeds, int messages) {
    constexpr std::size_t kBytes = 256 << 10;
    double quarter = 0.0;
    for (int message = 0; message < messages; ++message) {
      if (message == messages - messages / 4) quarter = now_;
      look(speeds);
      if (balance.wants_measurement(now_)) balance.measure(now_, progress_);
      std::vector<StripeRange> ranges;
      balance.divide(kBytes, backlogs_, ranges);
      double passed = now_;
      for (const StripeRange& range : ranges) {
        const double begin = std::max(now_, free_at_[range.stripe]);
        const double end = begin + static_cast<double>(range.bytes) / speeds[range.stripe];
        free_at_[range.stripe] = end;
        progress_[range.stripe].acknowledged += range.bytes;
        progress_[range.stripe].busy += (std::ceil(end / kTick) - std::ceil(begin / kTick)) * kTick;
        passed = std::max(passed, end);
      }
      now_ = std::max(now_, before_);
      before_ = passed;
    }
    double together = 0.0;
    for (const double speed : speeds) together += speed;
    return static_cast<double>(messages / 4) * kBytes / (now_ - quarter) / together;
  }

 private:
  static constexpr double kTick = 0.004;

  void look(const std::vector<double>& speeds) {
    for (std::size_t link = 0; link < speeds.size(); ++link)
      backlogs_[link] = static_cast<std::size_t>(std::max(0.0, free_at_[link] - now_) * speeds[link]);
  }

  double now_ = 1.0;
  double before_ = 1.0;  // when the message before the last one has passed
  std::vector<double> free_at_;
  std::vector<ConnectionProgress> progress_;
  std::vector<std::size_t> backlogs_;
};

TEST(ConnectionBalance, FollowsSpeedsThatNobodyTold) {
  constexpr double kAsked = 0.85;  // of the links' speed together
  for (const std::vector<double>& speeds :
       {std::vector{62.5e6, 15.6e6}, std::vector{1e9, 3e9, 2e9}, std::vector{1e9, 1e9}}) {
    ConnectionBalance balance(speeds.size(), 64 * 1024);
    for (std::size_t link = 0; link < speeds.size(); ++link) balance.set_weight(link, 10000);
    Links links(speeds.size());
    EXPECT_GT(links.run(balance, speeds, 20000), kAsked);
    // One of them gets slow, and recovers.
    std::vector<double> slower = speeds;
    slower[0] /= 10;
    EXPECT_GT(links.run(balance, slower, 20000), kAsked);
    EXPECT_GT(links.run(balance, speeds, 20000), kAsked);
  }
}

}  // namespace
}  // namespace multiring::tcp
