#include "multiring.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/hash/checksum.h"
#include "capi/handles.h"
#include "collective/kinds.h"
#include "engine/communicator.h"
#include "transport/shm/shm_transport.h"

#ifndef MULTIRING_VERSION
#error "MULTIRING_VERSION comes from the build"
#endif

struct mr_memory {
  std::shared_ptr<multiring::SymmetricRegion> region;
  int rank;
};

namespace multiring {
namespace {

class CallbackStore final : public Store {
 public:
  explicit CallbackStore(const mr_store& store) : store_(store) {}
  void set(const std::string& key, const std::string& value, const WaitOptions& /*waiting*/) override {
    if (store_.set(store_.context, key.c_str(), value.data(), value.size()) != 0)
      throw Error(ErrorKind::kInternal, "the store's set callback failed for key '" + key + "'");
  }
  std::string get(const std::string& key, double seconds, const WaitOptions& /*waiting*/) override {
    char value[4096];
    std::size_t length = 0;
    const int status = store_.get(store_.context, key.c_str(), seconds, value, sizeof value, &length);
    if (status == 1) throw Error(ErrorKind::kTimeout, "no rank has set '" + key + "' in the store");
    if (status != 0 || length > sizeof value)
      throw Error(ErrorKind::kInternal, "the store's get callback failed for key '" + key + "'");
    return std::string(value, length);
  }

 private:
  const mr_store store_;
};

std::vector<std::shared_ptr<NamedQueue>> queues_of(mr_communicator* communicator) {
  std::vector<std::shared_ptr<NamedQueue>> queues;
  const std::lock_guard lock(communicator->mutex);
  for (const auto& weak : communicator->queues)
    if (auto queue = weak.lock()) queues.push_back(std::move(queue));
  return queues;
}

}  // namespace
}  // namespace multiring

using multiring::guarded;

const char* mr_version(void) { return MULTIRING_VERSION; }

const char* mr_status_name(mr_status status) {
  const bool known = status >= 0 && status <= MR_INTERNAL;
  return multiring::error_class_name(static_cast<multiring::ErrorKind>(known ? status : MR_INTERNAL));
}

int mr_status_code(mr_status status) {
  constexpr int kInternal = 13;
  static constexpr int kCodes[] = {0, 3, 9, 4, 14, 10, kInternal};  // in the order of mr_status
  const auto index = static_cast<std::size_t>(status);
  return index < std::size(kCodes) ? kCodes[index] : kInternal;
}

mr_output mr_output_of(mr_kind kind) {
  return static_cast<mr_output>(multiring::traits_of(static_cast<multiring::OpKind>(kind)).output);
}

uint64_t mr_checksum(const void* data, size_t bytes, uint64_t seed) {
  return multiring::checksum(data, bytes, seed);
}

mr_status mr_world_create(const mr_store* store, const mr_world_options* options, mr_communicator** world,
                          mr_error* error) {
  return guarded(error, [&] {
    if (options->struct_size != sizeof(mr_world_options))
      multiring::refuse("mr_world_options of another version: initialise them with MR_WORLD_OPTIONS_INIT");
    if (options->size < 1 || options->rank < 0 || options->rank >= options->size)
      multiring::refuse("rank " + std::to_string(options->rank) + " of size " +
                        std::to_string(options->size));
    multiring::CallbackStore rendezvous(*store);
    multiring::ShmOptions shm;
    shm.rank = options->rank;
    shm.size = options->size;
    shm.socket_directory = options->socket_directory != nullptr ? options->socket_directory : "";
    if (options->staging_bytes > 0) shm.transport.staging_bytes = options->staging_bytes;
    multiring::CommunicatorOptions communicator;
    if (options->timeout > 0) communicator.timeout = options->timeout;
    multiring::WaitOptions waiting;
    waiting.deadline = multiring::Deadline::after(communicator.timeout);
    *world = new mr_communicator(std::make_shared<multiring::Communicator>(
        multiring::connect_shm(rendezvous, shm, waiting), std::move(communicator)));
  });
}

int mr_rank(const mr_communicator* communicator) { return communicator->communicator->rank(); }
int mr_size(const mr_communicator* communicator) { return communicator->communicator->size(); }

mr_status mr_split(mr_communicator* communicator, int64_t color, int64_t key, mr_communicator** child,
                   mr_error* error) {
  return guarded(error, [&] {
    auto group = communicator->communicator->split(color, key, {});
    *child = group != nullptr ? new mr_communicator(std::move(group)) : nullptr;
  });
}

void mr_abort(mr_communicator* communicator, const char* message) {
  const std::string text = message != nullptr ? message : "aborted";
  for (const auto& queue : multiring::queues_of(communicator))
    guarded(nullptr, [&] { queue->abort(multiring::Error(multiring::ErrorKind::kAborted, text)); });
  guarded(nullptr, [&] { communicator->communicator->abort(text); });
}

void mr_communicator_free(mr_communicator* communicator) {
  if (communicator == nullptr) return;
  guarded(nullptr, [&] {
    for (const auto& queue : multiring::queues_of(communicator)) queue->close();
    communicator->communicator->close();
  });
  delete communicator;
}

mr_status mr_run(mr_communicator* communicator, const mr_operation* operation, double timeout,
                 mr_work** result, mr_error* error) {
  return guarded(error, [&] {
    multiring::Communicator& group = *communicator->communicator;
    multiring::Operation converted = multiring::convert(*operation, group.size());
    const multiring::CallOptions options{timeout, nullptr};
    if (operation->kind == MR_SEND)
      group.send(converted, operation->tag, options);
    else if (operation->kind == MR_RECV)
      group.receive(converted, operation->tag, options);
    else
      group.run(converted, options);
    if (result != nullptr) *result = new mr_work{nullptr, std::move(converted)};
  });
}

mr_status mr_submit(mr_communicator* communicator, const mr_operation* operation, mr_work** work,
                    mr_error* error) {
  return guarded(error, [&] {
    if (operation->kind == MR_SEND || operation->kind == MR_RECV)
      multiring::refuse("send and recv run by mr_run only");
    multiring::Communicator& group = *communicator->communicator;
    *work = new mr_work{
        group.submit(multiring::convert(*operation, group.size()), operation->priority, nullptr), {}};
  });
}

int mr_work_done(const mr_work* work) { return work->work == nullptr || work->work->done() ? 1 : 0; }

mr_status mr_work_wait(mr_work* work, double timeout, mr_error* error) {
  return guarded(error, [&] {
    if (work->work == nullptr) return;
    work->work->wait(timeout < 0 ? multiring::Deadline::never() : multiring::Deadline::after(timeout), {});
  });
}

const void* mr_work_result(const mr_work* work, size_t* bytes, uint64_t* rows) {
  const multiring::Operation& operation = work->operation();
  if (bytes != nullptr) *bytes = operation.result.bytes();
  if (rows != nullptr) std::copy(operation.received.begin(), operation.received.end(), rows);
  return operation.result.data();
}

void mr_work_free(mr_work* work) { delete work; }

mr_status mr_symmetric_alloc(mr_communicator* communicator, size_t bytes, mr_memory** memory,
                             mr_error* error) {
  return guarded(error, [&] {
    multiring::Communicator& group = *communicator->communicator;
    *memory = new mr_memory{group.allocate_symmetric(bytes, {}), group.rank()};
  });
}

void* mr_memory_data(const mr_memory* memory) { return memory->region->part(memory->rank); }

void mr_memory_free(mr_memory* memory) { delete memory; }
