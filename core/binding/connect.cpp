#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "binding/communicator.h"
#include "binding/interrupt.h"
#include "binding/store.h"
#include "transport/world/connect_world.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

/// What multiring.init() passes down: who this rank is, and the settings of multiring.config.
struct WorldOptions {
  int rank = 0;
  int size = 1;
  std::string socket_directory;
  bool spread = false;
  std::string host;
  std::string secret;
  std::string job;
  std::vector<std::string> interfaces;
  std::size_t staging_bytes = SharedTransportOptions{}.staging_bytes;
  double spin_microseconds = -1.0;
  std::string mode;
  Wire wire = CommunicatorOptions{}.wire;
  double timeout = CommunicatorOptions{}.timeout;
  double stall_warning = CommunicatorOptions{}.stall_warning;
  py::object warn = py::none();
};

/// Takes warnings from any thread to a Python callable; never raises into the engine.
std::function<void(const std::string&)> warner(const py::object& callable) {
  if (callable.is_none()) return {};
  auto held = std::shared_ptr<py::object>(new py::object(callable), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [held](const std::string& message) {
    const py::gil_scoped_acquire gil;
    try {
      (*held)(message);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("multiring's warning callback");
    }
  };
}

std::shared_ptr<Communicator> connect(const py::object& store, const WorldOptions& options) {
  // Kept by the transport of several hosts, which lets go of it wherever it is let go of itself.
  const std::shared_ptr<Store> rendezvous(new PyStore(store), [](Store* held) {
    const py::gil_scoped_acquire gil;
    delete held;
  });
  WorldAddress address;
  address.rank = options.rank;
  address.size = options.size;
  address.spread = options.spread;
  address.host = options.host;
  address.socket_directory = options.socket_directory;
  address.secret = options.secret;
  address.job = options.job;
  address.interfaces = options.interfaces;
  address.transport.staging_bytes = options.staging_bytes;
  address.transport.spin_microseconds = options.spin_microseconds;
  address.mode = options.mode;
  address.wire = wire_name(options.wire);
  CommunicatorOptions communicator;
  communicator.mode = options.mode;
  communicator.wire = options.wire;
  communicator.timeout = options.timeout;
  communicator.stall_warning = options.stall_warning;
  communicator.warn = warner(options.warn);
  const py::gil_scoped_release release;
  Waiting waiting;
  waiting.deadline = Deadline::after(options.timeout);
  waiting.interrupt = &check_signals();
  return std::make_shared<Communicator>(connect_world(rendezvous, address, waiting), std::move(communicator));
}

}  // namespace

void bind_connect(py::module_& module) {
  py::class_<WorldOptions>(module, "WorldOptions", "Who this rank is, and how its communicator behaves.")
      .def(py::init<>())
      .def_readwrite("rank", &WorldOptions::rank)
      .def_readwrite("size", &WorldOptions::size)
      .def_readwrite("socket_directory", &WorldOptions::socket_directory)
      .def_readwrite("spread", &WorldOptions::spread)
      .def_readwrite("host", &WorldOptions::host)
      .def_property(
          "secret", [](const WorldOptions& self) { return py::bytes(self.secret); },
          [](WorldOptions& self, const py::bytes& secret) { self.secret = secret; })
      .def_readwrite("job", &WorldOptions::job)
      .def_readwrite("interfaces", &WorldOptions::interfaces)
      .def_readwrite("staging_bytes", &WorldOptions::staging_bytes)
      .def_readwrite("spin_microseconds", &WorldOptions::spin_microseconds)
      .def_readwrite("mode", &WorldOptions::mode)
      .def_readwrite("wire", &WorldOptions::wire)
      .def_readwrite("timeout", &WorldOptions::timeout)
      .def_readwrite("stall_warning", &WorldOptions::stall_warning)
      .def_readwrite("warn", &WorldOptions::warn);
  module.def("connect", &connect, py::arg("store"), py::arg("options"),
             "Joins the ranks through shared memory, and through TCP between hosts, and returns the world. "
             "Collective.");
}

}  // namespace multiring::binding
