#include "binding/arrays/exchange.h"

namespace multiring::binding {
namespace {

/// A name that Python looks up by its address. Never freed: attributes are asked for until the process ends.
PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

/// Whether the type of an object has an attribute. To ask the object, and to clear the error that says no,
/// takes 20 times as long.
bool has_attribute(PyObject* object, PyObject* name) {
  return _PyType_Lookup(Py_TYPE(object), name) != nullptr;
}

/// An attribute, or what a method of that name returns, is true; not where there is none.
bool is_true(PyObject* object, PyObject* name, bool is_method) {
  PyObject* found = is_method ? PyObject_CallMethodNoArgs(object, name) : PyObject_GetAttr(object, name);
  if (found == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool result = PyObject_IsTrue(found) == 1;
  Py_DECREF(found);
  return result;
}

bool requires_gradient(PyObject* object) {
  static PyObject* const name = interned("requires_grad");
  return is_true(object, name, false);
}

const dlpack::ExchangeApi* api_of(PyTypeObject* type) {
  static PyObject* const name = interned("__dlpack_c_exchange_api__");
  PyObject* const members = type->tp_dict;
  PyObject* const capsule = members == nullptr ? nullptr : PyDict_GetItemWithError(members, name);
  if (capsule == nullptr || PyCapsule_IsValid(capsule, "dlpack_exchange_api") == 0) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api =
      static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  while (api != nullptr && api->version.major != dlpack::kMajorVersion) api = api->earlier;
  return api != nullptr && api->describe != nullptr ? api : nullptr;
}

/// Describes an array as describe_plainly does, whether or not its storage has all its elements.
bool describe(const dlpack::ExchangeApi* api, PyObject* object, dlpack::Tensor* tensor) {
  if (requires_gradient(object)) return false;
  if (api->describe(object, tensor) != 0) {
    PyErr_Clear();  // sparse, or on a device that DLPack does not know
    return false;
  }
  return tensor->device.type == dlpack::kCpu && !holds_negatives(object) &&
         !(tensor->dtype.code == dlpack::kComplex && holds_conjugates(object));
}

}  // namespace

bool holds_negatives(PyObject* object) {
  static PyObject* const name = interned("is_neg");
  return is_true(object, name, true);
}

bool holds_conjugates(PyObject* object) {
  static PyObject* const name = interned("is_conj");
  return has_attribute(object, name) && is_true(object, name, true);
}

std::optional<Storage> storage_of(PyObject* object) {
  static PyObject* const storage_name = interned("untyped_storage");
  static PyObject* const data_name = interned("data_ptr");
  if (!has_attribute(object, storage_name)) return std::nullopt;
  PyObject* const storage = PyObject_CallMethodNoArgs(object, storage_name);
  Storage found{nullptr, Storage::kUnknown, {}};
  if (storage != nullptr) {
    const Py_ssize_t bytes = PyObject_Size(storage);
    PyObject* const address = bytes < 0 ? nullptr : PyObject_CallMethodNoArgs(storage, data_name);
    if (address != nullptr) {
      found = {static_cast<const std::byte*>(PyLong_AsVoidPtr(address)), static_cast<std::size_t>(bytes),
               pybind11::reinterpret_borrow<pybind11::object>(storage)};
      Py_DECREF(address);
    }
    Py_DECREF(storage);
  }
  PyErr_Clear();
  return found;
}

const std::byte* data_of(PyObject* object) {
  static PyObject* const data_name = interned("data_ptr");
  PyObject* const address = PyObject_CallMethodNoArgs(object, data_name);
  const void* const found = address == nullptr ? nullptr : PyLong_AsVoidPtr(address);
  Py_XDECREF(address);
  PyErr_Clear();
  return static_cast<const std::byte*>(found);
}

// Strides are not negative there.
bool is_stored(PyObject* object, const dlpack::Tensor& tensor) {
  std::size_t last = 0;  // element
  for (int dim = 0; dim < tensor.dims; ++dim) {
    if (tensor.shape[dim] == 0) return true;
    const std::int64_t stride = tensor.strides == nullptr ? 0 : tensor.strides[dim];
    last += static_cast<std::size_t>((tensor.shape[dim] - 1) * stride);
  }
  if (tensor.strides == nullptr) {
    last = 1;
    for (int dim = 0; dim < tensor.dims; ++dim) last *= static_cast<std::size_t>(tensor.shape[dim]);
    --last;
  }
  const auto* const begin = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
  const std::optional<Storage> storage = storage_of(object);
  return tensor.data != nullptr &&
         (!storage || storage->holds(begin, (last + 1) * (tensor.dtype.bits / 8U) * tensor.dtype.lanes));
}

bool describe_plainly(PyObject* object, dlpack::Tensor* tensor) {
  const dlpack::ExchangeApi* const api = api_of(Py_TYPE(object));
  return api != nullptr && describe(api, object, tensor) && is_stored(object, *tensor);
}

std::uintptr_t host_address(PyObject* object) {
  const dlpack::ExchangeApi* const api = api_of(Py_TYPE(object));
  dlpack::Tensor tensor;
  if (api == nullptr) return 0;
  if (api->describe(object, &tensor) != 0) return PyErr_Clear(), 0;
  if (tensor.device.type != dlpack::kCpu) return 0;
  return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

bool in_c_order(const dlpack::Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (int dim = tensor.dims - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= tensor.shape[dim];
  }
  return true;
}

SharedTensor share_plainly(PyObject* object) {
  const dlpack::ExchangeApi* const api = api_of(Py_TYPE(object));
  dlpack::Tensor tensor;
  if (api == nullptr || !describe(api, object, &tensor)) return nullptr;
  dlpack::VersionedTensor* shared = nullptr;
  if (api->share(object, &shared) != 0) PyErr_Clear();
  return SharedTensor(shared);
}

}  // namespace multiring::binding
