#include "support/stopwatch.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace multiring::testing {
namespace {

/// Seconds that each thread has been ready to run without a processor, ever; none where the kernel does not
/// tell.
std::map<int, double> held_up() {
  std::map<int, double> seconds;
  std::error_code ignored;  // a thread may end meanwhile
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    std::ifstream file(task.path() / "schedstat");
    double running = 0;
    double waiting = 0;  // both in nanoseconds
    if (file >> running >> waiting) seconds[std::stoi(task.path().filename().string())] = waiting / 1e9;
  }
  return seconds;
}

}  // namespace

Stopwatch::Stopwatch() : held_up_before_(held_up()), start_(Clock::now()) {}

double Stopwatch::seconds() const {
  double seconds = seconds_between(start_, Clock::now());
  for (const auto& [thread, held] : held_up()) {
    const auto before = held_up_before_.find(thread);
    seconds -= held - (before == held_up_before_.end() ? 0.0 : before->second);
  }
  return seconds;
}

}  // namespace multiring::testing
