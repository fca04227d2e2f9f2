#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "base/protocol.h"
#include "binding/gil.h"
#include "binding/interrupt.h"
#include "binding/py_communicator.h"
#include "binding/py_store.h"
#include "collective/descriptor.h"
#include "transport/tcp/handshake/address.h"
#include "transport/world/connect_world.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

/// What multiring.init() passes down: who this rank is, and the settings of the job.
struct WorldOptions : WorldAddress {
  explicit WorldOptions(const JobSettings& settings) : WorldAddress(settings) {}
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

CommDtype parse_comm_dtype(std::string_view name) {
  if (const std::optional<CommDtype> found = find_comm_dtype(name)) return *found;
  throw_usage("comm_dtype is '" + std::string(name) + "'; accepted: float32, float16, bfloat16");
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
  address.build = build_text(sizeof(Descriptor));
  CommunicatorOptions communicator(options);
  communicator.warn = address.warn = warner(options.callback);
  if (options.tuning == kNoTuning) communicator.tuning.clear();  // compared with the others only
  const GilRelease release;
  WaitOptions waiting;
  waiting.deadline = Deadline::after(options.timeout);
  waiting.interrupt = &check_signals();
  auto world =
      std::make_shared<Communicator>(connect_world(rendezvous, address, waiting), std::move(communicator));
  world->exchange_addresses({options.timeout, waiting.interrupt});
  return world;
}

template <class Value>
void add_setting(py::class_<JobSettings>& settings, const char* name, Value JobSettings::* member) {
  settings.def_readwrite(name, member);
}
/// As its name.
template <class Enum>
void add_named(py::class_<JobSettings>& settings, const char* name, Enum JobSettings::* member,
               const char* (*name_of)(Enum), Enum (*parse)(std::string_view)) {
  settings.def_property(
      name, [=](const JobSettings& self) { return name_of(self.*member); },
      [=](JobSettings& self, std::string_view value) { self.*member = parse(value); });
}
void add_setting(py::class_<JobSettings>& settings, const char* name, CommDtype JobSettings::* member) {
  add_named(settings, name, member, &comm_dtype_name, &parse_comm_dtype);
}
void add_setting(py::class_<JobSettings>& settings, const char* name, Order JobSettings::* member) {
  add_named(settings, name, member, &order_name, &parse_order);
}
void add_setting(py::class_<JobSettings>& settings, const char* name, NcclScope JobSettings::* member) {
  add_named(settings, name, member, &nccl_scope_name, &parse_nccl_scope);
}
void add_setting(py::class_<JobSettings>& settings, const char* name, HostLinks JobSettings::* member) {
  add_named(settings, name, member, &host_links_name, &parse_host_links);
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
  py::class_<JobSettings> settings(module, "JobSettings", "What a user may set for a job.");
  settings.def(py::init<>());
  visit_settings([&](const char* name, auto member, SettingScope) { add_setting(settings, name, member); });
  py::class_<WorldOptions, JobSettings>(module, "WorldOptions",
                                        "Who this rank is, and the settings of its job.")
      .def(py::init<const JobSettings&>(), py::arg("settings"))
      .def_readwrite("rank", &WorldOptions::rank)
      .def_readwrite("size", &WorldOptions::size)
      .def_readwrite("socket_directory", &WorldOptions::socket_directory)
      .def_readwrite("spread", &WorldOptions::spread)
      .def_readwrite("hosts", &WorldOptions::hosts)
      .def_property(
          "secret", [](const WorldOptions& self) { return py::bytes(self.secret); },
          [](WorldOptions& self, const py::bytes& secret) { self.secret = secret; })
      .def_readwrite("job", &WorldOptions::job)
      .def_readwrite("mpi", &WorldOptions::mpi)
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
