#include "binding/py_operation.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cctype>
#include <optional>

#include "base/arithmetic/kernels/copy.h"
#include "base/cpu.h"
#include "base/hash/checksum.h"
#include "binding/arrays/devices.h"
#include "binding/arrays/result.h"
#include "binding/gil.h"
#include "collective/kinds.h"

namespace multiring::binding {
namespace {

constexpr const char* kContiguousOnly =
    "the native core takes contiguous arrays only here; the Python face copies others first";

/// Raises a usage error if elements of `out` share memory: what they held would depend on the last one
/// written.
void require_apart(const ArrayView& out) {
  if (!out.contiguous() && out.strided().may_overlap_itself())
    throw_usage(
        "elements of out share memory, as those of a broadcast or expanded array do: pass a copy of it");
}

void require_apart(const ArrayView& in, const ArrayView& out) {
  if (overlap_in_part(in, out))
    throw_usage("out overlaps the input in part; give the input itself to work in place, or other memory");
}

}  // namespace

bool PyOperation::set_input(py::handle array, bool is_copied) {
  ArrayView view(array, false);
  if (!view.contiguous() && view.memory().on_device()) return false;
  view.describe_in(operation.descriptor);
  if (view.contiguous() && !is_copied) {
    binding::set_input(operation, view.memory());
    views->push_back(std::move(view));
  } else {
    add(strided().inputs, std::move(view));
  }
  return true;
}

bool PyOperation::set_output(py::handle array) {
  ArrayView view(array, true);
  if (!view.contiguous() && view.memory().on_device()) return false;
  require_apart(view);
  Descriptor& descriptor = operation.descriptor;
  const OpTraits& traits = traits_of(descriptor);
  if (traits.compared == OpTraits::Compared::kNothing) {
    // scatter: the root alone knows what comes
  } else if (views->empty()) {  // recv: the output says what is expected
    view.describe_in(descriptor);
  } else if (view.dtype() != descriptor.dtype) {
    throw_usage(std::string("out has dtype ") + dtype_name(view.dtype()) + ", the input " +
                dtype_name(descriptor.dtype));
  }
  if (traits.output == OpTraits::Output::kSame && view.bytes() != descriptor.bytes)
    throw_usage("out has " + std::to_string(view.count()) + " elements, the input " +
                std::to_string(descriptor.key.count));
  if (view.contiguous()) {
    if (!views->empty() && operation.input != nullptr) require_apart(views->front(), view);
    binding::set_output(operation, view.memory());
    views->push_back(std::move(view));
  } else {
    operation.output_bytes = view.bytes();
    add(strided().outputs, std::move(view));
  }
  return true;
}

void PyOperation::set_inputs(const std::vector<py::object>& arrays, const std::vector<std::uint64_t>& shape) {
  if (arrays.empty() || shape.empty() || shape.size() > Descriptor::kMaxDims)
    throw_usage("at least one array, and one dimension of the shape, are needed");
  Descriptor& descriptor = operation.descriptor;
  std::size_t bytes = 0;
  for (const py::object& array : arrays) {
    ArrayView view(array, false);
    if (bytes == 0 && strided().inputs.empty()) descriptor.dtype = view.dtype();
    if (view.dtype() != descriptor.dtype) throw_usage("the arrays have different dtypes");
    bytes += view.bytes();
    add(strided().inputs, std::move(view));
  }
  descriptor.dims = static_cast<std::uint8_t>(shape.size());
  std::ranges::copy(shape, descriptor.shape.begin());
  set_extents(descriptor);
  if (bytes != descriptor.bytes) throw_usage("the arrays do not have the elements of the shape");
}

void PyOperation::set_outputs(const std::vector<py::object>& arrays) {
  for (const py::object& array : arrays) {
    ArrayView view(array, true);
    require_apart(view);
    const bool is_known = traits_of(operation.descriptor).compared != OpTraits::Compared::kNothing;
    if (is_known && view.dtype() != operation.descriptor.dtype)
      throw_usage("the arrays have different dtypes");
    operation.output_bytes += view.bytes();
    add(strided().outputs, std::move(view));
  }
}

StridedArrays& PyOperation::strided() {
  if (operation.strided == nullptr) operation.strided = std::make_unique<StridedArrays>();
  return *operation.strided;
}

void PyOperation::add(std::vector<StridedView>& to, ArrayView view) {
  to.push_back(view.strided());
  views->push_back(std::move(view));
}

void set_reduction(PyOperation& operation, ReduceOp op, double prescale, double postscale,
                   Crossing crossing) {
  MatchKey& key = operation.operation.descriptor.key;
  key.op = op;
  key.prescale = prescale;
  key.postscale = postscale;
  std::tie(key.comm_dtype, key.order) = crossing;
}

bool prepare_allreduce(PyOperation& prepared, py::handle input, py::handle output, std::string_view name) {
  const bool in_place = output.is(input);
  ArrayView in(input, in_place);
  ArrayView out = in_place ? ArrayView() : ArrayView(output, true);
  if (!in.contiguous() || !out.contiguous()) return false;
  Descriptor& descriptor = prepared.operation.descriptor;
  descriptor.key.kind = OpKind::kAllreduce;
  in.describe_in(descriptor);
  descriptor.set_name(name);
  if (!in_place && out.dtype() != in.dtype())
    throw_usage(std::string("out has dtype ") + dtype_name(out.dtype()) + ", the input " +
                dtype_name(in.dtype()));
  if (!in_place && out.count() != in.count())
    throw_usage("out has " + std::to_string(out.count()) + " elements, the input " +
                std::to_string(in.count()));
  if (!in_place) require_apart(in, out);
  set_input(prepared.operation, in.memory());
  set_output(prepared.operation, in_place ? in.memory() : out.memory());
  prepared.views->push_back(std::move(in));
  if (!in_place) prepared.views->push_back(std::move(out));
  return true;
}

namespace {

DType dtype_named(std::string_view name) {
  for (int index = 0; index < kDTypeCount; ++index)
    if (name == dtype_name(static_cast<DType>(index))) return static_cast<DType>(index);
  throw_usage("unknown dtype " + std::string(name));
}

/// Addresses, for the same reason as below.
void set_pieces(PyOperation& prepared, std::string_view dtype, const std::vector<std::uintptr_t>& addresses,
                const std::vector<std::size_t>& nbytes, py::object owners, const std::vector<int>& devices,
                const std::vector<std::uintptr_t>& streams) {
  if (addresses.size() != nbytes.size()) throw_usage("as many addresses as numbers of bytes are needed");
  if (devices.size() != streams.size() || (!devices.empty() && devices.size() != addresses.size()))
    throw_usage("a device and a stream of every piece are needed, or of none");
  Operation& operation = prepared.operation;
  Descriptor& descriptor = operation.descriptor;
  descriptor.dtype = dtype_named(dtype);
  descriptor.bytes = 0;
  operation.pieces.clear();
  operation.on_devices.reset();
  prepared.owners = std::move(owners);
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (nbytes[i] % operation.element_size() != 0) throw_usage("a piece does not hold whole elements");
    auto* const data = reinterpret_cast<std::byte*>(addresses[i]);
    operation.pieces.push_back({data, data, nbytes[i]});
    descriptor.bytes += nbytes[i];
    if (devices.empty()) continue;
    Buffer& memory =
        arrays_on_devices(operation).pieces.emplace_back(Buffer{.address = data, .bytes = nbytes[i]});
    if (devices[i] < 0) continue;
    memory.kind = MemoryKind::kDevice;
    memory.device = devices[i];
    memory.stream = streams[i];
  }
  descriptor.key.count = descriptor.rows = descriptor.shape[0] = descriptor.bytes / operation.element_size();
  descriptor.dims = 1;
}

/// The reduction kernel on given arrays, without ranks, ready to be called again and again.
class ArrayReduction {
 public:
  ArrayReduction(const std::vector<py::object>& inputs, const std::vector<py::object>& outputs, ReduceOp op,
                 double postscale)
      : reduction_{.op = op, .postscale = postscale} {
    if (inputs.empty() || outputs.empty()) throw_usage("expected at least one input and one output");
    for (const auto& input : inputs) from_.push_back(add(input, false));
    for (const auto& output : outputs) to_.push_back(add(output, true));
    for (std::size_t a = 0; a < views_.size(); ++a)
      for (std::size_t b = std::max(a + 1, inputs.size()); b < views_.size(); ++b)
        require_apart(views_[a], views_[b]);
  }
  void run() const {
    const GilRelease release;
    reduce(views_[0].dtype(), reduction_, from_, to_, views_[0].count());
  }

 private:
  std::byte* add(const py::object& array, bool writable) {
    const ArrayView& view = views_.emplace_back(array, writable);
    if (!view.contiguous()) throw_usage(kContiguousOnly);
    if (view.memory().on_device()) throw_usage("the array lies in device memory; copy it to the host first");
    if (view.dtype() != views_[0].dtype() || view.count() != views_[0].count())
      throw_usage("the arrays differ in dtype or number of elements");
    return view.data();
  }

  Reduction reduction_;
  std::vector<ArrayView> views_;
  std::vector<const void*> from_;
  std::vector<void*> to_;
};

/// The standard floating point mode as a context manager, for arithmetic of NumPy's in this thread.
class FloatModeContext {
 public:
  void enter() { mode_.emplace(); }
  void exit(const py::object& /*kind*/, const py::object& /*error*/, const py::object& /*traceback*/) {
    mode_.reset();
  }

 private:
  std::optional<StandardFloatMode> mode_;
};

/// Memory of a tensor for NumPy. The tensor's own function for that would forbid to resize its storage for
/// ever.
py::array bytes_of(const py::object& array) {
  auto held = std::make_unique<ArrayView>(array, false);
  if (!held->contiguous() || held->memory().on_device()) throw_usage(kContiguousOnly);
  std::byte* const data = held->data();
  const std::size_t bytes = held->bytes();
  const py::capsule owner(held.release(), [](void* view) { delete static_cast<ArrayView*>(view); });
  return py::array(py::dtype::of<std::uint8_t>(), {bytes}, {std::size_t{1}}, data, owner);
}

/// Addresses, not arrays: to take two tensors by DLPack would cost more than a gradient's other bookkeeping.
void copy_addresses_streaming(std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
  const GilRelease release;
  copy_streaming(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

/// The values `first` to count - 1 of an enum, by their names in capitals.
template <class Enum, class NameOf>
void add_values(py::enum_<Enum> values, Enum first, int count, const NameOf& name_of) {
  for (int index = static_cast<int>(first); index < count; ++index) {
    const auto value = static_cast<Enum>(index);
    std::string name = name_of(value);
    std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::toupper(letter); });
    values.value(name.c_str(), value);
  }
}

}  // namespace

void bind_operation(py::module_& module) {
  module.def(
      "address_of", [](const py::array& array) { return reinterpret_cast<std::uintptr_t>(array.data()); },
      py::arg("array"), "Address of the first element.");
  module.def(
      "require_memory", [](const py::object& array) { const ArrayView view(array, false); }, py::arg("array"),
      "Raises a usage error if the memory of an array does not hold its elements, or it has none.");
  module.def("bytes_of", &bytes_of, py::arg("array"),
             "The memory of a contiguous array on the host, shape (nbytes,), which it keeps alive.");
  module.def("copy_streaming", &copy_addresses_streaming, py::arg("to"), py::arg("source"), py::arg("nbytes"),
             "Copies memory, given by addresses, past the caches.");
  add_values(py::enum_<OpKind>(module, "OpKind"), OpKind::kSend, static_cast<int>(OpKind::kCount),
             [](OpKind kind) { return traits_of(kind).name; });
  add_values(py::enum_<ReduceOp>(module, "ReduceOp"), ReduceOp{}, kReduceOpCount, reduce_op_name);
  add_values(py::enum_<CommDtype>(module, "CommDtype", "As what float32 crosses from host to host."),
             CommDtype{}, kCommDtypeCount, comm_dtype_name);
  add_values(py::enum_<Order>(module, "Order", "In which order an allreduce or a reduce_scatter adds."),
             Order{}, kOrderCount, order_name);
  module.def(
      "checksum",
      [](std::uintptr_t address, std::size_t nbytes, std::uint64_t seed) {
        return checksum(reinterpret_cast<const void*>(address), nbytes, seed);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("seed") = 0,
      "A number that changes with every bit of the memory, at the speed of memory.");
  py::class_<ArrayReduction>(module, "ArrayReduction",
                             "Reduces arrays element by element into every output, as a collective does, but "
                             "without ranks.")
      .def(py::init<const std::vector<py::object>&, const std::vector<py::object>&, ReduceOp, double>(),
           py::arg("inputs"), py::arg("outputs"), py::arg("op"), py::arg("postscale") = 1.0)
      .def("__call__", &ArrayReduction::run);
  py::class_<FloatModeContext>(module, "StandardFloatMode",
                               "Context in which this thread rounds to nearest even and keeps denormals.")
      .def(py::init<>())
      .def("__enter__", &FloatModeContext::enter)
      .def("__exit__", &FloatModeContext::exit, py::arg("kind"), py::arg("error"), py::arg("traceback"));
  py::class_<PyOperation>(module, "Operation", "One collective call being put together.")
      .def(py::init([](OpKind kind, const std::string& name, int root) {
             PyOperation made;
             made.operation.descriptor.key.kind = kind;
             made.operation.descriptor.key.root = root;
             made.operation.descriptor.set_name(name);
             return made;
           }),
           py::arg("kind"), py::arg("name") = "", py::arg("root") = -1)
      .def("set_input", &PyOperation::set_input, py::arg("array"), py::arg("is_copied") = false,
           "is_copied: when the operation begins, because it writes to that memory.\n"
           "False: the array is on a device and not contiguous, nothing was done.")
      .def("set_inputs", &PyOperation::set_inputs, py::arg("arrays"), py::arg("shape"),
           "Arrays in host memory that are the input, one after the other, as an array of this shape.")
      .def("set_outputs", &PyOperation::set_outputs, py::arg("arrays"),
           "Arrays in host memory that get the output, one after the other.")
      .def("set_pieces", &set_pieces, py::arg("dtype"), py::arg("addresses"), py::arg("nbytes"),
           py::arg("owners"), py::arg("devices"), py::arg("streams"),
           "One array, to be reduced in place, that lies in pieces; devices: none, or -1 for the host.")
      .def("set_output", &PyOperation::set_output, py::arg("array"))
      .def("set_reduction", &set_reduction, py::arg("op"), py::arg("prescale"), py::arg("postscale"),
           py::arg("crossing"))
      .def(
          "set_splits",
          [](PyOperation& self, std::vector<std::uint64_t> splits) {
            self.operation.splits = std::move(splits);
          },
          py::arg("splits"))
      .def(
          "set_expected",
          [](PyOperation& self, std::vector<std::uint64_t> rows) {
            self.operation.expected = std::move(rows);
          },
          py::arg("rows"), "How many rows of an alltoall are to come from each rank.")
      .def_property_readonly(
          "rows", [](const PyOperation& self) { return self.operation.descriptor.rows; },
          "Extent of the input along axis 0.")
      .def("result", [](PyOperation& self) { return Result(self.operation); });
}

}  // namespace multiring::binding
