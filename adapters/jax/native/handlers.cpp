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
// by the first of them: with the wrong one they are a mismatch.

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "call.h"

namespace multiring::xla {
namespace {

/// A submission between its two calls.
struct Flight {
  mr_queue* queue = nullptr;
  std::vector<const void*> places;             // y, as `start` has seen it
  std::vector<std::vector<std::byte>> inputs;  // copies of x
  bool landed = false;
  mr_status status = MR_OK;
  std::string message;
};

/// The queues of the process by the numbers that programs contain, from 1. A program that another process has
/// compiled finds this process's queue or none. Queues stay valid to the end, so entries are never taken
/// back.
class Queues {
 public:
  static Queues& instance() {
    static auto* queues = new Queues;
    return *queues;
  }

  std::int64_t add(mr_queue* queue) {
    const std::lock_guard lock(mutex_);
    queues_.push_back(queue);
    return static_cast<std::int64_t>(queues_.size());
  }

  mr_queue* find(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    if (number < 1 || static_cast<std::size_t>(number) > queues_.size())
      throw Failure(MR_USAGE, "the program belongs to communicator " + std::to_string(number) +
                                  ", which this process does not have: compile it anew, after "
                                  "multiring.init()");
    return queues_[static_cast<std::size_t>(number) - 1];
  }

 private:
  std::mutex mutex_;
  std::vector<mr_queue*> queues_;
};

/// The flights of the process by their tickets. Never destroyed: threads of a queue may outlive `main`.
class Tower {
 public:
  static Tower& instance() {
    static auto* tower = new Tower;
    return *tower;
  }

  std::uint64_t enter(const std::shared_ptr<Flight>& flight) {
    const std::lock_guard lock(mutex_);
    flights_.emplace(++last_, flight);
    return last_;
  }

  /// The step that a submission belongs to, which is counted by the first one of each step.
  std::uint64_t step(const mr_queue* queue, const std::string& counter, bool first) {
    const std::lock_guard lock(mutex_);
    std::uint64_t& count = steps_[{queue, counter}];
    return first ? ++count : count;
  }

  void leave(std::uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    flights_.erase(ticket);
  }

  void land(Flight& flight, mr_status status, const mr_error* error) {
    const std::lock_guard lock(mutex_);
    flight.status = status;
    if (status != MR_OK) flight.message = error != nullptr ? error->message : "the operation failed";
    flight.landed = true;
    changed_.notify_all();
  }

  std::shared_ptr<Flight> wait_for(std::uint64_t ticket) {
    std::unique_lock lock(mutex_);
    const auto found = flights_.find(ticket);
    if (found == flights_.end() && ticket <= forgotten_)
      throw Failure(MR_ABORTED, "the collective has ended with an earlier error of its communicator");
    if (found == flights_.end())
      throw Failure(MR_INTERNAL, "XLA has run the end of a collective without its start, or twice");
    const auto flight = found->second;
    flights_.erase(found);
    changed_.wait(lock, [&] { return flight->landed; });
    return flight;
  }

  /// A program that fails gives its memory back: nothing may be under way in it any more. What was submitted
  /// ends by itself, after an error of the communicator at once, otherwise when the peers have submitted it
  /// too or its deadline has passed. The program will not run the ends that are left: where the queue is
  /// broken, so that nobody else needs them, they are forgotten.
  void wait_for_all(const mr_queue* queue, bool broken) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      for (const auto& [ticket, flight] : flights_)
        if (flight->queue == queue && !flight->landed) return false;
      return true;
    });
    if (!broken) return;
    std::erase_if(flights_, [queue](const auto& entry) { return entry.second->queue == queue; });
    forgotten_ = last_;
  }

  std::size_t count() {
    const std::lock_guard lock(mutex_);
    return flights_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Flight>> flights_;
  std::map<std::pair<const mr_queue*, std::string>, std::uint64_t> steps_;
  std::uint64_t last_ = 0;
  std::uint64_t forgotten_ = 0;  // tickets up to here may have been
};

using Context = std::shared_ptr<Flight>;

void on_done(void* context, mr_status status, const mr_error* error, mr_work* const*) {
  const std::unique_ptr<Context> flight(static_cast<Context*>(context));
  Tower::instance().land(**flight, status, error);
}

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

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> found(1);
  for (const char letter : text) {
    if (letter == '\n')
      found.emplace_back();
    else
      found.back() += letter;
  }
  return found;
}

void start(const Call& call) {
  const auto& inputs = call.arguments();
  const std::vector<const Buffer*> outputs(call.results().begin() + 1, call.results().end());
  const int kind = static_cast<int>(call.integer("kind"));
  const bool in_place = kind == MR_ALLREDUCE || kind == MR_BROADCAST;
  const std::string name = call.text("name");
  std::vector<std::string> labels = lines(call.text("labels"));
  labels.resize(inputs.size());
  const std::vector<std::uint64_t> splits = call.integers("splits");
  mr_queue* queue = Queues::instance().find(call.integer("queue"));

  const auto flight = std::make_shared<Flight>();
  flight->queue = queue;
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
      flight->inputs.emplace_back(data, data + bytes);
      operation.input = flight->inputs.back().data();
    }
    flight->places.push_back(output.data);
    operations.push_back(operation);
  }

  Tower& tower = Tower::instance();
  const std::uint64_t step = tower.step(queue, call.text("counter"), call.integer("counts") != 0);
  const std::uint64_t ticket = tower.enter(flight);
  std::memcpy(call.results()[0]->data, &ticket, sizeof ticket);
  auto context = std::make_unique<Context>(flight);
  mr_error error;
  const mr_status status =
      mr_queue_submit(queue, name.c_str(), operations.data(), static_cast<int>(operations.size()), 0, step,
                      on_done, context.get(), &error);
  if (status == MR_OK) {
    static_cast<void>(context.release());
    return;
  }
  tower.leave(ticket);
  tower.wait_for_all(queue, status == MR_ABORTED);
  throw Failure(status, error.message);
}

void done(const Call& call) {
  std::uint64_t ticket = 0;
  std::memcpy(&ticket, call.arguments()[0]->data, sizeof ticket);
  Tower& tower = Tower::instance();
  const auto flight = tower.wait_for(ticket);
  if (flight->status != MR_OK) {
    tower.wait_for_all(flight->queue, true);
    throw Failure(flight->status, flight->message);
  }
  for (std::size_t i = 0; i < call.results().size(); ++i) {
    const Buffer &input = *call.arguments()[i + 1], &output = *call.results()[i];
    const std::size_t bytes = byte_count(input);
    if (bytes == 0) continue;
    if (input.data != flight->places[i]) {
      tower.wait_for_all(flight->queue, false);
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

/// Registers a queue by its address; returns its number. Called by the Python part.
extern "C" MR_API std::int64_t multiring_jax_register_queue(void* queue) {
  return multiring::xla::Queues::instance().add(static_cast<mr_queue*>(queue));
}

/// Submissions whose end no program has run. For tests.
extern "C" MR_API std::int64_t multiring_jax_flights() {
  return static_cast<std::int64_t>(multiring::xla::Tower::instance().count());
}
