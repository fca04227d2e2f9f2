#include "group.h"

#include <cstring>
#include <utility>

#include "errors.h"

namespace multiring::jax_collectives {

Group::Group(std::vector<int> members, int rank, Connect connect)
    : members_(std::move(members)), rank_(rank), connect_(connect) {}

Group::Group(std::string failure)
    : members_(1), rank_(0), connect_(nullptr), failure_(std::move(failure)), rehearsed_(false) {}

mr_communicator* Group::connected(int* code) {
  if (!failure_.empty()) {
    *code = keep_error(failure_);
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr && connect_error_ == 0) {
    char text[2048] = "";
    communicator_ = static_cast<mr_communicator*>(connect_(members_.data(), size(), text, sizeof text));
    if (communicator_ == nullptr) connect_error_ = keep_error(std::string(text));
  }
  *code = connect_error_;
  return communicator_;
}

template <class Call>
int Group::on_communicator(const Call& call) {
  int code = 0;
  mr_communicator* const communicator = connected(&code);
  if (communicator == nullptr) return code;
  mr_error error = MR_ERROR_INIT;
  return call(communicator, &error) == MR_OK ? 0 : keep_error(error);
}

int Group::run(const mr_operation& operation) {
  if (rehearsed_.load(std::memory_order_acquire)) {
    std::memcpy(operation.output, operation.input, operation.output_bytes);
    return 0;
  }
  return on_communicator([&](mr_communicator* communicator, mr_error* error) {
    return mr_communicator_run(communicator, &operation, error);
  });
}

int Group::send(int peer, int tag, const void* data, std::size_t bytes) {
  return on_communicator([&](mr_communicator* communicator, mr_error* error) {
    return mr_communicator_send(communicator, peer, tag, data, bytes, error);
  });
}

int Group::receive(int peer, int tag, void* data, std::size_t bytes) {
  return on_communicator([&](mr_communicator* communicator, mr_error* error) {
    return mr_communicator_receive(communicator, peer, tag, data, bytes, error);
  });
}

}  // namespace multiring::jax_collectives
