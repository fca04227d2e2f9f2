#include <pybind11/stl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/immovable.h"
#include "binding/gil.h"
#include "binding/interrupt.h"
#include "binding/program_call.h"
#include "binding/py_communicator.h"
#include "engine/communicator.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

/// Waits for messages in one thread; any thread may stop it.
class PyProbe : Immovable {
 public:
  /// Source, tag, dtype and shape of a message.
  using Message = std::tuple<int, std::int64_t, std::string, std::vector<std::uint64_t>>;

  explicit PyProbe(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}

  std::optional<Message> wait(std::vector<int> sources, std::vector<int> needed, double timeout) {
    const ProgramCall call;
    const auto found =
        communicator_->probe({std::move(sources), std::move(needed), &stopped_}, call_options(timeout));
    if (found) return Message(found->source, found->tag, dtype_name(found->dtype), found->shape);
    stopped_.store(false, std::memory_order_seq_cst);
    return std::nullopt;
  }
  void stop() {
    stopped_.store(true, std::memory_order_seq_cst);
    communicator_->wake();
  }

 private:
  const std::shared_ptr<Communicator> communicator_;
  std::atomic<bool> stopped_{false};
};

}  // namespace

void bind_probe(py::module_& module) {
  py::class_<PyProbe>(module, "Probe", "Waits for messages in one thread; any thread may stop it.",
                      py::release_gil_before_calling_cpp_dtor())
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("communicator"))
      .def("wait", &PyProbe::wait, py::arg("sources"), py::arg("needed"), py::arg("timeout"),
           "Source, tag, dtype and shape of a message that can be received; None: it was stopped.")
      .def("stop", &PyProbe::stop, py::call_guard<GilRelease>(),
           "Ends the wait, or if there is none the next.");
}

}  // namespace multiring::binding
