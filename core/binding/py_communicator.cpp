#include "binding/py_communicator.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "binding/arrays/plain_call.h"
#include "binding/arrays/result.h"
#include "binding/errors.h"
#include "binding/fork_lock.h"
#include "binding/gil.h"
#include "binding/interrupt.h"
#include "binding/program_call.h"
#include "binding/py_operation.h"
#include "binding/work.h"
#include "capi/communicator.h"
#include "engine/communicator.h"
#include "engine/communicator_list.h"

namespace py = pybind11;

namespace multiring::binding {

const std::function<void()>& check_signals() {
  static const std::function<void()> check = [] {
    const GilAcquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  return check;
}

std::shared_ptr<void> keep_alive(std::shared_ptr<std::vector<ArrayView>> views, py::object owners) {
  auto* held = new std::pair(std::move(views), std::move(owners));
  return {held, [held](void*) {
            const GilAcquire gil;
            delete held;
          }};
}

namespace {

bool run_allreduce(Communicator& self, py::handle input, py::handle output, ReduceOp op,
                   std::string_view name, double prescale, double postscale, double timeout,
                   Crossing crossing) {
  PyOperation prepared;
  set_reduction(prepared, op, prescale, postscale, crossing);
  if (!prepare_allreduce(prepared, input, output, name)) return false;
  const ProgramCall call(timeout < 0 ? self.number() : 0);
  self.run(prepared.operation, call_options(timeout));
  return true;
}

void run(Communicator& self, PyOperation& prepared, double timeout) {
  const ProgramCall call(timeout < 0 ? self.number() : 0);
  self.run(prepared.operation, call_options(timeout));
}

template <auto Method>
void run_message(Communicator& self, PyOperation& prepared, std::int64_t tag, double timeout,
                 std::optional<std::uint64_t> after) {
  const ProgramCall call;
  (self.*Method)(prepared.operation, tag, call_options(timeout), after);
}

PyWork submit(Communicator& self, PyOperation& prepared, int priority, double timeout) {
  auto views = keep_alive(std::move(prepared.views), std::move(prepared.owners));
  const ProgramCall call;
  return {self.submit(std::move(prepared.operation), priority, std::move(views), timeout),
          self.weak_from_this(), self.number()};
}

void wait(const PyWork& self, double timeout) {
  // Done or not: what it has written may be memory that the child shares with the parent.
  if (self.process != ::getpid())
    throw_usage(
        "the operation belongs to the parent process: a forked child cannot wait for it, because the thread "
        "that runs it is not there");
  // No need to release the GIL.
  if (self.work->done()) return self.work->wait(Deadline::never(), {});
  const ProgramCall call(timeout < 0 ? self.waits_on : 0);
  const Deadline deadline = timeout < 0 ? Deadline::never() : Deadline::after(timeout);
  if (const auto communicator = self.communicator.lock())
    return communicator->wait(*self.work, deadline, check_signals());
  self.work->wait(deadline, check_signals());
}

/// Runs Python's signal handlers from a wait of native code, which cannot raise what they raise. Ctrl-C ends
/// the wait, and is raised in the main thread when native code has returned. Handlers run in the main thread
/// alone; other threads must not ask for the GIL, whose holder may wait for them while the process ends.
void interrupt_native_call() {
  if (::getpid() != ::gettid()) return;
  const GilAcquire gil;
  if (PyErr_CheckSignals() == 0) return;
  const py::error_already_set raised;
  if (!raised.matches(PyExc_KeyboardInterrupt))
    throw Error(ErrorKind::kAborted, std::string("a signal handler has raised ") + raised.what());
  PyErr_SetInterrupt();
  throw Error(ErrorKind::kAborted, "interrupted (Ctrl-C)");
}

std::uintptr_t native_address(const std::shared_ptr<Communicator>& self) {
  // Never freed: native code uses the address until the process ends.
  return reinterpret_cast<std::uintptr_t>(new mr_communicator{self, &interrupt_native_call});
}

/// Bytes of an array; a usage error where they cannot be counted.
std::size_t array_bytes(const std::vector<std::uint64_t>& shape, const py::dtype& dtype) {
  if (dtype.attr("hasobject").cast<bool>() || dtype.itemsize() == 0)
    throw_usage("an array of dtype " + std::string(py::str(dtype)) + " cannot lie in symmetric memory");
  auto bytes = static_cast<std::size_t>(dtype.itemsize());
  for (const std::uint64_t extent : shape)
    if (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > std::numeric_limits<std::int64_t>::max())
      throw_usage("the shape asks for more memory than there are addresses");
  return bytes;
}

/// A NumPy array in symmetric memory, which it keeps mapped.
py::array array_in(const std::shared_ptr<SymmetricRegion>& region, const std::byte* data,
                   const py::dtype& dtype, const std::vector<std::uint64_t>& shape) {
  auto* held = new std::shared_ptr<SymmetricRegion>(region);
  const py::capsule owner(
      held, [](void* pointer) { delete static_cast<std::shared_ptr<SymmetricRegion>*>(pointer); });
  return py::array(dtype, shape, data, owner);
}

/// This rank's part of new memory.
py::array symmetric_empty(Communicator& self, const std::vector<std::uint64_t>& shape, const py::dtype& dtype,
                          double timeout) {
  const std::size_t bytes = array_bytes(shape, dtype);
  std::shared_ptr<SymmetricRegion> region;
  {
    const ProgramCall call(timeout < 0 ? self.number() : 0);
    region = self.allocate_symmetric(bytes, call_options(timeout));
  }
  return array_in(region, region->part(self.rank()), dtype, shape);
}

/// The array of another rank that corresponds to a symmetric one of this rank.
py::array symmetric_peer(const Communicator& self, const py::array& mine, int peer) {
  if (peer < 0 || peer >= self.size())
    throw_usage("rank is " + std::to_string(peer) + "; expected 0 to " + std::to_string(self.size() - 1));
  if ((mine.flags() & py::array::c_style) == 0)
    throw_usage("the elements of the array do not lie in C order");
  std::uint64_t offset = 0;
  const auto region = self.locate_symmetric(static_cast<const std::byte*>(mine.data()),
                                            static_cast<std::size_t>(mine.nbytes()), &offset);
  if (region == nullptr)
    throw_usage("the array does not lie in symmetric memory of '" + self.name() +
                "'; make it with symmetric_empty");
  const std::vector<std::uint64_t> shape(mine.shape(), mine.shape() + mine.ndim());
  std::byte* part = region->part(peer);
  if (part == nullptr)
    throw_usage("rank " + std::to_string(peer) + " is on another host than rank " +
                std::to_string(self.rank()) + ", which cannot see its memory");
  py::array theirs = array_in(region, part + offset, mine.dtype(), shape);
  if (!mine.writeable()) theirs.attr("flags").attr("writeable") = false;
  return theirs;
}

/// Moments of finished work, in nanoseconds of the steady clock, as time.monotonic_ns() gives them.
std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> times_of(const PyWork& self) {
  const Work::Times& times = self.work->times();
  const auto number = [](Clock::time_point moment) -> std::int64_t {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(moment.time_since_epoch()).count();
  };
  return {number(times.made), number(times.queued), number(times.begun), number(times.ended)};
}

void bind_work(py::module_& module) {
  module.def("keep_times", &Work::keep_times, py::arg("kept"),
             "Whether work that is made from now on keeps its times.");
  py::class_<PyWork>(module, "Work", "An asynchronous operation in progress.")
      .def("done", [](const PyWork& self) { return self.work->done(); })
      .def("wait", &wait, py::arg("timeout"))
      .def("times", &times_of, "Made, queued, begun, ended; 0: not kept. To be called when it is done.")
      .def("result", [](const PyWork& self) { return Result(self.work->take_result()); });
}

}  // namespace

void bind_communicator(py::module_& module) {
  module.def(
      "program_calls",
      [] {
        const ProgramCalls::Counts counts = ProgramCalls::counts();
        return std::tuple(counts.threads, counts.begun, counts.waits_on);
      },
      "The threads that have communicated, the calls that they have begun, and the number of the "
      "communicator for\n"
      "which the last call waits; 0: that is not known, or the call has ended.");
  module.def(
      "waits",
      [] {
        std::vector<std::tuple<std::uint64_t, std::string, std::string, WaitInProgress::Place,
                               std::vector<WaitInProgress::Place>>>
            found;
        for (const WaitInProgress& each : CommunicatorList::waits())
          found.emplace_back(each.number, each.communicator, each.operation, each.on, each.late);
        return found;
      },
      "The operations in progress, each as number and name of its communicator, its text, the name, host "
      "and\n"
      "process of this rank, and the same of the ranks that are awaited.");
  module.def(
      "fail_waits",
      [](const std::vector<std::string>& communicators, const std::string& message) {
        const GilRelease release;
        CommunicatorList::fail(communicators, message);
      },
      py::arg("communicators"), py::arg("message"),
      "Breaks communicators with names that `waits` has told, on all of their ranks, by a mismatch.");
  using Released = py::call_guard<GilRelease>;
  bind_work(module);
  // The destructor joins the progress thread, which may need the GIL to release arrays.
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator", "A group of ranks.",
                                                          py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("host", &Communicator::host)
      .def_property_readonly("hosts", &Communicator::hosts, "For each rank the number of its host.")
      .def_property_readonly(
          "comm_dtype", [](const Communicator& self) { return self.options().comm_dtype; },
          "As what float32 crosses from host to host where an allreduce does not say.")
      .def_property_readonly("tuning", py::cpp_function(&Communicator::tuning, Released()),
                             "What algorithms are chosen from, as a text.")
      .def_property_readonly("is_broken", py::cpp_function(&Communicator::is_broken, Released()))
      .def("allreduce", &run_allreduce, py::arg("x"), py::arg("out"), py::arg("op"), py::arg("name"),
           py::arg("prescale"), py::arg("postscale"), py::arg("timeout"), py::arg("crossing"),
           "False: an array is not contiguous, nothing was done.")
      .def("plain_allreduce", &make_plain_allreduce,
           "A quicker allreduce for C-ordered arrays of NumPy and DLPack's exchange API, as a function:\n"
           "(x, out, op, name, prescale, postscale, timeout, crossing) -> bool.\n"
           "False: an argument is not plain enough, nothing was done.")
      .def("run", &run, py::arg("operation"), py::arg("timeout"))
      .def("submit", &submit, py::arg("operation"), py::arg("priority"), py::arg("timeout"))
      .def_property("timeout", &Communicator::timeout, &Communicator::set_timeout,
                    "Seconds that an operation waits for other ranks where it does not say.")
      .def("send", &run_message<&Communicator::send>, py::arg("operation"), py::arg("tag"),
           py::arg("timeout"), py::arg("after") = py::none(),
           "after: what `last_conflict` told when the program asked for it; None: what it tells now.")
      .def("recv", &run_message<&Communicator::receive>, py::arg("operation"), py::arg("tag"),
           py::arg("timeout"), py::arg("after") = py::none())
      .def(
          "last_conflict",
          [](const Communicator& self, const PyOperation& prepared) {
            return self.last_conflict(prepared.operation);
          },
          py::arg("operation"), Released(),
          "The number of the last queued operation that has to end before this one; 0: none.")
      .def(
          "await_queued",
          [](Communicator& self, std::uint64_t last) { self.await_queued(last, call_options(-1.0)); },
          py::arg("last"), Released(), "Waits until the queued operations up to this number have ended.")
      .def(
          "split",
          [](Communicator& self, std::int64_t color, std::int64_t key,
             double timeout) -> std::optional<std::shared_ptr<Communicator>> {
            const ProgramCall call(timeout < 0 ? self.number() : 0);
            auto group = self.split(color, key, call_options(timeout));
            return group == nullptr ? std::nullopt : std::optional(std::move(group));
          },
          py::arg("color"), py::arg("key"), py::arg("timeout"))
      .def("symmetric_empty", &symmetric_empty, py::arg("shape"), py::arg("dtype"), py::arg("timeout"))
      .def("symmetric_peer", &symmetric_peer, py::arg("array"), py::arg("rank"))
      .def("set_tuning", &Communicator::set_tuning, py::arg("tuning"), Released(),
           "Collectives from here on go as a tuning says; called between the same operations on all ranks.")
      .def(
          "algorithm_rows",
          [](const Communicator& self, std::string_view collective, std::size_t bytes,
             std::string_view order) {
            return self.algorithm_rows(parse_collective(collective), bytes,
                                       order.empty() ? Order::kDefault : parse_order(order));
          },
          py::arg("collective"), py::arg("nbytes"), py::arg("order"), Released(),
          "The table of algorithms of a collective of float32, with what is used as the chosen one.\n"
          "An empty order is the default one.")
      .def(
          "fit_costs",
          [](const Communicator& self,
             const std::vector<std::tuple<std::string, std::size_t, double>>& measured) {
            std::vector<AllreduceProbe> probes;
            for (const auto& [algorithm, bytes, seconds] : measured)
              probes.push_back({parse_algorithm(algorithm), bytes, seconds});
            return self.fit_costs(probes);
          },
          py::arg("measured"), Released(),
          "The line of a tuning with the costs that explain (algorithm, bytes, seconds) best.")
      .def(
          "lost_rank",
          [](const Communicator& self) {
            std::optional<Error> found;
            {
              const GilRelease release;
              found = self.lost_rank();
            }
            return found ? exception_of(*found) : py::none();
          },
          "An error that names a rank which has died or left, as far as is known; None: there is none.")
      .def("native_address", &native_address,
           "The mr_communicator* of the C ABI, valid until the process ends. Each call makes another one.")
      .def("abort", &Communicator::abort, py::arg("message"), Released())
      .def(
          "abandon",
          [](std::shared_ptr<Communicator> self) {
            self->abandon();
            // Never destroyed: its thread is not there to leave what it waits on.
            new std::shared_ptr<Communicator>(std::move(self));
          },
          "To be called in a forked child.")
      .def("close", &Communicator::close, Released());
}

}  // namespace multiring::binding
