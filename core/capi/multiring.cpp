#include "multiring.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "topology/chunks.h"
#include "transport/shm/shm_link.h"

#ifndef MULTIRING_VERSION
#error "MULTIRING_VERSION comes from the build"
#endif

struct mr_communicator {
  std::shared_ptr<multiring::Communicator> communicator;
};

struct mr_work {
  std::shared_ptr<multiring::Work> work;  // empty after mr_run, which has filled `finished`
  multiring::Operation finished;
  const multiring::Operation& operation() const { return work != nullptr ? work->operation() : finished; }
};

struct mr_memory {
  std::shared_ptr<multiring::SymmetricRegion> region;
  int rank;
};

namespace multiring {
namespace {

static_assert(MR_FLOAT64 == static_cast<int>(DType::kFloat64) &&
              MR_BFLOAT16 == static_cast<int>(DType::kBFloat16));
static_assert(MR_PRODUCT == static_cast<int>(ReduceOp::kProduct));
static_assert(MR_RECV == static_cast<int>(OpKind::kReceive) &&
              MR_BARRIER == static_cast<int>(OpKind::kBarrier));
static_assert(MR_INTERNAL == static_cast<int>(ErrorKind::kInternal));

mr_status report(mr_error* error, ErrorKind kind, const char* message, const ErrorContext& context) {
  const auto status = static_cast<mr_status>(kind);
  if (error == nullptr) return status;
  error->status = status;
  error->rank = context.rank;
  error->peer = context.peer;
  const std::size_t length = std::min(std::strlen(message), sizeof error->message - 1);
  std::memcpy(error->message, message, length);
  error->message[length] = '\0';
  return status;
}

/// No exception leaves the C ABI.
template <class Body>
mr_status guarded(mr_error* error, const Body& body) {
  try {
    body();
    return MR_OK;
  } catch (const Error& failure) {
    return report(error, failure.kind(), failure.what(), failure.context());
  } catch (const std::exception& failure) {
    return report(error, ErrorKind::kInternal, failure.what(), {});
  } catch (...) {
    return report(error, ErrorKind::kInternal, "unknown error", {});
  }
}

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, message); }

class CallbackStore final : public Store {
 public:
  explicit CallbackStore(const mr_store& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override {
    if (store_.set(store_.context, key.c_str(), value.data(), value.size()) != 0)
      throw Error(ErrorKind::kInternal, "the store's set callback failed for key '" + key + "'");
  }
  std::string get(const std::string& key, double seconds) override {
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

/// Product of extents and the element's size; a usage error if it does not fit.
void check_extent(const mr_operation& asked, std::size_t element_size) {
  std::uint64_t bytes = element_size;
  for (int dim = 0; dim < asked.dims; ++dim)
    if (__builtin_mul_overflow(bytes, asked.shape[dim], &bytes)) refuse("the shape is too large for memory");
}

void set_count(Operation& operation, const mr_operation& asked) {
  Descriptor& descriptor = operation.descriptor;
  const auto* begin = descriptor.shape.data();
  const std::uint64_t count =
      std::accumulate(begin, begin + descriptor.dims, std::uint64_t{1}, std::multiplies<>());
  descriptor.rows = descriptor.dims > 0 ? descriptor.shape[0] : 1;
  descriptor.bytes = count * operation.element_size();
  descriptor.key.count = count;
  if (asked.kind == MR_ALLGATHER || asked.kind == MR_GATHER || asked.kind == MR_ALLTOALL)
    descriptor.key.count = descriptor.dims > 0 ? std::accumulate(begin + 1, begin + descriptor.dims,
                                                                 std::uint64_t{1}, std::multiplies<>())
                                               : 1;
  if (asked.kind == MR_SCATTER || asked.kind == MR_BARRIER) descriptor.key.count = 0;
  if (asked.kind == MR_BARRIER) descriptor.bytes = 0;
}

Operation convert(const mr_operation& asked, int size) {
  if (asked.struct_size != sizeof(mr_operation))
    refuse("mr_operation of another version: initialise it with MR_OPERATION_INIT");
  if (asked.kind < MR_ALLREDUCE || asked.kind > MR_RECV)
    refuse("unknown kind of operation " + std::to_string(asked.kind));
  if (asked.dtype < MR_BOOL || asked.dtype > MR_FLOAT64)
    refuse("unknown dtype " + std::to_string(asked.dtype));
  if (asked.op < MR_SUM || asked.op > MR_PRODUCT) refuse("unknown reduction " + std::to_string(asked.op));
  if (asked.dims < 0 || asked.dims > Descriptor::kMaxDims || (asked.dims > 0 && asked.shape == nullptr))
    refuse("dims must be 0 to 8, with a shape");
  check_extent(asked, dtype_size(static_cast<DType>(asked.dtype)));
  const bool needs_output = asked.kind == MR_ALLREDUCE || asked.kind == MR_BROADCAST || asked.kind == MR_RECV;
  const bool needs_input = asked.kind != MR_SCATTER && asked.kind != MR_BARRIER && asked.kind != MR_RECV;
  Operation operation;
  Descriptor& descriptor = operation.descriptor;
  descriptor.dtype = static_cast<DType>(asked.dtype);
  descriptor.dims = static_cast<std::uint8_t>(asked.dims);
  std::copy_n(asked.shape, asked.dims, descriptor.shape.begin());
  descriptor.key.kind = static_cast<OpKind>(asked.kind);
  descriptor.key.root = asked.root;
  if (asked.kind == MR_ALLREDUCE || asked.kind == MR_REDUCE_SCATTER) {
    descriptor.key.op = static_cast<ReduceOp>(asked.op);
    descriptor.key.prescale = asked.prescale;
    descriptor.key.postscale = asked.postscale;
  }
  descriptor.set_name(asked.name != nullptr ? asked.name : "");
  set_count(operation, asked);
  operation.input = static_cast<const std::byte*>(asked.input);
  operation.output = static_cast<std::byte*>(asked.output);
  operation.output_bytes = asked.output_bytes;
  if (descriptor.bytes > 0 && needs_output &&
      (asked.output == nullptr || asked.output_bytes != descriptor.bytes))
    refuse(describe(descriptor) + " needs an output of " + std::to_string(descriptor.bytes) + " bytes");
  if (descriptor.bytes > 0 && needs_input && asked.input == nullptr)
    refuse(describe(descriptor) + " needs an input");
  if (asked.kind == MR_ALLTOALL)
    for (int rank = 0; rank < size; ++rank)
      operation.splits.push_back(
          asked.splits != nullptr
              ? asked.splits[rank]
              : block_range(descriptor.rows, static_cast<std::size_t>(size), static_cast<std::size_t>(rank))
                    .size());
  return operation;
}

}  // namespace
}  // namespace multiring

using multiring::guarded;

const char* mr_version(void) { return MULTIRING_VERSION; }

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
    multiring::Waiting waiting;
    waiting.deadline = multiring::Deadline::after(communicator.timeout);
    *world = new mr_communicator{std::make_shared<multiring::Communicator>(
        multiring::connect_shm(rendezvous, shm, waiting), std::move(communicator))};
  });
}

int mr_rank(const mr_communicator* communicator) { return communicator->communicator->rank(); }
int mr_size(const mr_communicator* communicator) { return communicator->communicator->size(); }

mr_status mr_split(mr_communicator* communicator, int64_t color, int64_t key, mr_communicator** child,
                   mr_error* error) {
  return guarded(error, [&] {
    auto group = communicator->communicator->split(color, key, {});
    *child = group != nullptr ? new mr_communicator{std::move(group)} : nullptr;
  });
}

void mr_abort(mr_communicator* communicator, const char* message) {
  guarded(nullptr, [&] { communicator->communicator->abort(message != nullptr ? message : "aborted"); });
}

void mr_communicator_free(mr_communicator* communicator) {
  if (communicator != nullptr) communicator->communicator->close();
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
