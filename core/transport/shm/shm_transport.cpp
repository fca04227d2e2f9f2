#include "transport/shm/shm_transport.h"

#include <numeric>
#include <vector>

#include "base/host_identity.h"
#include "transport/shm/memory_file.h"

namespace multiring {
namespace {

class ShmHostGroup final : public HostGroup {
 public:
  ShmHostGroup(Store& store, const SocketMesh::Options& options, const WaitOptions& waiting)
      : rank_(options.rank), size_(options.size), host_(host_name()), mesh_(store, options, waiting) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string host() const override { return host_; }
  std::int64_t process_id(int rank) const override { return mesh_.process_id(rank); }
  int cores() const override { return mesh_.cores(); }
  void abandon() override { mesh_.abandon(); }
  bool is_lost(int rank) override { return mesh_.is_lost(rank); }

  std::shared_ptr<SharedBlock> share(std::size_t bytes, std::span<const int> members, std::uint64_t tag,
                                     const WaitOptions& waiting) override {
    if (members[0] != rank_) return map_memory_file(mesh_.receive_file(members[0], tag, waiting), bytes);
    const UniqueFd file = create_memory_file(bytes);
    for (const int member : members.subspan(1)) mesh_.send_file(member, tag, file);
    return map_memory_file(file, bytes);
  }

 private:
  int rank_;
  int size_;
  std::string host_;
  SocketMesh mesh_;
};

}  // namespace

std::shared_ptr<HostGroup> make_shm_group(Store& store, const SocketMesh::Options& options,
                                          const WaitOptions& waiting) {
  return std::make_shared<ShmHostGroup>(store, options, waiting);
}

std::shared_ptr<Transport> connect_shm(Store& store, const ShmOptions& options, const WaitOptions& waiting) {
  SocketMesh::Options mesh_options;
  mesh_options.build = options.build;
  mesh_options.rank = options.rank;
  mesh_options.size = options.size;
  mesh_options.socket_directory = options.socket_directory;
  mesh_options.settings = options.transport.staging_bytes;
  auto group = make_shm_group(store, mesh_options, waiting);
  std::vector<int> members(static_cast<std::size_t>(options.size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<SharedTransport>(std::move(group), std::move(members), 1, options.transport,
                                           waiting);
}

}  // namespace multiring
