#include "capi/communicator.h"

#include <utility>

#include "base/immovable.h"
#include "capi/convert.h"
#include "capi/guarded.h"
#include "collective/kinds.h"
#include "engine/program_calls.h"
#include "multiring.h"

namespace multiring {
namespace {

/// A call of the program that communicates, for as long as this object lives.
struct CountedCall : Immovable {
  explicit CountedCall(const Communicator& communicator) { ProgramCalls::begin(communicator.number()); }
  ~CountedCall() { ProgramCalls::end(); }
};

template <class Body>
mr_status on_communicator(mr_communicator* target, mr_error* error, const Body& body) {
  return guarded_by(
      [&](const Error& failure) {
        if (error != nullptr) *error = convert(failure);
      },
      [&] {
        const CountedCall call(*target->communicator);
        CallOptions options;
        if (target->interrupt) options.interrupt = &target->interrupt;
        body(*target->communicator, options);
      });
}

Operation message(OpKind kind, int peer, std::size_t bytes) {
  Operation made;
  Descriptor& descriptor = made.descriptor;
  descriptor.dtype = DType::kUInt8;
  descriptor.dims = 1;
  descriptor.shape[0] = bytes;
  descriptor.key.kind = kind;
  descriptor.key.root = peer;
  set_extents(descriptor);
  return made;
}

}  // namespace
}  // namespace multiring

using multiring::CallOptions;
using multiring::Communicator;
using multiring::on_communicator;
using multiring::Operation;
using multiring::OpKind;

int mr_communicator_rank(const mr_communicator* communicator) { return communicator->communicator->rank(); }
int mr_communicator_size(const mr_communicator* communicator) { return communicator->communicator->size(); }

mr_status mr_communicator_run(mr_communicator* communicator, const mr_operation* operation, mr_error* error) {
  return on_communicator(communicator, error, [&](Communicator& target, const CallOptions& options) {
    Operation asked = multiring::convert(*operation, target.size());
    target.run(asked, options);
  });
}

mr_status mr_communicator_send(mr_communicator* communicator, int peer, int64_t tag, const void* data,
                               size_t bytes, mr_error* error) {
  return on_communicator(communicator, error, [&](Communicator& target, const CallOptions& options) {
    Operation sent = multiring::message(OpKind::kSend, peer, bytes);
    sent.input = static_cast<const std::byte*>(data);
    target.send(sent, tag, options);
  });
}

mr_status mr_communicator_receive(mr_communicator* communicator, int peer, int64_t tag, void* data,
                                  size_t bytes, mr_error* error) {
  return on_communicator(communicator, error, [&](Communicator& target, const CallOptions& options) {
    Operation received = multiring::message(OpKind::kReceive, peer, bytes);
    received.output = static_cast<std::byte*>(data);
    received.output_bytes = bytes;
    target.receive(received, tag, options);
  });
}
