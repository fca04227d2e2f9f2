#include "support/tcp_group.h"

#include <dirent.h>
#include <gtest/gtest.h>

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

Waiting wait_seconds(double seconds) {
  Waiting waiting;
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
        if (networks_[rank]) networks_[rank]->abort(ErrorKind::kAborted, "a rank of the test failed");
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  networks_.clear();
  for (const std::exception_ptr& exception : raised)
    if (exception) std::rethrow_exception(exception);
}

Buffer pattern(std::size_t bytes, unsigned seed) {
  Buffer message(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    message[i] = static_cast<std::byte>((i * 2654435761U + seed * 97U) >> 8U);
  return message;
}

Network::Ticket send(Network& network, int peer, int channel, const Buffer& message) {
  const std::span<const std::byte> parts[] = {message};
  return network.post_send(peer, channel, parts);
}

Network::Ticket receive(Network& network, int peer, int channel, Buffer& message) {
  return network.post_receive(peer, channel, message);
}

WaitResult wait_in_vain(Network& network, int peer, double seconds) {
  Buffer got(100);
  const Network::Ticket tickets[] = {receive(network, peer, 0, got)};
  const WaitResult result = network.wait(tickets, wait_seconds(seconds));
  network.give_up(tickets);
  return result;
}

int open_descriptors() {
  int count = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

}  // namespace multiring::testing
