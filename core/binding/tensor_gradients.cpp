#include "binding/tensor_gradients.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/arrays/array_view.h"
#include "binding/arrays/dtypes.h"
#include "binding/arrays/exchange.h"
#include "binding/arrivals.h"

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

using Parameters = py::typing::List<py::typing::Optional<py::object>>;

/// One backward pass, which autograd holds.
struct Pass {};

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

  /// The addresses of those gradients that look so, are alone in their memory, and are reduced there from now
  /// on, and the gradients; 0 and whatever there is for others.
  std::pair<py::typing::List<std::uintptr_t>, py::typing::List<py::object>> fetch(
      const Parameters& parameters, const std::vector<std::size_t>& numbers) {
    static PyObject* const name = kept_name("grad");
    std::pair<py::typing::List<std::uintptr_t>, py::typing::List<py::object>> found{py::list(numbers.size()),
                                                                                    py::list(numbers.size())};
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      Entry& entry = entries_.at(numbers[i]);
      const py::handle parameter = PyList_GET_ITEM(parameters.ptr(), static_cast<Py_ssize_t>(numbers[i]));
      py::object gradient = parameter.is_none() ? py::none() : attribute_of(parameter, name);
      if (!gradient) throw py::error_already_set();
      const std::uintptr_t address = gradient.is_none() ? 0 : take(entry, gradient);
      PyList_SET_ITEM(found.first.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromSize_t(address));
      PyList_SET_ITEM(found.second.ptr(), static_cast<Py_ssize_t>(i), gradient.release().ptr());
    }
    return found;
  }

  void follow(std::shared_ptr<Arrivals> arrivals, std::vector<std::int64_t> indices) {
    if (indices.size() != entries_.size()) throw_usage("as many indices as parameters are needed");
    arrivals_ = std::move(arrivals);
    indices_ = std::move(indices);
  }

  /// While the result lives, gradients that arrive are marked.
  std::shared_ptr<Pass> begin_pass() {
    auto pass = std::make_shared<Pass>();
    pass_ = pass;
    return pass;
  }

  /// Mark the gradient of a parameter; nothing: it is not for this class to do that.
  std::optional<Arrivals::Found> arrived(std::size_t number, py::handle parameter) {
    static PyObject* const name = kept_name("grad");
    static PyObject* const required = kept_name("requires_grad");
    if (pass_.expired() || arrivals_ == nullptr || !arrivals_->is_open() || indices_[number] < 0)
      return std::nullopt;
    const py::object gradient = attribute_of(parameter, name);
    if (!gradient || gradient.is_none()) return PyErr_Clear(), std::nullopt;
    const py::object requires_gradient = attribute_of(gradient, required);
    if (!requires_gradient.is(py::handle(Py_False))) return PyErr_Clear(), std::nullopt;
    const Arrivals::Found found = arrivals_->mark(static_cast<std::size_t>(indices_[number]));
    return found == Arrivals::kSecond ? std::nullopt : std::optional(found);
  }

  std::optional<std::size_t> find_changed(const Parameters& parameters) const {
    for (std::size_t number = 0; number < entries_.size(); ++number) {
      const Entry& entry = entries_[number];
      const py::handle parameter = PyList_GET_ITEM(parameters.ptr(), static_cast<Py_ssize_t>(number));
      if (entry.gradient && !parameter.is_none() &&
          (!has(parameter, entry.gradient) || version_of(entry.gradient) != entry.version))
        return number;
    }
    return std::nullopt;
  }

  std::vector<std::size_t> in_place(const Parameters& parameters) const {
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
  /// False: it does not look as expected.
  bool note_incoming(std::size_t number, PyObject* gradient) {
    Entry& entry = entries_[number];
    entry.incoming = entry.form == nullptr ? 0 : host_address(gradient);
    if (entry.incoming == 0) entry.form = nullptr;
    return entry.incoming != 0;
  }

 private:
  struct Entry {
    /// Null: not to be described, also when a gradient has been something else: its library may make an
    /// exception with a stack trace of each that DLPack does not know, which takes milliseconds.
    const Form* form = nullptr;
    std::uintptr_t incoming = 0;  // where autograd has it before it is accumulated
    std::uintptr_t address = 0;
    std::int64_t version = 0;
    py::object gradient;  // while the round is under way
    py::object weak;      // afterwards
  };

  std::uintptr_t take(Entry& entry, const py::object& gradient) const {
    dlpack::Tensor tensor;
    if (entry.form == nullptr || alone_ <= 0) return 0;
    if (!describe_plainly(gradient.ptr(), &tensor)) return entry.form = nullptr, 0;
    if (!entry.form->fits(tensor) || users_of(gradient) != alone_) return 0;
    entry.version = version_of(gradient);
    entry.address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
    entry.weak = py::object();
    entry.gradient = gradient;
    return entry.address;
  }

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
  std::shared_ptr<Arrivals> arrivals_;
  std::vector<std::int64_t> indices_;  // in the reducer whose arrivals these are, by number; -1: not there
  std::weak_ptr<Pass> pass_;
};

/// A plain C function of Python, which autograd calls: with a gradient that it is about to accumulate, or
/// with a parameter that has got one.
struct Hook {
  std::shared_ptr<TensorGradients> gradients;
  std::size_t number;
  py::object adapter;
};

constexpr const char* kHook = "multiring.GradientHook";

PyObject* note_incoming(const Hook& hook, PyObject* gradient) {
  if (hook.gradients->note_incoming(hook.number, gradient)) Py_RETURN_NONE;
  return PyObject_CallOneArg(hook.adapter.ptr(), gradient);
}

PyObject* note_arrived(const Hook& hook, PyObject* parameter) {
  static PyObject* const arrived = kept_name("arrived");
  static PyObject* const complete = kept_name("bucket_complete");
  const auto found = hook.gradients->arrived(hook.number, parameter);
  if (found == Arrivals::kWaits) Py_RETURN_NONE;
  if (found == Arrivals::kComplete) return PyObject_CallMethodNoArgs(hook.adapter.ptr(), complete);
  const py::int_ number(hook.number);
  return PyObject_CallMethodObjArgs(hook.adapter.ptr(), arrived, number.ptr(), parameter, nullptr);
}

template <PyObject* (*Note)(const Hook&, PyObject*)>
PyObject* call_hook(PyObject* self, PyObject* tensor) {
  try {
    const auto* const hook = static_cast<const Hook*>(PyCapsule_GetPointer(self, kHook));
    return hook == nullptr ? nullptr : Note(*hook, tensor);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef incoming_method = {"note_incoming", call_hook<note_incoming>, METH_O, nullptr};
PyMethodDef arrived_method = {"note_arrived", call_hook<note_arrived>, METH_O, nullptr};

template <PyMethodDef* Method>
py::object make_hook(std::shared_ptr<TensorGradients> gradients, std::size_t number, py::object adapter) {
  const py::capsule self(new Hook{std::move(gradients), number, std::move(adapter)}, kHook,
                         [](void* pointer) { delete static_cast<Hook*>(pointer); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(Method, self.ptr()));
}

bool is_arrival_hook(py::handle object) {
  return PyCFunction_Check(object.ptr()) != 0 &&
         PyCFunction_GET_FUNCTION(object.ptr()) == call_hook<note_arrived>;
}

}  // namespace

void bind_tensor_gradients(py::module_& module) {
  py::class_<Pass, std::shared_ptr<Pass>>(module, "TensorPass", "A backward pass.");
  py::class_<TensorGradients, std::shared_ptr<TensorGradients>>(
      module, "TensorGradients", "The gradients of a model that are reduced in their own memory, by number.")
      .def(py::init<std::size_t, py::object, py::handle>(), py::arg("count"), py::arg("count_users"),
           py::arg("alone"),
           "count_users: how many share a storage, by its _cdata, or None; alone: a tensor that shares "
           "nothing.")
      .def("expect", &TensorGradients::expect, py::arg("number"), py::arg("like"), py::arg("strides"),
           "What a gradient will look like: a tensor of its dtype and shape, and strides; None: not to be\n"
           "described.")
      .def("fetch", &TensorGradients::fetch, py::arg("parameters"), py::arg("numbers"),
           "The addresses of gradients that look so, are alone in their memory, and are reduced there from "
           "now\n"
           "on, and the gradients; 0 for one that is not like that.")
      .def("follow", &TensorGradients::follow, py::arg("arrivals"), py::arg("indices"),
           "Whose arrivals are marked; for each number the index there, or -1.")
      .def("begin_pass", &TensorGradients::begin_pass,
           "While the result lives, gradients that arrive are marked.")
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
      .def("incoming_hook", &make_hook<&incoming_method>, py::arg("number"), py::arg("adapter"),
           "A function that notes where a tensor is, or calls `adapter` with it.")
      .def("arrival_hook", &make_hook<&arrived_method>, py::arg("number"), py::arg("adapter"),
           "A function that marks a parameter's gradient. It calls adapter.bucket_complete() where that was "
           "the\n"
           "last of a bucket, and adapter.arrived(number, parameter) where there is more to do.");
  module.def("is_arrival_hook", &is_arrival_hook, py::arg("hook"));
}

}  // namespace multiring::binding
