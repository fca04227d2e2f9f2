#include "support/processes.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>
#include <thread>

#include "support/rank_group.h"
#include "transport/shm/shm_transport.h"

namespace multiring::testing {
namespace {

const double kLimit = 40 * kSlowness;

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

/// A file for each key.
class DirectoryStore final : public Store {
 public:
  explicit DirectoryStore(std::string directory) : directory_(std::move(directory)) {}
  void set(const std::string& key, const std::string& value) override {
    const std::string path = path_of(key);
    std::ofstream(path + ".new") << value;
    std::filesystem::rename(path + ".new", path);
  }
  std::string get(const std::string& key, double seconds) override {
    const Deadline deadline = Deadline::after(seconds);
    for (;;) {
      if (std::ifstream file(path_of(key)); file) {
        std::ostringstream value;
        value << file.rdbuf();
        return value.str();
      }
      if (deadline.expired()) throw Error(ErrorKind::kTimeout, "no rank has set " + key);
      nap();
    }
  }

 private:
  std::string path_of(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '-';
    return directory_ + "/" + key;
  }
  std::string directory_;
};

}  // namespace

double Processes::seconds_now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

Processes::Processes(int size, const Body& body) : size_(size) {
  directory_ = (std::filesystem::temp_directory_path() / "multiring-test-XXXXXX").string();
  if (::mkdtemp(directory_.data()) == nullptr) throw_errno("mkdtemp");
  void* memory = ::mmap(nullptr, static_cast<std::size_t>(size) * sizeof(Report), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap");
  reports_ = static_cast<Report*>(memory);
  for (int rank = 0; rank < size; ++rank) new (&reports_[rank]) Report;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) throw_errno("fork");
    if (pid == 0) run_rank(rank, body);
    running_.push_back(pid);
  }
}

void Processes::run_rank(int rank, const Body& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Report& report = reports_[rank];
  try {
    DirectoryStore store(directory_);
    ShmOptions options;
    options.rank = rank;
    options.size = size_;
    options.transport.staging_bytes = 4096;
    Waiting waiting;
    waiting.deadline = Deadline::after(kLimit);
    CommunicatorOptions communicator_options;
    communicator_options.timeout = 2 * kLimit;
    const auto communicator =
        std::make_shared<Communicator>(connect_shm(store, options, waiting), communicator_options);
    body(*communicator, report);
  } catch (const Error& error) {
    report.kind = error.kind();
    report.at = seconds_now();
    std::strncpy(report.text, error.what(), sizeof report.text - 1);
    report.raised = true;
  }
  ::_exit(0);
}

bool Processes::await_progress(int progress) {
  const Deadline deadline = Deadline::after(kLimit);
  for (int rank = 0; rank < size_; ++rank) {
    while (reports_[rank].progress < progress) {
      if (deadline.expired()) return false;
      nap();
    }
  }
  return true;
}

void Processes::kill(int rank) { ::kill(running_[static_cast<std::size_t>(rank)], SIGKILL); }

bool Processes::wait() {
  const Deadline deadline = Deadline::after(kLimit);
  for (pid_t& pid : running_) {
    while (pid != 0) {
      if (::waitpid(pid, nullptr, WNOHANG) == pid) {
        pid = 0;
      } else if (deadline.expired()) {
        return false;
      } else {
        nap();
      }
    }
  }
  return true;
}

Processes::~Processes() {
  for (const pid_t pid : running_) {
    if (pid == 0) continue;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  ::munmap(reports_, static_cast<std::size_t>(size_) * sizeof(Report));
  std::filesystem::remove_all(directory_);
}

}  // namespace multiring::testing
