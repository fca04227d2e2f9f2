// A collective is a pair of calls, so that what a program computes between them overlaps with it:
//
//     start(token, x...)            -> token, ticket, y...     submits to the queue and returns
//     done(token..., ticket, y...)  -> token, y...             waits
//
// Memory. XLA may reuse an argument of `start` as soon as it has returned, so the queue never works on
// arguments. It works on y, a result of `start`: XLA keeps a result until its last use, which is `done`, and
// nothing else reads it. In an allreduce and a broadcast, y shares its memory with x (the call says that they
// alias): XLA makes the copy that this needs where x is used elsewhere, and works in place where it is not.
// `done` hands y on in the same way. Neither has to happen for the result to be right: where addresses
// differ, the handler copies. Should XLA ever move y between the two calls, `done` fails instead of returning
// what was moved too early. In the other collectives x is copied, since its result has another size.
//
// What this does not cover: if something else in the program fails between the two calls (a Python callback
// that raises), XLA gives y back while the queue may still write to it. Our own errors first wait for what is
// under way.
//
// Order. `start` calls are chained by XLA's tokens in the order of the program, so all ranks submit in the
// same order, and a `done` depends on no later `start` of any rank: the rank that has submitted least waits
// only for what all have submitted. So blocking in `done` cannot deadlock, whatever the number of XLA's
// threads, and although XLA may choose another schedule on each rank.
//
// Steps. A program that fails on one rank leaves out what it had still to submit, and the next program's
// would meet what the peers have submitted in this one. So the submissions of a call carry a number, counted
// by the first of them: with the wrong one they are a mismatch. Inside of a branch or a loop the number is
// how often that has been reached, which `enter` counts in front of it:
//
//     enter(token) -> token

#include <cstring>
#include <memory>
#include <vector>

#include "pending_calls.h"

namespace multiring::xla {
namespace {

/// Extents as the core takes them: at most eight.
std::vector<std::uint64_t> shape_of(const Buffer& buffer, bool rows) {
  const std::vector<std::uint64_t> extents(buffer.dims, buffer.dims + buffer.rank);
  if (extents.size() <= 8) return extents;
  const std::size_t first = rows ? 1 : 0;
  std::vector<std::uint64_t> flat(extents.begin(), extents.begin() + static_cast<std::ptrdiff_t>(first));
  std::uint64_t rest = 1;
  for (std::size_t axis = first; axis < extents.size(); ++axis) rest *= extents[axis];
  flat.push_back(rest);
  return flat;
}

void start(const Call& call) {
  const auto& inputs = call.arguments();
  const std::vector<const Buffer*> outputs(call.results().begin() + 1, call.results().end());
  const int kind = static_cast<int>(call.integer("kind"));
  const bool in_place = mr_output_of(static_cast<mr_kind>(kind)) == MR_OUTPUT_SAME;
  const std::string name = call.text("name");
  std::vector<std::string> labels = lines(call.text("labels"));
  labels.resize(inputs.size());
  const std::vector<std::uint64_t> splits = call.integers("splits");
  mr_queue* queue = Queues::instance().find(call.integer("queue"));

  const auto pending = std::make_shared<PendingCall>();
  pending->queue = queue;
  std::vector<std::vector<std::uint64_t>> shapes;
  std::vector<mr_operation> operations;
  shapes.reserve(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Buffer &input = *inputs[i], &output = *outputs[i];
    const std::size_t bytes = byte_count(input);
    shapes.push_back(shape_of(input, !in_place));
    mr_operation operation = MR_OPERATION_INIT;
    operation.kind = kind;
    operation.dtype = core_dtype(input.dtype);
    operation.op = static_cast<int>(call.integer("op"));
    operation.root = static_cast<int>(call.integer("root"));
    operation.prescale = call.real("prescale");
    operation.postscale = call.real("postscale");
    operation.name = labels[i].c_str();
    operation.output = output.data;
    operation.output_bytes = byte_count(output);
    operation.dims = static_cast<int>(shapes.back().size());
    operation.shape = shapes.back().data();
    if (!splits.empty()) operation.splits = splits.data();
    if (in_place) {
      if (bytes > 0 && output.data != input.data) std::memcpy(output.data, input.data, bytes);
      operation.input = output.data;
    } else {
      const auto* data = static_cast<const std::byte*>(input.data);
      pending->inputs.emplace_back(data, data + bytes);
      operation.input = pending->inputs.back().data();
    }
    pending->outputs.push_back(output.data);
    operations.push_back(operation);
  }

  std::uint64_t step =
      PendingTable::instance().step(queue, call.text("counter"), call.integer("counts") != 0);
  pending->inside = !call.text("inside").empty();
  if (pending->inside) step = PendingTable::instance().step_inside(queue, lines(call.text("inside")));
  const std::uint64_t ticket = submit(pending, name, call.integer("ordered") != 0, step, operations);
  std::memcpy(call.results()[0]->data, &ticket, sizeof ticket);
}

void enter(const Call& call) {
  mr_queue* queue = Queues::instance().find(call.integer("queue"));
  PendingTable::instance().step(queue, call.text("counter"), true);
}

void done(const Call& call) {
  std::uint64_t ticket = 0;
  std::memcpy(&ticket, call.arguments()[0]->data, sizeof ticket);
  PendingTable& table = PendingTable::instance();
  const auto pending = table.wait_for(ticket);
  if (pending->failure != nullptr) {
    table.wait_for_all(pending->queue, true);
    throw Failure(*pending->failure);
  }
  for (std::size_t i = 0; i < call.results().size(); ++i) {
    const Buffer &input = *call.arguments()[i + 1], &output = *call.results()[i];
    const std::size_t bytes = byte_count(input);
    if (bytes == 0) continue;
    if (input.data != pending->outputs[i]) {
      table.wait_for_all(pending->queue, false);
      throw Failure(MR_INTERNAL,
                    "XLA has moved the result of a collective while it was under way; please "
                    "report this with the versions of JAX and multiring");
    }
    if (output.data != input.data) std::memcpy(output.data, input.data, bytes);
  }
}

}  // namespace
}  // namespace multiring::xla

extern "C" MR_API multiring::xla::Error* multiring_jax_start(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::start);
}

extern "C" MR_API multiring::xla::Error* multiring_jax_done(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::done);
}

extern "C" MR_API multiring::xla::Error* multiring_jax_enter(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::enter);
}

/// Registers a queue by its address; returns its number. Called by the Python part.
extern "C" MR_API std::int64_t multiring_jax_register_queue(void* queue) {
  return multiring::xla::Queues::instance().add(static_cast<mr_queue*>(queue));
}

/// Submissions whose end no program has run. For tests.
extern "C" MR_API std::int64_t multiring_jax_pending_calls() {
  return static_cast<std::int64_t>(multiring::xla::PendingTable::instance().count());
}
