// What travels over TCP, as functions: frames, the handshake, addresses, stripes.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "transport/tcp/address.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/stripes.h"

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
  HelloFacts facts = {3, 1, 4, 2, 1, 5, 1000, 77};
  HelloBytes hello = encode_hello(key, listener, caller, facts);
};

TEST_F(HandshakeTest, BothSidesBelieveEachOther) {
  EXPECT_EQ(parse_challenge(encode_challenge(listener)), listener);
  const auto heard = parse_hello(key, listener, hello);
  ASSERT_TRUE(heard && heard->proven);
  EXPECT_EQ(heard->facts, facts);
  EXPECT_EQ(heard->caller_nonce, caller);
  for (const Verdict verdict : {Verdict::kWelcome, Verdict::kDuplicate}) {
    const auto welcome =
        parse_welcome(key, listener, caller, facts, encode_welcome(key, listener, caller, facts, verdict));
    ASSERT_TRUE(welcome && welcome->proven);
    EXPECT_EQ(welcome->verdict, verdict);
  }
}

TEST_F(HandshakeTest, OnlyTheKeyOfSecretAndJobProves) {
  for (const HandshakeKey& other : {derive_handshake_key("Secret", "job"),
                                    derive_handshake_key("secret", "other"), derive_handshake_key("", "")}) {
    const auto heard = parse_hello(other, listener, hello);
    ASSERT_TRUE(heard.has_value());
    EXPECT_FALSE(heard->proven);
    EXPECT_EQ(heard->facts, HelloFacts{}) << "what is not proven is not read";
    const auto welcome = parse_welcome(key, listener, caller, facts,
                                       encode_welcome(other, listener, caller, facts, Verdict::kWelcome));
    EXPECT_FALSE(welcome->proven);
  }
}

TEST_F(HandshakeTest, EveryBitOfAHelloCounts) {
  for (std::size_t bit = 0; bit < 8 * hello.size(); ++bit) {
    HelloBytes other = hello;
    other[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    const auto heard = parse_hello(key, listener, other);
    EXPECT_FALSE(heard && heard->proven) << bit;
  }
}

TEST_F(HandshakeTest, NothingCanBeReplayedOrReflected) {
  EXPECT_FALSE(parse_hello(key, random_nonce(), hello)->proven) << "a hello of another connection";
  const WelcomeBytes welcome = encode_welcome(key, listener, caller, facts, Verdict::kWelcome);
  EXPECT_FALSE(parse_welcome(key, listener, random_nonce(), facts, welcome)->proven);
  HelloFacts other = facts;
  other.channel = 3;
  EXPECT_FALSE(parse_welcome(key, listener, caller, other, welcome)->proven) << "for another channel";
  // The caller's own proof, sent back to it.
  WelcomeBytes reflected = welcome;
  std::copy(hello.end() - 32, hello.end(), reflected.end() - 32);
  EXPECT_FALSE(parse_welcome(key, listener, caller, facts, reflected)->proven);
}

TEST_F(HandshakeTest, WhatIsShortOrOfAnotherVersionIsNone) {
  for (std::size_t length = 0; length < hello.size(); ++length) {
    EXPECT_FALSE(parse_hello(key, listener, std::span(hello).first(length)).has_value());
    EXPECT_TRUE(begins_like_hello(std::span(hello).first(length)));
  }
  hello[7] ^= std::byte{3};
  EXPECT_FALSE(parse_hello(key, listener, hello).has_value());
  EXPECT_FALSE(begins_like_hello(std::span(hello).first(8)));
  EXPECT_FALSE(begins_like_hello(bytes_of("GET / HTTP/1.1")));
  EXPECT_FALSE(parse_challenge(hello).has_value());
  EXPECT_FALSE(parse_welcome(key, listener, caller, facts, hello).has_value());
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
  try {
    chosen({"eth7"});
    ADD_FAILURE() << "nothing is left";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find("eth0 10.0.0.1, eth0 fe80::1, ib0"), std::string::npos)
        << error.what();
  }
}

TEST(Stripes, EveryByteIsInOneOfThem) {
  const std::vector<std::vector<std::uint32_t>> all_weights = {{1},       {1, 1},    {1, 4},      {4, 1, 0},
                                                               {0, 0, 5}, {7, 1, 3}, {1, 1, 1, 1}};
  std::vector<StripeRange> ranges;
  for (const auto& weights : all_weights) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 1000, 4095, 4096, 1000003}) {
      for (const std::size_t whole_below : {0, 4096}) {
        divide_into_stripes(bytes, weights, whole_below, ranges);
        ASSERT_FALSE(ranges.empty());
        std::size_t end = 0;
        for (const StripeRange& range : ranges) {
          EXPECT_EQ(range.offset, end);
          EXPECT_TRUE(range.bytes > 0 || bytes == 0);
          EXPECT_GT(weights[range.stripe], 0u);
          end += range.bytes;
        }
        EXPECT_EQ(end, bytes);
        EXPECT_TRUE(bytes >= whole_below || ranges.size() == 1);
      }
    }
  }
}

TEST(Stripes, SharesFollowTheWeights) {
  std::vector<StripeRange> ranges;
  divide_into_stripes(1 << 20, std::vector<std::uint32_t>{1000, 250}, 4096, ranges);
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_NEAR(static_cast<double>(ranges[0].bytes) / (1 << 20), 0.8, 0.001);
}

}  // namespace
}  // namespace multiring::tcp
