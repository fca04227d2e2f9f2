#include "binding/tensor_gradients.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/arrays/array_view.h"
#include "binding/arrays/exchange.h"

namespace multiring::binding {
namespace {

PyObject* kept_name(const char* name) { return PyUnicode_InternFromString(name); }

py::object attribute_of(py::handle object, PyObject* name) {
  return py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name));
}

/// Grows with each write that the tensor's library sees; -1 where it does not count them.
std::int64_t version_of(py::handle tensor) {
  static PyObject* const name = kept_name("_version");
  const py::object version = attribute_of(tensor, name);
  const std::int64_t number = version ? PyLong_AsLongLong(version.ptr()) : -1;
  PyErr_Clear();
  return number;
}

/// What a gradient looks like that can be reduced in its own memory.
struct Form {
  dlpack::DataType dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;

  bool operator==(const Form& other) const {
    return fits_dtype(other.dtype) && shape == other.shape && strides == other.strides;
  }
  bool fits_dtype(const dlpack::DataType& other) const {
    return dtype.code == other.code && dtype.bits == other.bits && dtype.lanes == other.lanes;
  }
  bool fits(const dlpack::Tensor& tensor) const {
    if (!fits_dtype(tensor.dtype) || static_cast<std::size_t>(tensor.dims) != shape.size() ||
        tensor.strides == nullptr)
      return false;
    for (std::size_t dim = 0; dim < shape.size(); ++dim)
      if (tensor.shape[dim] != shape[dim] || (shape[dim] != 1 && tensor.strides[dim] != strides[dim]))
        return false;
    return true;
  }
};

/// The gradients of a model that are reduced in their own memory, by the numbers of its parameters: what an
/// adapter would note of each in objects of its own, which a backward pass has pushed out of the caches.
class TensorGradients {
 public:
  /// count_users tells how many share a storage, of which it gets the `_cdata`; None: nobody can tell.
  TensorGradients(std::size_t count, py::object count_users, py::handle alone)
      : entries_(count), count_users_(std::move(count_users)) {
    if (!count_users_.is_none()) alone_ = users_of(alone);
  }

  void expect(std::size_t number, py::handle like, std::vector<std::int64_t> strides) {
    Entry& entry = entries_.at(number);
    entry.form = nullptr;
    dlpack::Tensor tensor;
    if (!describe_plainly(like.ptr(), &tensor) || !dlpack_dtype(tensor.dtype) || tensor.data == nullptr)
      return;
    Form form{tensor.dtype, {tensor.shape, tensor.shape + tensor.dims}, std::move(strides)};
    for (const Form& known : forms_)  // those that look alike share a form
      if (known == form) entry.form = &known;
    if (entry.form == nullptr) entry.form = &forms_.emplace_back(std::move(form));
  }

  std::uintptr_t fetch(std::size_t number, py::handle gradient) {
    Entry& entry = entries_.at(number);
    dlpack::Tensor tensor;
    if (entry.form == nullptr || !describe_plainly(gradient.ptr(), &tensor) || !entry.form->fits(tensor) ||
        alone_ <= 0 || users_of(gradient) != alone_)
      return 0;
    entry.version = version_of(gradient);
    entry.address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
    entry.weak = py::object();
    entry.gradient = py::reinterpret_borrow<py::object>(gradient);
    return entry.address;
  }

  std::optional<std::size_t> find_changed(const py::list& parameters) const {
    for (std::size_t number = 0; number < entries_.size(); ++number) {
      const Entry& entry = entries_[number];
      const py::handle parameter = PyList_GET_ITEM(parameters.ptr(), static_cast<Py_ssize_t>(number));
      if (entry.gradient && !parameter.is_none() &&
          (!has(parameter, entry.gradient) || version_of(entry.gradient) != entry.version))
        return number;
    }
    return std::nullopt;
  }

  std::vector<std::size_t> in_place(const py::list& parameters) const {
    std::vector<std::size_t> found;
    for (std::size_t number = 0; number < entries_.size(); ++number) {
      const py::handle parameter = PyList_GET_ITEM(parameters.ptr(), static_cast<Py_ssize_t>(number));
      if (entries_[number].gradient && !parameter.is_none() && has(parameter, entries_[number].gradient))
        found.push_back(number);
    }
    return found;
  }

  void end_round() {
    for (Entry& entry : entries_) {
      entry.incoming = 0;
      refer_weakly(entry);
      entry.gradient = py::object();
    }
  }

  py::object reduced(std::size_t number) {
    Entry& entry = entries_.at(number);
    refer_weakly(entry);
    if (!entry.weak) return py::none();
    return py::make_tuple(entry.weak, entry.address, entry.version);
  }

  void forget(std::size_t number) {
    Entry& entry = entries_.at(number);
    entry.gradient = entry.weak = py::object();
  }

  std::uintptr_t incoming(std::size_t number) const { return entries_.at(number).incoming; }
  void set_incoming(std::size_t number, std::uintptr_t address) { entries_[number].incoming = address; }

 private:
  struct Entry {
    const Form* form = nullptr;
    std::uintptr_t incoming = 0;  // where autograd has it before it is accumulated
    std::uintptr_t address = 0;
    std::int64_t version = 0;
    py::object gradient;  // while the round is under way
    py::object weak;      // afterwards
  };

  static bool has(py::handle parameter, const py::object& gradient) {
    static PyObject* const name = kept_name("grad");
    const py::object now = attribute_of(parameter, name);
    PyErr_Clear();
    return now.is(gradient);
  }

  static void refer_weakly(Entry& entry) {
    if (!entry.gradient || entry.weak) return;
    entry.weak = py::reinterpret_steal<py::object>(PyWeakref_NewRef(entry.gradient.ptr(), nullptr));
    PyErr_Clear();
  }

  std::int64_t users_of(py::handle tensor) const {
    static PyObject* const storage_of = kept_name("untyped_storage");
    static PyObject* const pointer = kept_name("_cdata");
    py::object found = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), storage_of));
    if (found) found = attribute_of(found, pointer);  // lets go of the storage, which would be a user
    if (found)
      found = py::reinterpret_steal<py::object>(PyObject_CallOneArg(count_users_.ptr(), found.ptr()));
    const std::int64_t users = found ? PyLong_AsLongLong(found.ptr()) : -1;
    PyErr_Clear();
    return users;
  }

  std::vector<Entry> entries_;
  std::deque<Form> forms_;
  py::object count_users_;
  std::int64_t alone_ = 0;
};

/// A plain C function of Python, which autograd calls with each gradient.
struct IncomingHook {
  std::shared_ptr<TensorGradients> gradients;
  std::size_t number;
  py::object otherwise;
};

constexpr const char* kIncomingHook = "multiring.IncomingHook";

PyObject* note_incoming(PyObject* self, PyObject* gradient) {
  const auto* hook = static_cast<const IncomingHook*>(PyCapsule_GetPointer(self, kIncomingHook));
  if (hook == nullptr) return nullptr;
  const std::uintptr_t address = host_address(gradient);
  hook->gradients->set_incoming(hook->number, address);
  if (address != 0) Py_RETURN_NONE;
  return PyObject_CallOneArg(hook->otherwise.ptr(), gradient);
}

PyMethodDef note_incoming_method = {"note_incoming", note_incoming, METH_O, nullptr};

py::object incoming_hook(std::shared_ptr<TensorGradients> gradients, std::size_t number,
                         py::object otherwise) {
  const py::capsule self(new IncomingHook{std::move(gradients), number, std::move(otherwise)}, kIncomingHook,
                         [](void* pointer) { delete static_cast<IncomingHook*>(pointer); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&note_incoming_method, self.ptr()));
}

}  // namespace

void bind_tensor_gradients(py::module_& module) {
  py::class_<TensorGradients, std::shared_ptr<TensorGradients>>(
      module, "TensorGradients", "The gradients of a model that are reduced in their own memory, by number.")
      .def(py::init<std::size_t, py::object, py::handle>(), py::arg("count"), py::arg("count_users"),
           py::arg("alone"),
           "count_users: how many share a storage, by its _cdata, or None; alone: a tensor that shares "
           "nothing.")
      .def("expect", &TensorGradients::expect, py::arg("number"), py::arg("like"), py::arg("strides"),
           "What a gradient will look like: a tensor of its dtype and shape, and strides.")
      .def("fetch", &TensorGradients::fetch, py::arg("number"), py::arg("gradient"),
           "The address of a gradient that looks so, is alone in its memory, and is reduced there from now "
           "on;\n"
           "0: it is not like that.")
      .def("find_changed", &TensorGradients::find_changed, py::arg("parameters"),
           "The first of the round that its parameter does not have any more, or that was written to.")
      .def("in_place", &TensorGradients::in_place, py::arg("parameters"),
           "Those of the round that their parameters still have.")
      .def("end_round", &TensorGradients::end_round)
      .def("reduced", &TensorGradients::reduced, py::arg("number"),
           "What was reduced last: a weak reference, address and version; None: nothing, or not here.")
      .def("forget", &TensorGradients::forget, py::arg("number"), "Another one is the last that was reduced.")
      .def("incoming", &TensorGradients::incoming, py::arg("number"),
           "Where the gradient was that autograd has accumulated in this round; 0: not known here.")
      .def("incoming_hook", &incoming_hook, py::arg("number"), py::arg("otherwise"),
           "A function that notes where a tensor is, or calls `otherwise` with it.");
}

}  // namespace multiring::binding
