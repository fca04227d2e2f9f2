#include "transport/shm/shm_transport.h"

#include <numeric>
#include <vector>

#include "base/host_identity.h"
#include "transport/shm/memory_file.h"

namespace multiring {
namespace {

class ShmLink final : public HostLink {
 public:
  ShmLink(Store& store, const PeerLinks::Options& options, const Waiting& waiting)
      : rank_(options.rank), size_(options.size), host_(host_name()), links_(store, options, waiting) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string host() const override { return host_; }
  std::int64_t process_id(int rank) const override { return links_.process_id(rank); }
  int cores() const override { return links_.cores(); }
  void abandon() override { links_.abandon(); }
  bool is_lost(int rank) override { return links_.is_lost(rank); }

  std::shared_ptr<SharedBlock> share(std::size_t bytes, std::span<const int> members, std::uint64_t tag,
                                     const Waiting& waiting) override {
    if (members[0] != rank_) return map_memory_file(links_.receive_file(members[0], tag, waiting), bytes);
    const UniqueFd file = create_memory_file(bytes);
    for (const int member : members.subspan(1)) links_.send_file(member, tag, file);
    return map_memory_file(file, bytes);
  }

 private:
  int rank_;
  int size_;
  std::string host_;
  PeerLinks links_;
};

}  // namespace

std::shared_ptr<HostLink> make_shm_link(Store& store, const PeerLinks::Options& options,
                                        const Waiting& waiting) {
  return std::make_shared<ShmLink>(store, options, waiting);
}

std::shared_ptr<Transport> connect_shm(Store& store, const ShmOptions& options, const Waiting& waiting) {
  PeerLinks::Options link_options;
  link_options.build = options.build;
  link_options.rank = options.rank;
  link_options.size = options.size;
  link_options.socket_directory = options.socket_directory;
  link_options.settings = options.transport.staging_bytes;
  auto link = make_shm_link(store, link_options, waiting);
  std::vector<int> members(static_cast<std::size_t>(options.size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<SharedTransport>(std::move(link), std::move(members), 1, options.transport,
                                           waiting);
}

}  // namespace multiring
