// The symmetric memory and the subgroups of a SharedTransport.

#include <algorithm>
#include <utility>

#include "base/cache.h"
#include "transport/shared/shared_transport.h"

namespace multiring {
namespace {

class SharedSymmetricRegion final : public SymmetricRegion {
 public:
  SharedSymmetricRegion(std::shared_ptr<SharedBlock> block, std::size_t stride, std::size_t bytes,
                        std::uint32_t id, std::vector<bool> remote)
      : block_(std::move(block)), stride_(stride), bytes_(bytes), id_(id), remote_(std::move(remote)) {}
  std::byte* part(int rank) const override {
    if (remote_[static_cast<std::size_t>(rank)]) return nullptr;
    return block_->data() + static_cast<std::size_t>(rank) * stride_;
  }
  std::size_t bytes_per_rank() const override { return bytes_; }
  std::uint32_t id() const override { return id_; }

 private:
  std::shared_ptr<SharedBlock> block_;
  std::size_t stride_;
  std::size_t bytes_;
  std::uint32_t id_;
  std::vector<bool> remote_;
};

// Blocks that the same ranks share differ in their tags. A transport's own block has number 0, and its
// regions follow. A subgroup's tag is derived from its parent's.
std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15ULL + b;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ULL;
  return x ^ (x >> 32);
}
constexpr std::uint64_t kBlocks = 1;
constexpr std::uint64_t kSubgroups = 2;

}  // namespace

std::shared_ptr<SymmetricRegion> SharedTransport::allocate(std::size_t bytes_per_rank, std::uint32_t id,
                                                           const WaitOptions& waiting) {
  const std::size_t stride = round_up(std::max<std::size_t>(bytes_per_rank, 1), GroupLayout::kPage);
  const std::function<void()> check = [&] { raise_if_aborted(waiting); };
  const WaitOptions watched = waiting.with_interrupt(check);
  auto block = host_group_->share(stride * layout_.size, local_members(), block_tag(id), watched);
  std::vector<bool> remote;
  for (int rank = 0; rank < size(); ++rank) remote.push_back(is_remote(rank));
  return std::make_shared<SharedSymmetricRegion>(std::move(block), stride, bytes_per_rank, id,
                                                 std::move(remote));
}

std::shared_ptr<Transport> SharedTransport::subgroup(std::span<const int> members, std::uint64_t tag,
                                                     const WaitOptions& waiting) {
  const std::function<void()> check = [&] { raise_if_aborted(waiting); };
  const WaitOptions watched = waiting.with_interrupt(check);
  return std::make_shared<SharedTransport>(host_group_, group_members(members), subgroup_tag(tag), options_,
                                           watched);
}

// A rank that has to create memory may have failed, and be alive.
void SharedTransport::raise_if_aborted(const WaitOptions& waiting) const {
  waiting.check_interrupt();
  if (aborted(nullptr)) throw WaitEnded{{WaitResult::Outcome::kAborted}};
  if (waiting.is_cancelled()) throw WaitEnded{{WaitResult::Outcome::kCancelled}};
}

std::vector<int> SharedTransport::local_members() const {
  std::vector<int> ranks;
  for (const int member : members_)
    if (member != kRemote) ranks.push_back(member);
  return ranks;
}

std::vector<int> SharedTransport::group_members(std::span<const int> members) const {
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(members_[static_cast<std::size_t>(member)]);
  return ranks;
}

std::uint64_t SharedTransport::block_tag(std::uint32_t number) const {
  return mixed(tag_, mixed(kBlocks, number));
}

std::uint64_t SharedTransport::subgroup_tag(std::uint64_t tag) const {
  return mixed(tag_, mixed(kSubgroups, tag));
}

}  // namespace multiring
