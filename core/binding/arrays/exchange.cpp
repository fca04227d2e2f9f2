#include "binding/arrays/exchange.h"

namespace multiring::binding {
namespace {

/// A name that Python looks up by its address. Never freed: attributes are asked for until the process ends.
PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

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

bool describe(const dlpack::ExchangeApi* api, PyObject* object, dlpack::Tensor* tensor) {
  if (requires_gradient(object)) return false;
  if (api->describe(object, tensor) != 0) {
    PyErr_Clear();  // sparse, or on a device that DLPack does not know
    return false;
  }
  return tensor->device.type == dlpack::kCpu && !holds_negatives(object);
}

}  // namespace

bool holds_negatives(PyObject* object) {
  static PyObject* const name = interned("is_neg");
  return is_true(object, name, true);
}

bool describe_plainly(PyObject* object, dlpack::Tensor* tensor) {
  const dlpack::ExchangeApi* const api = api_of(Py_TYPE(object));
  return api != nullptr && describe(api, object, tensor);
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
