// What the ranks of a communicator make together: groups, and memory that all have mapped.

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "collective/collectives.h"
#include "engine/communicator.h"
#include "engine/validate.h"

namespace multiring {
namespace {

constexpr std::size_t kMaxPage = std::size_t{64} << 10;

/// What each rank gathers from all.
Operation gather_of(const OperationRunner& runner, OpKind kind, DType dtype, std::size_t count,
                    std::span<const std::byte> mine, const std::string& name) {
  Operation operation;
  Descriptor& descriptor = operation.descriptor;
  descriptor.key.kind = kind;
  descriptor.key.count = count;
  descriptor.dtype = dtype;
  descriptor.bytes = mine.size();
  descriptor.rows = mine.size() / (count * dtype_size(dtype));
  descriptor.set_name(name);
  operation.input = mine.data();
  runner.complete(operation);
  return operation;
}

/// Runs a part of an operation; errors get the operation's name and `what`.
template <class Body>
void in_steps(const Exchange& exchange, const OperationCall& call, const std::string& what,
              const Body& body) {
  try {
    body();
  } catch (const WaitEnded& ended) {
    exchange.throw_for(call, ended.result);
  } catch (const Error& error) {
    exchange.throw_within(call, error, what);
  }
}

// Ranks tell each other where they listen over the connections that they have: the process that serves the
// store may be gone, and would be missed in every group. `group`: of those `members`, or null.
void exchange_addresses_of(Transport* group, const std::vector<int>& members, OperationRunner& runner,
                           const OperationCall& call) {
  if (runner.transport().shares_memory()) return;
  const std::string mine = group != nullptr ? group->addresses() : "";
  Operation operation = gather_of(runner, call.descriptor.key.kind, DType::kUInt8, 1,
                                  std::as_bytes(std::span(mine)), std::string(call.descriptor.name_view()));
  call.waiting.deadline.start();
  runner.run({operation.descriptor, call.waiting}, operation);
  if (group == nullptr) return;
  std::vector<std::string> all;
  const auto* next = reinterpret_cast<const char*>(operation.output);
  for (const std::uint64_t length : operation.received) {
    all.emplace_back(next, length);
    next += length;
  }
  std::vector<std::string> theirs;
  for (const int member : members) theirs.push_back(all[static_cast<std::size_t>(member)]);
  group->learn_addresses(theirs);
}

}  // namespace

std::shared_ptr<Communicator> Communicator::split(std::int64_t color, std::int64_t key,
                                                  const CallOptions& options) {
  return split_into(color, key, "", options, {});
}

std::shared_ptr<Communicator> Communicator::duplicate(const std::string& purpose, const CallOptions& options,
                                                      const Adjust& adjust) {
  return split_into(0, 0, purpose, options, adjust);
}

std::shared_ptr<Communicator> Communicator::split_into(std::int64_t color, std::int64_t key,
                                                       const std::string& purpose, const CallOptions& options,
                                                       const Adjust& adjust) {
  const std::int64_t mine[2] = {color, key};
  std::vector<std::int64_t> all(2 * static_cast<std::size_t>(size()));
  throw_if_abandoned();
  Operation operation =
      gather_of(runner_, OpKind::kSplit, DType::kInt64, 2, std::as_bytes(std::span(mine)), purpose);
  operation.output = reinterpret_cast<std::byte*>(all.data());
  operation.output_bytes = all.size() * sizeof(std::int64_t);
  const OperationLock operation_lock(queue_, operation, options);
  execute(operation, operation_lock.options());
  ++splits_;
  std::vector<int> members;
  for (int peer = 0; peer < size(); ++peer)
    if (color >= 0 && all[2 * static_cast<std::size_t>(peer)] == color) members.push_back(peer);
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[2 * static_cast<std::size_t>(a) + 1] < all[2 * static_cast<std::size_t>(b) + 1];
  });
  CommunicatorOptions child_options = options_;
  child_options.tuning = this->tuning();
  child_options.timeout = timeout();
  child_options.name =
      name() + "/" + (purpose.empty() ? std::to_string(splits_) + "." + std::to_string(color) : purpose);
  std::vector<int> own(static_cast<std::size_t>(size()));
  std::iota(own.begin(), own.end(), 0);
  if (members != own) {  // a mode, and rules of a tuning, hold for these ranks only
    child_options.mode.clear();
    child_options.tuning = Tuning::parse(child_options.tuning).costs_text();
  }
  if (adjust) adjust(child_options);
  Exchange& exchange = runner_.exchange();
  const OperationRunner::Call call(runner_, operation.descriptor, operation_lock.options());
  try {
    const std::string making = ", making group '" + child_options.name + "'";
    std::shared_ptr<Transport> group;
    if (color >= 0)
      in_steps(exchange, call, making, [&] {
        const auto first = static_cast<std::uint64_t>(std::ranges::min(members));
        group = transport_->subgroup(members, (splits_ << 32) + first, call.waiting);
      });
    exchange_addresses_of(group.get(), members, runner_, call);
    if (color >= 0)
      in_steps(exchange, call, making, [&] { transport_->connect_subgroup(*group, call.waiting); });
    std::shared_ptr<Communicator> child;
    if (color >= 0) child = std::make_shared<Communicator>(std::move(group), std::move(child_options));
    if (child != nullptr && members == own) child->runner_.exchange().plans().share_choices(exchange.plans());
    barrier(exchange, call, operation);  // a rank that could not join its group raises here on all
    return child;
  } catch (...) {
    queue_.fail_and_raise(operation.descriptor);
  }
}

void Communicator::exchange_addresses(const CallOptions& options) {
  Operation operation = gather_of(runner_, OpKind::kAllgather, DType::kUInt8, 1, {}, "init");
  const OperationLock operation_lock(queue_, operation, options);
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  const OperationRunner::Call call(runner_, operation.descriptor, operation_lock.options());
  try {
    exchange_addresses_of(transport_.get(), all, runner_, call);
  } catch (...) {
    queue_.fail_and_raise(operation.descriptor);
  }
}

std::shared_ptr<SymmetricRegion> Communicator::allocate_symmetric(std::size_t bytes,
                                                                  const CallOptions& options) {
  Operation operation;
  operation.descriptor.key.kind = OpKind::kAllocate;
  operation.descriptor.key.count = bytes;
  operation.descriptor.dims = 1;
  operation.descriptor.shape[0] = bytes;
  throw_if_abandoned();
  // Parts are whole pages, one after the other.
  constexpr std::size_t kMax = static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max());
  if (bytes > kMax / static_cast<std::size_t>(size()) - kMaxPage)
    throw_usage(operation, "so much for each of " + std::to_string(size()) + " ranks has no addresses");
  runner_.complete(operation);
  const OperationLock operation_lock(queue_, operation, options);
  execute(operation, operation_lock.options());
  const OperationRunner::Call call(runner_, operation.descriptor, operation_lock.options());
  try {
    std::shared_ptr<SymmetricRegion> region;
    in_steps(runner_.exchange(), call, ", mapping the memory",
             [&] { region = transport_->allocate(bytes, ++regions_, call.waiting); });
    barrier(runner_.exchange(), call, operation);  // a rank that could not map it raises here on all
    runner_.symmetric().add(region);
    return region;
  } catch (...) {
    queue_.fail_and_raise(operation.descriptor);
  }
}

std::shared_ptr<SymmetricRegion> Communicator::locate_symmetric(const std::byte* data, std::size_t bytes,
                                                                std::uint64_t* offset) const {
  throw_if_abandoned();
  return runner_.symmetric().locate(data, bytes, offset);
}

}  // namespace multiring
