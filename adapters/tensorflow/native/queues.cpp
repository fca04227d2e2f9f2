#include "queues.h"

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define MULTIRING_EXPORT extern "C" __attribute__((visibility("default")))

namespace multiring::tensorflow {
namespace {

// Queues stay valid to the end of the process, so entries are never taken back.
struct Registry {
  std::mutex mutex;
  std::vector<mr_queue*> queues;
  std::map<std::pair<int64_t, std::string>, int64_t> steps;  // by the number of a queue and a name
  std::set<std::pair<int64_t, std::string>> running;
};

Registry& registry() {
  static Registry* const instance = new Registry;  // never destroyed: kernels may run while the process ends
  return *instance;
}

}  // namespace

mr_queue* find_queue(int64_t number) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (number < 1 || static_cast<size_t>(number) > all.queues.size()) return nullptr;
  return all.queues[static_cast<size_t>(number) - 1];
}

int64_t next_step(int64_t queue, const std::string& name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return ++all.steps[{queue, name}];
}

bool begin_run(int64_t queue, const std::string& name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.running.insert({queue, name}).second;
}

void end_run(int64_t queue, const std::string& name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.running.erase({queue, name});
}

}  // namespace multiring::tensorflow

/* Registers a queue by its address; returns its number, from 1. Called by the Python part. */
MULTIRING_EXPORT int64_t multiring_tensorflow_register_queue(void* queue) {
  auto& all = multiring::tensorflow::registry();
  const std::lock_guard lock(all.mutex);
  all.queues.push_back(static_cast<mr_queue*>(queue));
  return static_cast<int64_t>(all.queues.size());
}
