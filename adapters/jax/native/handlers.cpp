// A collective is a pair of calls, so that what a program computes between them overlaps with it:
//
//     start(token, x...)                  -> token, ticket, y...        submits to the queue and returns
//     done(token..., ticket, y...)        -> token, y...                waits
//
// where results have the shapes of the arguments (an allreduce, a broadcast), and else
//
//     start(token, x...)                  -> token, ticket, x..., y...
//     done(token..., ticket, x..., y...)  -> token, y...
//
// Memory. XLA may reuse an argument of `start` as soon as it has returned, so the queue never works on
// arguments. It works on results of `start`: XLA keeps a result until its last use, which is `done`, and
// nothing else reads it. y, or the x among the results, shares its memory with the argument x (the call says
// that they alias): XLA makes the copy that this needs where x is used elsewhere, and works in place where it
// is not. `done` hands y on in the same way. Neither has to happen for the result to be right: where
// addresses differ, the handler copies. Should XLA ever move y, or x, between the two calls, `done` fails
// instead of returning what was moved too early. The ticket is its address (PendingTable::note).
//
// Devices. XLA calls handlers on one thread of the host, in the order of the program, while the work before
// them may still be under way on its stream. The host touches no array there: the handler's copies are work
// of the stream, and the core orders its own after what the stream has when `start` submits. What XLA gives
// the stream later touches none of the results of `start` before `done` returns, and then they are complete.
// So no stream of XLA's ever waits, but its thread does in `done`: what is to overlap has to be on the stream
// by then.
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

#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "copies.h"
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

/// The arrays of `start`: arguments, what the operation reads in their place, and where it writes to.
struct Arrays {
  explicit Arrays(const Call& call, bool in_place)
      : given(call.arguments()),
        inputs(call.results().begin() + 1, call.results().begin() + 1 + std::ssize(given)),
        outputs(in_place ? inputs
                         : std::vector<const Buffer*>(call.results().begin() + 1 + std::ssize(given),
                                                      call.results().end())) {}

  const std::vector<const Buffer*>& given;
  const std::vector<const Buffer*> inputs;
  const std::vector<const Buffer*> outputs;
};

/// What all operations of a call have in common.
mr_operation asked_by(const Call& call) {
  mr_operation operation = MR_OPERATION_INIT;
  operation.kind = static_cast<int>(call.integer("kind"));
  operation.op = static_cast<int>(call.integer("op"));
  operation.root = static_cast<int>(call.integer("root"));
  operation.prescale = call.real("prescale");
  operation.postscale = call.real("postscale");
  operation.on_device = static_cast<int>(call.on_device());
  operation.stream = call.stream();
  return operation;
}

void start(const Call& call) {
  mr_operation operation = asked_by(call);
  const bool in_place = mr_output_of(static_cast<mr_kind>(operation.kind)) == MR_OUTPUT_SAME;
  const Arrays arrays(call, in_place);
  const std::size_t count = arrays.given.size();
  const std::string name = call.text("name");
  std::vector<std::string> labels = lines(call.text("labels"));
  labels.resize(count);
  const std::vector<std::uint64_t> splits = call.integers("splits");
  if (!splits.empty()) operation.splits = splits.data();
  mr_queue* queue = Queues::instance().find(call.integer("queue"));

  const auto pending = std::make_shared<PendingCall>();
  pending->queue = queue;
  std::vector<std::vector<std::uint64_t>> shapes;
  std::vector<mr_operation> operations;
  shapes.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Buffer &input = *arrays.inputs[i], &output = *arrays.outputs[i];
    copy(call, queue, input, *arrays.given[i], "the input of '" + name + "'");
    shapes.push_back(shape_of(input, !in_place));
    operation.dtype = core_dtype(input.dtype);
    operation.name = labels[i].c_str();
    operation.input = input.data;
    operation.output = output.data;
    operation.output_bytes = byte_count(output);
    operation.dims = static_cast<int>(shapes.back().size());
    operation.shape = shapes.back().data();
    operations.push_back(operation);
  }
  for (std::size_t i = 1; i < call.results().size(); ++i) pending->memory.push_back(call.results()[i]->data);

  std::uint64_t step =
      PendingTable::instance().step(queue, call.text("counter"), call.integer("counts") != 0);
  pending->inside = !call.text("inside").empty();
  if (pending->inside) step = PendingTable::instance().step_inside(queue, lines(call.text("inside")));
  const std::uint64_t ticket = submit(pending, name, call.integer("ordered") != 0, step, operations);
  PendingTable::instance().note(call.results()[0]->data, ticket);
}

void enter(const Call& call) {
  mr_queue* queue = Queues::instance().find(call.integer("queue"));
  PendingTable::instance().step(queue, call.text("counter"), true);
}

void done(const Call& call) {
  PendingTable& table = PendingTable::instance();
  const auto pending = table.wait_for(table.take_ticket(call.arguments()[0]->data));
  if (pending->failure != nullptr) {
    table.wait_for_all(pending->queue, true);
    throw Failure(*pending->failure);
  }
  const std::vector<const Buffer*> kept(call.arguments().begin() + 1, call.arguments().end());
  for (std::size_t i = 0; i < kept.size(); ++i)
    if (byte_count(*kept[i]) > 0 && kept[i]->data != pending->memory.at(i)) {
      table.wait_for_all(pending->queue, false);
      throw Failure(MR_INTERNAL,
                    "XLA has moved an array of a collective while it was under way; please "
                    "report this with the versions of JAX and multiring");
    }
  const std::size_t inputs = kept.size() - call.results().size();  // 0: y has taken their place
  for (std::size_t i = 0; i < call.results().size(); ++i)
    copy(call, pending->queue, *call.results()[i], *kept[inputs + i], "the result of a collective");
}

}  // namespace
}  // namespace multiring::xla

extern "C" MR_API multiring::xla::Error* multiring_jax_start(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::start);
}

extern "C" MR_API multiring::xla::Error* multiring_jax_done(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::done);
}

extern "C" MR_API multiring::xla::Error* multiring_jax_start_cuda(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::start, true);
}

extern "C" MR_API multiring::xla::Error* multiring_jax_done_cuda(multiring::xla::CallFrame* frame) {
  return multiring::xla::handle(frame, multiring::xla::done, true);
}

/// For all platforms: it has no arrays.
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
