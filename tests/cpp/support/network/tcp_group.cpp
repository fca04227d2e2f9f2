#include "support/network/tcp_group.h"

#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>

namespace multiring::testing {

TcpOptions tcp_options(int rank, int size, int channels, int connections) {
  TcpOptions options;
  options.rank = rank;
  options.size = size;
  options.secret = "the secret of the tests";
  options.job = "test";
  options.interfaces = {"127.0.0.0/8"};
  options.local = true;
  options.channels = channels;
  options.connections_per_interface = connections;
  return options;
}

WaitOptions wait_seconds(double seconds) {
  WaitOptions waiting;
  waiting.deadline = Deadline::after(seconds * kSlowness);
  return waiting;
}

std::vector<Network::Link> all_links(const Network& network) {
  std::vector<Network::Link> links;
  for (int peer = 0; peer < network.size(); ++peer)
    for (int channel = 0; peer != network.rank() && channel < network.channels(); ++channel)
      links.push_back({peer, channel});
  return links;
}

void connect_both(Network& one, Network& other) {
  const std::jthread thread([&] { other.connect(all_links(other), wait_seconds(20)); });
  one.connect(all_links(one), wait_seconds(20));
}

TcpGroup::TcpGroup(int size, int channels, int connections) {
  for (int rank = 0; rank < size; ++rank) options_.push_back(tcp_options(rank, size, channels, connections));
}

void TcpGroup::run(const Body& body) {
  run_unconnected([&](TcpNetwork& network) {
    network.connect(all_links(network), wait_seconds(20));
    body(network);
  });
}

void TcpGroup::run_unconnected(const Body& body) {
  networks_.clear();
  networks_.resize(options_.size());
  std::vector<std::exception_ptr> raised(options_.size());
  in_threads(static_cast<int>(options_.size()), [&](int number) {
    const auto rank = static_cast<std::size_t>(number);
    try {
      networks_[rank] = std::make_unique<TcpNetwork>(store_, options_[rank]);
      body(*networks_[rank]);
    } catch (...) {
      raised[rank] = std::current_exception();
      if (networks_[rank]) networks_[rank]->abort(Error(ErrorKind::kAborted, "a rank of the test failed"));
    }
  });
  networks_.clear();
  for (const std::exception_ptr& exception : raised)
    if (exception) std::rethrow_exception(exception);
}

Payload pattern(std::size_t bytes, unsigned seed) {
  constexpr std::size_t kBlock = 65521;  // a prime: parts of a message that change places are noticed
  Payload message(bytes);
  for (std::size_t i = 0; i < std::min(bytes, kBlock); ++i)
    message[i] = static_cast<std::byte>((i * 2654435761U + seed * 97U) >> 8U);
  for (std::size_t done = kBlock; done < bytes; done += kBlock)
    std::memcpy(message.data() + done, message.data(), std::min(kBlock, bytes - done));
  return message;
}

Network::Ticket send(Network& network, int peer, int channel, const Payload& message) {
  const std::span<const std::byte> part = message;
  return network.post_send(peer, channel, {&part, 1});
}

Network::Ticket receive(Network& network, int peer, int channel, Payload& message) {
  return network.post_receive(peer, channel, message);
}

WaitResult await(Network& network, const Tickets& tickets, double seconds) {
  return network.wait(tickets, wait_seconds(seconds));
}

void exchange_messages(Network& network, const std::vector<std::size_t>& sizes) {
  const auto seed_of = [](int from, int to, int channel, std::size_t number) {
    return static_cast<unsigned>(from * 1000 + to * 100 + channel * 10) +
           static_cast<unsigned>(number) * 7919;
  };
  std::vector<std::unique_ptr<Payload>> sent;
  std::vector<std::unique_ptr<Payload>> got;
  std::vector<unsigned> seeds;
  std::vector<Network::Ticket> tickets;
  for (const auto& [peer, channel] : all_links(network)) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      sent.push_back(std::make_unique<Payload>(pattern(sizes[i], seed_of(network.rank(), peer, channel, i))));
      tickets.push_back(send(network, peer, channel, *sent.back()));
    }
  }
  for (const auto& [peer, channel] : all_links(network)) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      seeds.push_back(seed_of(peer, network.rank(), channel, i));
      got.push_back(std::make_unique<Payload>(sizes[i]));
      tickets.push_back(receive(network, peer, channel, *got.back()));
    }
  }
  ASSERT_TRUE(await(network, tickets, 60).ok());
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_TRUE(*got[i] == pattern(got[i]->size(), seeds[i])) << "message " << i << " of " << got[i]->size();
}

void exchange_parts(Network& network) {
  const int next = (network.rank() + 1) % network.size();
  const int previous = (network.rank() + network.size() - 1) % network.size();
  const int channel = network.channels() - 1;
  const Payload whole = pattern(300007, static_cast<unsigned>(network.rank()));
  std::vector<std::span<const std::byte>> parts;
  for (std::size_t at = 0, step = 0; at < whole.size(); at += step) {
    step = std::min(whole.size() - at, 1 + at / 50);  // of growing size: more than one call can take
    parts.push_back(std::span(whole).subspan(at, step));
    parts.push_back({});
  }
  Payload got(whole.size());
  const Tickets tickets = {network.post_send(next, channel, parts), receive(network, previous, channel, got)};
  ASSERT_TRUE(await(network, tickets).ok());
  EXPECT_TRUE(got == pattern(whole.size(), static_cast<unsigned>(previous)));
}

void expect_ends_early(Network& network, const Tickets& tickets) {
  struct Stop {};
  const std::function<void()> interrupt = [] { throw Stop{}; };
  WaitOptions waiting = wait_seconds(20);
  waiting.interrupt = &interrupt;
  EXPECT_THROW(network.wait(tickets, waiting), Stop);
  const std::atomic<bool> cancelled{true};
  waiting.interrupt = nullptr;
  waiting.cancelled = &cancelled;
  EXPECT_EQ(network.wait(tickets, waiting).outcome, Outcome::kCancelled);
}

WaitResult wait_until_it_fails(Network& network, int peer, double seconds) {
  Payload got(100);
  const Tickets tickets = {receive(network, peer, 0, got)};
  const WaitResult result = await(network, tickets, seconds);
  network.give_up(tickets);
  return result;
}

void progress_until(TcpNetwork& network, const std::function<bool()>& reached) {
  const WaitOptions waiting = wait_seconds(20);
  while (!reached() && !waiting.deadline.expired()) network.progress();
  ASSERT_TRUE(reached());
}

void beside(TcpNetwork& network, const std::function<void()>& body) {
  std::atomic<bool> over = false;
  const std::jthread thread([&] {
    body();
    over = true;
  });
  while (!over) network.progress();
}

int open_descriptors() {
  int count = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

}  // namespace multiring::testing
