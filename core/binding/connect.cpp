#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "base/protocol.h"
#include "binding/communicator.h"
#include "binding/gil.h"
#include "binding/interrupt.h"
#include "binding/store.h"
#include "collective/descriptor.h"
#include "transport/tcp/handshake/address.h"
#include "transport/world/connect_world.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

/// What multiring.init() passes down: who this rank is, and the settings of multiring.config. Each is
/// declared in the struct that uses it.
struct WorldOptions : WorldAddress, CommunicatorOptions {
  py::object callback = py::none();  ///< of `warn`, which takes warnings
};

/// Takes warnings from any thread to a Python callable; never raises into the engine.
std::function<void(const std::string&)> warner(const py::object& callable) {
  if (callable.is_none()) return {};
  auto held = std::shared_ptr<py::object>(new py::object(callable), [](py::object* object) {
    const GilAcquire gil;
    delete object;
  });
  return [held](const std::string& message) {
    const GilAcquire gil;
    try {
      (*held)(message);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("multiring's warning callback");
    }
  };
}

std::shared_ptr<MpiSession> open_session(const std::string& bridge, std::uintptr_t communicator) {
  const GilRelease release;
  return MpiSession::load(bridge, reinterpret_cast<const void*>(communicator));
}

py::bytes broadcast(MpiSession& session, const py::bytes& bytes, int root, double timeout) {
  const std::string value = bytes;
  std::string received;
  {
    const GilRelease release;
    WaitOptions waiting;
    waiting.deadline = Deadline::after(timeout);
    waiting.interrupt = &check_signals();
    received = session.broadcast(value, root, waiting);
  }
  return received;
}

std::shared_ptr<Communicator> connect(const py::object& store, const WorldOptions& options) {
  // Owned by the transport of several hosts, which may be destroyed on any thread.
  const std::shared_ptr<Store> rendezvous(new PyStore(store), [](Store* held) {
    const GilAcquire gil;
    delete held;
  });
  WorldAddress address = options;
  address.compared = {{"MULTIRING_MODE", options.mode},
                      {"MULTIRING_TUNING (what the file says)", options.tuning},
                      {"MULTIRING_COMM_DTYPE", comm_dtype_name(options.comm_dtype)}};
  address.build = build_text(sizeof(Descriptor));
  CommunicatorOptions communicator = options;
  communicator.warn = address.warn_late = warner(options.callback);
  address.late_after = options.stall_warning;
  if (options.tuning == "off") communicator.tuning.clear();  // compared with the others only
  const GilRelease release;
  WaitOptions waiting;
  waiting.deadline = Deadline::after(options.timeout);
  waiting.interrupt = &check_signals();
  auto world =
      std::make_shared<Communicator>(connect_world(rendezvous, address, waiting), std::move(communicator));
  world->exchange_addresses({options.timeout, waiting.interrupt});
  return world;
}

/// A field of a part of the options, such as `tcp`.
template <class Part, class Value>
void add_nested(py::class_<WorldOptions>& options, const char* name, Part WorldAddress::* part,
                Value Part::* field) {
  options.def_property(
      name, [part, field](const WorldOptions& self) { return self.*part.*field; },
      [part, field](WorldOptions& self, Value value) { self.*part.*field = std::move(value); });
}

}  // namespace

void bind_connect(py::module_& module) {
  py::class_<MpiSession, std::shared_ptr<MpiSession>>(
      module, "MpiSession", "An MPI library, and a communicator of its own among the ranks of a job.")
      .def(py::init(&open_session), py::arg("bridge"), py::arg("communicator") = 0,
           "Loads a bridge and duplicates the MPI_Comm at an address (0: all ranks). Collective.")
      .def_property_readonly("rank", &MpiSession::rank)
      .def_property_readonly("size", &MpiSession::size)
      .def_property_readonly("library", &MpiSession::library)
      .def("broadcast", &broadcast, py::arg("value"), py::arg("root"), py::arg("timeout"),
           "What `root` has, at most 4096 bytes, on all ranks. Collective.")
      .def("finalize", &MpiSession::finalize, py::call_guard<GilRelease>(),
           "Ends MPI if this session has initialised it. Collective.");
  py::class_<WorldOptions> options(module, "WorldOptions",
                                   "Who this rank is, and how its communicator behaves.");
  add_nested(options, "interfaces", &WorldAddress::tcp, &TcpOptions::interfaces);
  add_nested(options, "staging_bytes", &WorldAddress::transport, &SharedTransportOptions::staging_bytes);
  add_nested(options, "spin_microseconds", &WorldAddress::transport,
             &SharedTransportOptions::spin_microseconds);
  options.def(py::init<>())
      .def_readwrite("rank", &WorldOptions::rank)
      .def_readwrite("size", &WorldOptions::size)
      .def_readwrite("socket_directory", &WorldOptions::socket_directory)
      .def_readwrite("spread", &WorldOptions::spread)
      .def_readwrite("host", &WorldOptions::host)
      .def_readwrite("hosts", &WorldOptions::hosts)
      .def_property(
          "secret", [](const WorldOptions& self) { return py::bytes(self.tcp.secret); },
          [](WorldOptions& self, const py::bytes& secret) { self.tcp.secret = secret; })
      .def_readwrite("job", &WorldOptions::job)
      .def_readwrite("mode", &WorldOptions::mode)
      .def_readwrite("tuning", &WorldOptions::tuning)
      .def_readwrite("mpi", &WorldOptions::mpi)
      .def_readwrite("comm_dtype", &WorldOptions::comm_dtype)
      .def_readwrite("timeout", &WorldOptions::timeout)
      .def_readwrite("stall_warning", &WorldOptions::stall_warning)
      .def_readwrite("warn", &WorldOptions::callback);
  module.def(
      "mpi_library", &MpiSession::library_of, py::arg("bridge"),
      "Name and version of the MPI library that a bridge was built with. Loads it, without initialising.");
  module.def(
      "own_addresses",
      [](const std::vector<std::string>& interfaces) {
        std::vector<std::string> texts;
        for (const tcp::InterfaceAddress& each :
             tcp::choose_addresses(tcp::interface_addresses(), interfaces, false))
          texts.push_back(each.address.host_text());
        return texts;
      },
      py::arg("interfaces"),
      "Addresses that other hosts reach this one by, as MULTIRING_INTERFACES chooses.");
  module.def("connect", &connect, py::arg("store"), py::arg("options"),
             "Joins the ranks through shared memory, and through TCP between hosts, and returns the world. "
             "Collective.");
}

}  // namespace multiring::binding
