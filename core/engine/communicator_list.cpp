#include "engine/communicator_list.h"

#include <pthread.h>

#include <mutex>
#include <optional>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "engine/communicator.h"

namespace multiring {
namespace {

struct Listed {
  std::mutex mutex;  // guards communicators; held across a fork, so that the child finds them whole
  std::unordered_set<Communicator*> communicators;
};

/// Never destroyed: a process may fork until its very end.
Listed& listed() {
  static auto* const all = new Listed;
  return *all;
}

void before_fork() { listed().mutex.lock(); }

void after_fork_in_parent() { listed().mutex.unlock(); }

void after_fork_in_child() {
  for (Communicator* const communicator : listed().communicators) communicator->abandon();
  listed().mutex.unlock();
}

void watch_forks() {
  static const int error = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_atfork");
}

}  // namespace

void CommunicatorList::add(Communicator* communicator) {
  watch_forks();
  const std::lock_guard lock(listed().mutex);
  listed().communicators.insert(communicator);
}

void CommunicatorList::remove(Communicator* communicator) {
  const std::lock_guard lock(listed().mutex);
  listed().communicators.erase(communicator);
}

std::string CommunicatorList::find_other_wait(const Communicator* here, int world_rank) {
  const std::lock_guard lock(listed().mutex);
  for (const Communicator* const each : listed().communicators)
    if (each != here)
      if (std::string found = each->wait_on_this_rank(world_rank); !found.empty()) return found;
  return "";
}

std::string CommunicatorList::find_other_end(const Communicator* here, int world_rank) {
  const std::lock_guard lock(listed().mutex);
  for (const Communicator* const each : listed().communicators)
    if (each != here && each->is_of_world(*here))
      if (std::string found = each->end_of(world_rank); !found.empty()) return found;
  return "";
}

std::vector<WaitInProgress> CommunicatorList::waits() {
  const std::lock_guard lock(listed().mutex);
  std::vector<WaitInProgress> found;
  for (const Communicator* const each : listed().communicators)
    if (std::optional<WaitInProgress> wait = each->wait_in_progress()) found.push_back(std::move(*wait));
  return found;
}

std::vector<std::shared_ptr<Communicator>> CommunicatorList::find(const std::vector<std::string>& names) {
  const std::lock_guard lock(listed().mutex);
  std::vector<std::shared_ptr<Communicator>> found;
  for (const std::string& name : names)
    for (Communicator* const each : listed().communicators)
      if (each->user_name() == name)
        if (auto held = each->weak_from_this().lock()) found.push_back(std::move(held));
  return found;
}

void CommunicatorList::fail(const std::vector<std::string>& names, const std::string& message) {
  for (const auto& each : find(names)) {
    ErrorContext context;
    context.rank = each->rank();
    context.host = each->host();
    each->abort_with(Error(ErrorKind::kMismatch, message, context));
  }
}

}  // namespace multiring
