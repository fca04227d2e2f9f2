#include "support/network/tcp_group.h"

#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
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
  std::vector<std::thread> ranks;
  std::vector<std::exception_ptr> raised(options_.size());
  for (std::size_t rank = 0; rank < options_.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        networks_[rank] = std::make_unique<TcpNetwork>(store_, options_[rank]);
        body(*networks_[rank]);
      } catch (...) {
        raised[rank] = std::current_exception();
        if (networks_[rank]) networks_[rank]->abort(Error(ErrorKind::kAborted, "a rank of the test failed"));
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  networks_.clear();
  for (const std::exception_ptr& exception : raised)
    if (exception) std::rethrow_exception(exception);
}

Buffer pattern(std::size_t bytes, unsigned seed) {
  constexpr std::size_t kBlock = 65521;  // a prime: parts of a message that change places are noticed
  Buffer message(bytes);
  for (std::size_t i = 0; i < std::min(bytes, kBlock); ++i)
    message[i] = static_cast<std::byte>((i * 2654435761U + seed * 97U) >> 8U);
  for (std::size_t done = kBlock; done < bytes; done += kBlock)
    std::memcpy(message.data() + done, message.data(), std::min(kBlock, bytes - done));
  return message;
}

Network::Ticket send(Network& network, int peer, int channel, const Buffer& message) {
  const std::span<const std::byte> parts[] = {message};
  return network.post_send(peer, channel, parts);
}

Network::Ticket receive(Network& network, int peer, int channel, Buffer& message) {
  return network.post_receive(peer, channel, message);
}

void exchange_messages(Network& network, const std::vector<std::size_t>& sizes) {
  const auto seed_of = [](int from, int to, int channel, std::size_t number) {
    return static_cast<unsigned>(from * 1000 + to * 100 + channel * 10) +
           static_cast<unsigned>(number) * 7919;
  };
  std::vector<std::unique_ptr<Buffer>> sent;
  std::vector<std::unique_ptr<Buffer>> got;
  std::vector<unsigned> seeds;
  std::vector<Network::Ticket> tickets;
  for (const auto& [peer, channel] : all_links(network)) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      sent.push_back(std::make_unique<Buffer>(pattern(sizes[i], seed_of(network.rank(), peer, channel, i))));
      tickets.push_back(send(network, peer, channel, *sent.back()));
    }
  }
  for (const auto& [peer, channel] : all_links(network)) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      seeds.push_back(seed_of(peer, network.rank(), channel, i));
      got.push_back(std::make_unique<Buffer>(sizes[i]));
      tickets.push_back(receive(network, peer, channel, *got.back()));
    }
  }
  ASSERT_EQ(network.wait(tickets, wait_seconds(60)).outcome, WaitResult::Outcome::kArrived);
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_TRUE(*got[i] == pattern(got[i]->size(), seeds[i])) << "message " << i << " of " << got[i]->size();
}

WaitResult wait_in_vain(Network& network, int peer, double seconds) {
  Buffer got(100);
  const Network::Ticket tickets[] = {receive(network, peer, 0, got)};
  const WaitResult result = network.wait(tickets, wait_seconds(seconds));
  network.give_up(tickets);
  return result;
}

void progress_until(TcpNetwork& network, const std::function<bool()>& reached) {
  const WaitOptions waiting = wait_seconds(20);
  while (!reached() && !waiting.deadline.expired()) network.progress();
  ASSERT_TRUE(reached());
}

int open_descriptors() {
  int count = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

}  // namespace multiring::testing
