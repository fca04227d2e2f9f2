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
  std::string tuning;
  std::shared_ptr<MpiSession> mpi;
  CommDtype comm_dtype = CommunicatorOptions{}.comm_dtype;
  double timeout = CommunicatorOptions{}.timeout;
  double stall_warning = CommunicatorOptions{}.stall_warning;
  py::object warn = py::none();
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
    Waiting waiting;
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
  address.tuning = options.tuning;
  address.mpi = options.mpi;
  address.comm_dtype = comm_dtype_name(options.comm_dtype);
  address.build = build_text(sizeof(Descriptor));
  CommunicatorOptions communicator;
  communicator.mode = options.mode;
  if (options.tuning != "off") communicator.tuning = options.tuning;  // off: compared with the others only
  communicator.comm_dtype = options.comm_dtype;
  communicator.timeout = options.timeout;
  communicator.stall_warning = options.stall_warning;
  communicator.warn = warner(options.warn);
  const GilRelease release;
  Waiting waiting;
  waiting.deadline = Deadline::after(options.timeout);
  waiting.interrupt = &check_signals();
  return std::make_shared<Communicator>(connect_world(rendezvous, address, waiting), std::move(communicator));
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
      .def_readwrite("tuning", &WorldOptions::tuning)
      .def_readwrite("mpi", &WorldOptions::mpi)
      .def_readwrite("comm_dtype", &WorldOptions::comm_dtype)
      .def_readwrite("timeout", &WorldOptions::timeout)
      .def_readwrite("stall_warning", &WorldOptions::stall_warning)
      .def_readwrite("warn", &WorldOptions::warn);
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
