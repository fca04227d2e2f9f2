#include "support/network/inproc_mpi.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace multiring::testing {
namespace {

using Request = InprocMpi::Request;
using Rank = InprocMpi::Rank;

constexpr std::size_t kEager = 4096;

// The handle of a group is the rank itself.
Rank& rank_of(multiring_mpi_group* group) { return *reinterpret_cast<Rank*>(group); }
const Rank& rank_of(const multiring_mpi_group* group) { return *reinterpret_cast<const Rank*>(group); }

int open_group(const void* communicator, multiring_mpi_group** group, char*, size_t) {
  *group = reinterpret_cast<multiring_mpi_group*>(const_cast<void*>(communicator));
  return 0;
}
void finalize() {}
int finalized() { return 0; }
int rank_number(const multiring_mpi_group* group) { return rank_of(group).number; }
int world_size(const multiring_mpi_group* group) { return rank_of(group).world->size(); }
int largest_tag(const multiring_mpi_group*) { return (1 << 23) - 1; }
const char* library() { return "threads of a test"; }

std::shared_ptr<Request>* owned(const multiring_mpi_request& handle) {
  return reinterpret_cast<std::shared_ptr<Request>*>(handle.value);
}

std::vector<std::byte> gathered(const Request& send) {
  if (!send.copy.empty() || send.bytes == 0) return send.copy;
  std::vector<std::byte> bytes;
  for (const multiring_mpi_part& part : send.parts) {
    const auto* data = static_cast<const std::byte*>(part.data);
    bytes.insert(bytes.end(), data, data + part.bytes);
  }
  return bytes;
}

void deliver(Request& send, Request& receive) {
  const std::vector<std::byte> bytes = gathered(send);
  if (bytes.size() > receive.bytes)
    receive.outcome = MULTIRING_MPI_TRUNCATED;
  else if (!bytes.empty())
    std::memcpy(receive.memory, bytes.data(), bytes.size());
  receive.bytes = std::min(bytes.size(), receive.bytes);
  receive.source = send.source;
  receive.done = true;
  send.done = true;
}

bool matches(const Request& send, const Request& receive) {
  return send.tag == receive.tag && (receive.source < 0 || receive.source == send.source);
}

std::uint64_t give_handle(Rank& rank, const std::shared_ptr<Request>& request) {
  auto* const handle = new std::shared_ptr<Request>(request);
  rank.handles.insert(handle);
  return reinterpret_cast<std::uint64_t>(handle);
}

int post_send(multiring_mpi_group* group, const multiring_mpi_part* parts, size_t count, int destination,
              int tag, multiring_mpi_request* handle, char*, size_t) {
  Rank& self = rank_of(group);
  auto send = std::make_shared<Request>();
  send->poster = &self;
  send->is_send = true;
  send->source = self.number;
  send->tag = tag;
  for (size_t index = 0; index < count; ++index) {
    send->parts.push_back(parts[index]);
    send->bytes += parts[index].bytes;
  }
  if (send->bytes <= kEager) {
    send->copy = gathered(*send);
    send->done = true;
  }
  const std::lock_guard lock(self.world->mutex);
  handle->value = give_handle(self, send);
  Rank& other = self.world->rank(destination);
  const auto found =
      std::ranges::find_if(other.posted, [&](const auto& receive) { return matches(*send, *receive); });
  if (found == other.posted.end()) {
    other.arrived.push_back(send);
    return 0;
  }
  deliver(*send, **found);
  other.posted.erase(found);
  return 0;
}

int post_receive(multiring_mpi_group* group, void* data, size_t bytes, int source, int tag,
                 multiring_mpi_request* handle, char*, size_t) {
  Rank& self = rank_of(group);
  auto receive = std::make_shared<Request>();
  receive->poster = &self;
  receive->source = source;
  receive->tag = tag;
  receive->memory = static_cast<std::byte*>(data);
  receive->bytes = bytes;
  const std::lock_guard lock(self.world->mutex);
  handle->value = give_handle(self, receive);
  const auto found =
      std::ranges::find_if(self.arrived, [&](const auto& send) { return matches(*send, *receive); });
  if (found == self.arrived.end()) {
    self.posted.push_back(receive);
    return 0;
  }
  deliver(**found, *receive);
  self.arrived.erase(found);
  return 0;
}

int test(multiring_mpi_request* handles, int count, int, multiring_mpi_completion* done, int* done_count,
         char*, size_t) {
  *done_count = 0;
  for (int index = 0; index < count; ++index) {
    std::shared_ptr<Request>* const request = owned(handles[index]);
    if (request == nullptr) continue;
    const std::lock_guard lock((*request)->poster->world->mutex);
    if (!(*request)->done) continue;
    const Request& each = **request;
    each.poster->handles.erase(request);
    done[(*done_count)++] = {index, each.outcome, each.source, each.is_send ? 0 : each.bytes};
    delete request;
    handles[index].value = 0;
  }
  return 0;
}

void cancel(multiring_mpi_request* handle) {
  std::shared_ptr<Request>* const request = owned(*handle);
  if (request == nullptr) return;
  Rank& self = *(*request)->poster;
  const std::lock_guard lock(self.world->mutex);
  if (std::erase(self.posted, *request) > 0) (*request)->done = true;
}

constexpr multiring_mpi kFunctions = {MULTIRING_MPI_VERSION, 0,          open_group,  finalize, finalized,
                                      rank_number,           world_size, largest_tag, library,  post_send,
                                      post_receive,          test,       cancel};

}  // namespace

InprocMpi::InprocMpi(int size) : ranks_(static_cast<std::size_t>(size)) {
  for (int number = 0; number < size; ++number) {
    rank(number).world = this;
    rank(number).number = number;
  }
}

InprocMpi::~InprocMpi() {
  for (const Rank& rank : ranks_)
    for (const auto* const handle : rank.handles) delete handle;
}

std::shared_ptr<MpiSession> InprocMpi::session(int number) {
  return std::make_shared<MpiSession>(kFunctions, &rank(number));
}

MpiOptions mpi_options(int rank, int size, int channels, const std::string& name) {
  MpiOptions options;
  options.rank = rank;
  options.members.resize(static_cast<std::size_t>(size));
  std::iota(options.members.begin(), options.members.end(), 0);
  options.hosts.assign(static_cast<std::size_t>(size), "host");
  options.channels = channels;
  options.name = name;
  return options;
}

}  // namespace multiring::testing
