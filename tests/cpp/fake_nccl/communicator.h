#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace multiring::testing::fake_nccl {

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class Function : int { kAllreduce, kReduceScatter, kReduce, kAllgather, kBroadcast, kSend, kReceive };

/// What has to be the same on all ranks, or in a send and the receive of it.
struct Header {
  Function function;
  int dtype;
  int op = -1;
  int root = -1;
  std::size_t count;

  bool operator==(const Header&) const = default;
};

/// A call in a group. What a rank contributes passes through a file, which it writes when its stream gets
/// there.
struct Call {
  Header header;
  int peer = -1;  ///< of a send or a receive
  const void* input = nullptr;
  void* output = nullptr;
  std::uintptr_t stream = 0;
};

/// A rank's part of a communicator. A call ends when what it reads is there, and so before those of the
/// others where it reads nothing of them: a root that sends, a rank whose reduction another one gets. Where
/// ranks ask for different things that is an error of the rank that reads it, and the call never ends.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::string path, int size, int rank, int device);

  int size() const { return size_; }
  int rank() const { return rank_; }
  int device() const { return device_; }
  bool is_connected() const { return is_connected_; }
  bool has_begun() const { return asked_.empty(); }

  /// To begin when the state has been asked for some times.
  void ask(std::vector<Call> calls);
  /// ncclCommGetAsyncError; lets it go on.
  int state();
  void fail(int error, const std::string& text);
  std::string last_error();
  void abort();

 private:
  struct Under;

  std::string file(const std::string& of, int of_rank) const;
  void publish(const std::string& of, const void* data, std::size_t bytes);
  bool is_published(const std::string& of, int of_rank) const;
  std::vector<char> read(const std::string& of, int of_rank) const;
  int connect();
  void begin(const std::vector<Call>& calls);
  Under named(const Call& call);
  std::vector<int> sources(const Call& call) const;
  bool is_possible(const Under& under);
  void finish(const Under& under) const;

  const std::string path_;  // all files of the communicator begin so
  const int size_;
  const int rank_;
  const int device_;
  bool hangs_ = false;
  bool is_connected_ = false;
  int collectives_ = 0;
  std::map<int, int> sent_;  // messages, by the peer
  std::map<int, int> received_;
  std::vector<Call> asked_;
  int queries_until_begun_ = 0;
  std::vector<std::string> published_;
  std::atomic<int> error_{kSuccess};
  std::atomic<bool> is_aborted_{false};
  std::mutex mutex_;  // guards all below
  std::string last_error_;
};

/// The words of the variable FAKE_NCCL.
bool is_set(const std::string& word);
std::string options();
bool shares_devices();

/// Bytes of an element; 0: there is no such dtype.
std::size_t dtype_size(int dtype);
/// Adds what ranks contribute, from the last one to the first.
std::vector<char> reduced(std::vector<std::vector<char>> inputs, int dtype, int op);

}  // namespace multiring::testing::fake_nccl
