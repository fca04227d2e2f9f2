#include "transport/world/init_warning.h"

#include <vector>

#include "base/host_identity.h"
#include "base/text.h"

namespace multiring {
namespace {

constexpr double kLongest = 2.0;  // seconds that asking the store may take

struct NoAnswer {};

}  // namespace

void InitWarning::check(double waited) {
  if (checked_ || !address_.warn || address_.stall_warning <= 0 || waited < address_.stall_warning) return;
  checked_ = true;
  std::vector<int> missing;
  try {
    // The store may be what does not answer; this is within a wait, which tells of that.
    const Deadline deadline = Deadline::after(kLongest);
    deadline.start();
    const std::function<void()> give_up = [&] {
      if (deadline.expired()) throw NoAnswer();
    };
    for (int rank = 0; rank < address_.size; ++rank) {
      if (rank == address_.rank) continue;
      if (!has_come(rank, WaitOptions{}.with_interrupt(give_up)))
        missing.push_back(rank);
      else if (rank < address_.rank)
        return;
    }
  } catch (const NoAnswer&) {
    return;
  }
  const std::string begin = "rank " + std::to_string(address_.rank) + " on " + host_name() + " has waited " +
                            seconds_text(waited) + " in init";
  if (missing.empty())
    return address_.warn(begin + ": all " + std::to_string(address_.size) +
                         " ranks have come and are still connecting: is a firewall between them, or an "
                         "interface that others cannot reach (MULTIRING_INTERFACES)?" +
                         kHowToSilence);
  address_.warn(
      begin + " for " + missing_ranks(address_, missing) +
      ", still importing, not started, failed before init, or given another store: look at their output" +
      kHowToSilence);
}

bool InitWarning::has_come(int rank, const WaitOptions& waiting) const {
  try {
    store_.get(prefix_ + std::to_string(rank), 0.0, waiting);
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw NoAnswer();
    return false;
  }
}

}  // namespace multiring
