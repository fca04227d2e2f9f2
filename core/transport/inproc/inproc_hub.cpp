#include "transport/inproc/inproc_hub.h"

#include <sys/mman.h>

#include <limits>
#include <numeric>
#include <thread>

#include "base/immovable.h"

namespace multiring {
namespace {

/// Zero-filled, and backed by memory only where it is touched: most mailboxes are never used.
class PrivateBlock final : public SharedBlock, Immovable {
 public:
  explicit PrivateBlock(std::size_t bytes)
      : data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                     0)),
        bytes_(bytes) {
    if (data_ == MAP_FAILED) throw_errno("mmap of " + std::to_string(bytes) + " bytes of memory");
  }
  ~PrivateBlock() override { ::munmap(data_, bytes_); }
  std::byte* data() const override { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
  std::size_t bytes_;
};

}  // namespace

class InprocHostGroup final : public HostGroup {
 public:
  InprocHostGroup(std::shared_ptr<InprocHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  std::string host() const override { return "inproc"; }
  std::int64_t process_id(int rank) const override { return rank; }
  std::shared_ptr<SharedBlock> share(std::size_t bytes, std::span<const int> members, std::uint64_t tag,
                                     const WaitOptions&) override {
    return hub_->block(tag, members, bytes);
  }
  bool is_lost(int rank) override {
    return hub_->faults_[static_cast<std::size_t>(rank)].broken.load(std::memory_order_acquire);
  }
  int cores() const override { return hub_->options_.cores; }
  void abandon() override {}
  InprocHub& hub() const { return *hub_; }

 private:
  std::shared_ptr<InprocHub> hub_;
  int rank_;
};

class InprocTransport final : public SharedTransport {
 public:
  InprocTransport(const std::shared_ptr<InprocHostGroup>& group, std::vector<int> members, std::uint64_t tag,
                  const SharedTransportOptions& options, const WaitOptions& waiting)
      : SharedTransport(group, std::move(members), tag, options, waiting),
        faults_(group->hub().faults_[static_cast<std::size_t>(group->rank())]) {}

  void arrive(std::uint64_t round, std::size_t staged) override {
    const std::int64_t delay = faults_.delay_microseconds.load(std::memory_order_acquire);
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    if (!dropped()) SharedTransport::arrive(round, staged);
  }
  WaitResult await_all(std::uint64_t round, const WaitOptions& waiting) override {
    // The dropped arrival ends the round for no rank, so the rank must not run ahead either.
    return SharedTransport::await_all(dropped() ? std::numeric_limits<std::uint64_t>::max() : round, waiting);
  }
  void mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) override {
    if (!dropped()) SharedTransport::mailbox_written(destination, chunk, bytes);
  }
  void mailbox_read(int source, std::uint64_t chunk) override {
    if (!dropped()) SharedTransport::mailbox_read(source, chunk);
  }

  std::shared_ptr<Transport> subgroup(std::span<const int> chosen, std::uint64_t tag,
                                      const WaitOptions& waiting) override {
    return std::make_shared<InprocTransport>(std::static_pointer_cast<InprocHostGroup>(host_group()),
                                             group_members(chosen), subgroup_tag(tag), options(), waiting);
  }

 private:
  bool dropped() const { return faults_.dropped.load(std::memory_order_acquire); }

  InprocHub::Faults& faults_;  // owned by the hub, which the group keeps alive
};

InprocHub::InprocHub(int size, const Options& options)
    : options_(options), faults_(static_cast<std::size_t>(size)) {}

std::shared_ptr<Transport> InprocHub::connect(int rank, const WaitOptions& waiting) {
  std::vector<int> members(static_cast<std::size_t>(size()));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<InprocTransport>(std::make_shared<InprocHostGroup>(shared_from_this(), rank),
                                           std::move(members), 1, options_.transport, waiting);
}

std::shared_ptr<HostGroup> InprocHub::host_group(int rank) {
  return std::make_shared<InprocHostGroup>(shared_from_this(), rank);
}

void InprocHub::delay(int rank, std::chrono::microseconds by) {
  faults_[static_cast<std::size_t>(rank)].delay_microseconds.store(by.count(), std::memory_order_release);
}

void InprocHub::drop(int rank) {
  faults_[static_cast<std::size_t>(rank)].dropped.store(true, std::memory_order_release);
}

void InprocHub::break_rank(int rank) {
  drop(rank);
  faults_[static_cast<std::size_t>(rank)].broken.store(true, std::memory_order_release);
}

std::shared_ptr<SharedBlock> InprocHub::block(std::uint64_t tag, std::span<const int> members,
                                              std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  Offer& offer = blocks_[{tag, members[0]}];
  if (offer.block == nullptr) offer.block = std::make_shared<PrivateBlock>(bytes);
  auto block = offer.block;
  if (++offer.taken == members.size()) blocks_.erase({tag, members[0]});
  return block;
}

}  // namespace multiring
