#include "copies.h"

#include <cstring>

#include "pending_calls.h"

namespace multiring::xla {
namespace {

[[noreturn]] void fail(mr_queue* queue, mr_error error, const std::string& what) {
  const std::string message = what + ": " + error.message;
  mr_error_set_message(&error, message.c_str());
  error.number = 0;  // what is kept under that does not say what it was for
  mr_queue_keep(queue, &error, nullptr);
  PendingTable::instance().wait_for_all(queue, mr_queue_is_broken(queue) != 0);
  throw Failure(error);
}

}  // namespace

void copy(const Call& call, mr_queue* queue, const Buffer& to, const Buffer& from, const std::string& what) {
  const std::size_t bytes = byte_count(from);
  if (bytes == 0 || to.data == from.data) return;
  if (!call.on_device()) {
    std::memcpy(to.data, from.data, bytes);
    return;
  }
  mr_error error;
  if (mr_device_copy(queue, to.data, from.data, bytes, call.stream(), &error) != MR_OK)
    fail(queue, error, what);
}

void read(const Call& call, mr_queue* queue, void* to, const std::byte* from, std::size_t bytes,
          const std::string& what) {
  mr_error error;
  if (mr_device_read(queue, to, from, bytes, call.stream(), &error) != MR_OK) fail(queue, error, what);
}

}  // namespace multiring::xla
