#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/immovable.h"
#include "binding/errors.h"
#include "binding/gil.h"
#include "binding/interrupt.h"
#include "binding/program_call.h"
#include "binding/py_communicator.h"
#include "binding/py_operation.h"
#include "binding/work.h"
#include "capi/queue.h"
#include "engine/communicator.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

/// The queue, for Python. Its handle is never freed: native code may have been given the address.
class PyNamedQueue : Immovable {
 public:
  explicit PyNamedQueue(mr_queue* handle) : handle_(handle) {}
  ~PyNamedQueue() { handle_->close(); }
  mr_queue& handle() const { return *handle_; }

 private:
  mr_queue* const handle_;
};

std::unique_ptr<PyNamedQueue> create(Communicator& communicator, const std::string& name, double timeout) {
  const ProgramCall call(timeout < 0 ? communicator.number() : 0);
  return std::make_unique<PyNamedQueue>(
      new mr_queue(NamedQueue::create(communicator, name, call_options(timeout))));
}

PyWork submit_named(const PyNamedQueue& self, std::string name, PyOperation& prepared, int priority,
                    std::uint64_t step) {
  NamedRequest request;
  request.name = std::move(name);
  request.priority = priority;
  request.step = step;
  request.keep_alive = keep_alive(std::move(prepared.views), std::move(prepared.owners));
  request.operations.push_back(std::move(prepared.operation));
  const ProgramCall call;
  const std::shared_ptr<NamedQueue> queue = self.handle().get();
  return {queue->submit(std::move(request)).front(), {}, queue->number()};
}

bool is_broken(const PyNamedQueue& self) { return self.handle().is_broken(); }

/// By the address, which is good for longer than the object: errors may be asked for after the world has
/// ended.
py::object kept_error(std::uintptr_t address, std::int64_t number) {
  const auto error = reinterpret_cast<const mr_queue*>(address)->kept(number);
  return error ? exception_of(*error) : py::none();
}

}  // namespace

void bind_named_queue(py::module_& module) {
  using Released = py::call_guard<GilRelease>;
  // The destructor joins threads, which may need the GIL to release arrays.
  py::class_<PyNamedQueue>(module, "NamedQueue", "Operations matched by name.",
                           py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&create), py::arg("communicator"), py::arg("name"), py::arg("timeout"), "Collective.")
      .def_property_readonly("rank", [](const PyNamedQueue& self) { return self.handle().rank(); })
      .def_property_readonly("size", [](const PyNamedQueue& self) { return self.handle().size(); })
      .def_property_readonly("name", [](const PyNamedQueue& self) { return self.handle().name(); })
      .def_property_readonly("is_broken", py::cpp_function(&is_broken, Released()))
      .def_property_readonly("is_closed", [](const PyNamedQueue& self) { return self.handle().is_closed(); })
      .def_property_readonly(
          "address",
          [](const PyNamedQueue& self) { return reinterpret_cast<std::uintptr_t>(&self.handle()); },
          "The mr_queue* of the C ABI, good until the process ends.")
      .def_static("kept_error", &kept_error, py::arg("address"), py::arg("number"),
                  "The error that the queue at an address keeps under a number, or None.")
      .def("submit", &submit_named, py::arg("name"), py::arg("operation"), py::arg("priority"),
           py::arg("step"))
      .def(
          "await_queued",
          [](const PyNamedQueue& self, const PyOperation& prepared) {
            self.handle().get()->await_queued(prepared.operation, call_options(-1.0));
          },
          py::arg("operation"), Released(), "Waits until no submitted operation conflicts with this one.")
      .def(
          "abort",
          [](const PyNamedQueue& self, const std::string& message) {
            self.handle().get()->abort(Error(ErrorKind::kAborted, message));
          },
          py::arg("message"), Released())
      .def(
          "abandon", [](const PyNamedQueue& self) { self.handle().abandon(); },
          "To be called in a forked child.")
      .def("close", [](const PyNamedQueue& self) { self.handle().close(); }, Released());
}

}  // namespace multiring::binding
