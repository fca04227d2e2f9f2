#include "fake_nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "fake_cuda/machine.h"

namespace multiring::testing::fake_nccl {
namespace {

FakeMachine& machine() { return FakeMachine::current(); }

std::string text_of(const Header& header) {
  static constexpr const char* kNames[] = {"allreduce", "reduce_scatter", "reduce", "allgather",
                                           "broadcast", "send",           "receive"};
  return std::string(kNames[static_cast<int>(header.function)]) + " of " + std::to_string(header.count) +
         " of dtype " + std::to_string(header.dtype) + ", op " + std::to_string(header.op) + ", root " +
         std::to_string(header.root);
}

/// Bytes that a rank contributes.
std::size_t input_bytes(const Header& header, int size, int rank) {
  const std::size_t bytes = header.count * dtype_size(header.dtype);
  if (header.function == Function::kReceive) return 0;
  if (header.function == Function::kBroadcast) return header.root == rank ? bytes : 0;
  return header.function == Function::kReduceScatter ? bytes * static_cast<std::size_t>(size) : bytes;
}

}  // namespace

std::string options() {
  const char* const set = std::getenv("FAKE_NCCL");
  return set != nullptr ? set : "";
}

bool is_set(const std::string& word) {
  std::istringstream words(options());
  for (std::string each; words >> each;)
    if (each == word) return true;
  return false;
}

/// A call, with the names of the files that it writes and reads.
struct Communicator::Under {
  Call call;
  std::string writes;
  std::string reads;
  bool hangs = false;
};

Communicator::Communicator(std::string path, int size, int rank, int device)
    : path_(std::move(path)), size_(size), rank_(rank), device_(device), hangs_(is_set("hang=init")) {
  if (!hangs_) publish("init", std::to_string(device_).c_str(), 1);
}

std::string Communicator::file(const std::string& of, int of_rank) const {
  return path_ + "." + of + "." + std::to_string(of_rank);
}

/// Another rank sees the file when it is whole.
void Communicator::publish(const std::string& of, const void* data, std::size_t bytes) {
  const std::string made = file(of, rank_);
  std::ofstream(made + ".part", std::ios::binary)
      .write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  std::filesystem::rename(made + ".part", made);
  const std::lock_guard lock(mutex_);
  published_.push_back(made);
}

bool Communicator::is_published(const std::string& of, int of_rank) const {
  return std::filesystem::exists(file(of, of_rank));
}

std::vector<char> Communicator::read(const std::string& of, int of_rank) const {
  std::ifstream from(file(of, of_rank), std::ios::binary);
  return {std::istreambuf_iterator<char>(from), {}};
}

void Communicator::ask(std::vector<Call> calls) {
  asked_ = std::move(calls);
  queries_until_begun_ = 3;
}

void Communicator::fail(int error, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (error_ != kSuccess) return;
  last_error_ = text;
  error_ = error;
}

std::string Communicator::last_error() {
  const std::lock_guard lock(mutex_);
  return last_error_;
}

int Communicator::state() {
  if (error_ != kSuccess) return error_;
  if (!asked_.empty()) {
    if (--queries_until_begun_ > 0) return kInProgress;
    begin(std::exchange(asked_, {}));
    return kInProgress;
  }
  return is_connected_ ? kSuccess : connect();
}

int Communicator::connect() {
  if (hangs_) return kInProgress;
  std::set<std::vector<char>> devices;
  for (int rank = 0; rank < size_; ++rank) {
    if (!is_published("init", rank)) return kInProgress;
    devices.insert(read("init", rank));
  }
  is_connected_ = shares_devices() || static_cast<int>(devices.size()) == size_;
  return is_connected_ ? kSuccess : kInvalidUsage;
}

/// Collectives are counted; messages for each pair of ranks and direction.
Communicator::Under Communicator::named(const Call& call) {
  const auto of_pair = [](int from, int to, int number) {
    return "from" + std::to_string(from) + "to" + std::to_string(to) + "." + std::to_string(number);
  };
  Under under{call, "", "", is_set("hang=operation")};
  if (call.header.function == Function::kSend)
    under.writes = of_pair(rank_, call.peer, sent_[call.peer]++);
  else if (call.header.function == Function::kReceive)
    under.reads = of_pair(call.peer, rank_, received_[call.peer]++);
  else
    under.writes = under.reads = std::to_string(collectives_++);
  return under;
}

/// Of which ranks it reads.
std::vector<int> Communicator::sources(const Call& call) const {
  const Header& header = call.header;
  switch (header.function) {
    case Function::kSend:
      return {};
    case Function::kReceive:
      return {call.peer};
    case Function::kBroadcast:
      return {header.root};
    default:
      break;
  }
  if (header.function == Function::kReduce && header.root != rank_) return {};
  std::vector<int> all;
  for (int rank = 0; rank < size_; ++rank) all.push_back(rank);
  return all;
}

/// None of a group waits for another one of it before it contributes.
void Communicator::begin(const std::vector<Call>& calls) {
  if (is_set("fail=operation")) fail(kRemoteError, "the last error");
  const std::lock_guard lock(machine().mutex());
  std::vector<std::pair<Under, FakeMachine::Stream*>> begun;
  for (const Call& call : calls) begun.emplace_back(named(call), machine().find_stream(call.stream, device_));
  for (const auto& [under, stream] : begun) {
    if (under.writes.empty()) continue;
    machine().enqueue(*stream, {.work = [self = shared_from_this(), under = under] {
      if (self->is_aborted_) return;
      const Header& header = under.call.header;
      std::vector<char> data(sizeof header);
      std::memcpy(data.data(), &header, sizeof header);
      const std::size_t bytes = input_bytes(header, self->size_, self->rank_);
      const auto* const from = reinterpret_cast<const char*>(machine().view(under.call.input));
      if (bytes > 0) data.insert(data.end(), from, from + bytes);
      self->publish(under.writes, data.data(), data.size());
    }});
  }
  for (const auto& [under, stream] : begun)
    machine().enqueue(*stream, {.work = [self = shared_from_this(), under = under] { self->finish(under); },
                                .is_possible = [self = shared_from_this(),
                                                under = under] { return self->is_possible(under); }});
}

bool Communicator::is_possible(const Under& under) {
  if (is_aborted_) return true;
  if (under.hangs || error_ != kSuccess) return false;
  Header wanted = under.call.header;
  if (wanted.function == Function::kReceive) wanted.function = Function::kSend;
  for (const int rank : sources(under.call)) {
    if (!is_published(under.reads, rank)) return false;
    Header theirs{};
    std::ifstream in(file(under.reads, rank), std::ios::binary);
    if (!in.read(reinterpret_cast<char*>(&theirs), sizeof theirs)) return false;  // it has aborted since
    if (theirs == wanted) continue;
    fail(kInvalidUsage, "rank " + std::to_string(rank) + " asks for " + text_of(theirs) + ", rank " +
                            std::to_string(rank_) + " for " + text_of(wanted));
    return false;
  }
  return true;
}

void Communicator::finish(const Under& under) const {
  if (is_aborted_) return;
  const Header& header = under.call.header;
  std::vector<std::vector<char>> parts;
  for (const int rank : sources(under.call)) {
    parts.push_back(read(under.reads, rank));
    if (parts.back().size() < sizeof(Header)) return;  // the rank has aborted since
    parts.back().erase(parts.back().begin(), parts.back().begin() + sizeof(Header));
  }
  if (parts.empty()) return;
  std::byte* to = machine().view(under.call.output);
  const auto write = [&to](const char* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    to += bytes;
  };
  if (header.op < 0) {
    for (const std::vector<char>& part : parts) write(part.data(), part.size());
    return;
  }
  const std::vector<char> sum = reduced(std::move(parts), header.dtype, header.op);
  const std::size_t bytes = header.count * dtype_size(header.dtype);
  const bool scatters = header.function == Function::kReduceScatter;
  write(sum.data() + (scatters ? bytes * static_cast<std::size_t>(rank_) : 0), bytes);
}

void Communicator::abort() {
  while (is_set("hang=abort")) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  is_aborted_ = true;
  const std::lock_guard lock(mutex_);
  for (const std::string& each : std::exchange(published_, {})) std::filesystem::remove(each);
}

}  // namespace multiring::testing::fake_nccl
