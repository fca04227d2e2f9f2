#include "binding/arrays/plain_call.h"

#include <cxxabi.h>
#include <pybind11/numpy.h>

#include <optional>
#include <string_view>
#include <utility>

#include "binding/arrays/array_view.h"
#include "binding/arrays/dtypes.h"
#include "binding/gil.h"
#include "binding/interrupt.h"
#include "binding/program_call.h"
#include "collective/kinds.h"

namespace multiring::binding {
namespace {

constexpr const char* kCapsule = "multiring.Communicator";

std::optional<DType> numpy_dtype(int type_num) {
  using Api = py::detail::npy_api;
  static constexpr std::pair<int, DType> kKnown[] = {
      {Api::NPY_BOOL_, DType::kBool},
      {Api::NPY_BYTE_, DType::kInt8},
      {Api::NPY_UBYTE_, DType::kUInt8},
      {Api::NPY_SHORT_, DType::kInt16},
      {Api::NPY_USHORT_, DType::kUInt16},
      {Api::NPY_INT_, DType::kInt32},
      {Api::NPY_UINT_, DType::kUInt32},
      {Api::NPY_LONG_, sizeof(long) == 8 ? DType::kInt64 : DType::kInt32},
      {Api::NPY_ULONG_, sizeof(long) == 8 ? DType::kUInt64 : DType::kUInt32},
      {Api::NPY_FLOAT_, DType::kFloat32},
      {Api::NPY_DOUBLE_, DType::kFloat64},
      {Api::NPY_CFLOAT_, DType::kComplex64},
      {Api::NPY_CDOUBLE_, DType::kComplex128},
      {23, DType::kFloat16}};  // NPY_HALF, which pybind11 does not name
  for (const auto& [number, dtype] : kKnown)
    if (number == type_num) return dtype;
  return std::nullopt;
}

/// What the call needs of an array, which the caller's arguments hold; a tensor may get other memory
/// meanwhile.
struct PlainArray {
  std::byte* data = nullptr;
  DType dtype = DType::kUInt8;
  int dims = 0;
  const std::int64_t* shape = nullptr;
  std::uint64_t count = 1;
  SharedTensor shared;

  bool take(PyObject* object, bool writable) {
    const bool is_known = Py_TYPE(object) == py::detail::npy_api::get().PyArray_Type_
                              ? take_numpy(object, writable)
                              : take_dlpack(object, writable);
    for (int dim = 0; is_known && dim < dims; ++dim) count *= static_cast<std::uint64_t>(shape[dim]);
    return is_known && data != nullptr;
  }
  std::size_t bytes() const { return count * dtype_size(dtype); }

 private:
  bool take_numpy(PyObject* object, bool writable) {
    const auto* array = py::detail::array_proxy(object);
    int flags = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_;
    if (writable) flags |= py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    if ((array->flags & flags) != flags || array->nd > Descriptor::kMaxDims) return false;
    const auto* type = py::detail::array_descriptor_proxy(array->descr);
    const auto known = numpy_dtype(type->type_num);
    // '=' is native, '|' of one byte; NumPy writes native order as '=' whatever was asked for.
    if (!known || (type->byteorder != '=' && type->byteorder != '|')) return false;
    data = reinterpret_cast<std::byte*>(array->data);
    dtype = *known;
    dims = array->nd;
    static_assert(sizeof(Py_intptr_t) == sizeof(std::int64_t));
    shape = reinterpret_cast<const std::int64_t*>(array->dimensions);
    return true;
  }

  bool take_dlpack(PyObject* object, bool writable) {
    shared = share_plainly(object);
    if (shared == nullptr || (writable && (shared->flags & dlpack::kReadOnly) != 0)) return false;
    const dlpack::Tensor& tensor = shared->tensor;
    if (tensor.dims > Descriptor::kMaxDims || !in_c_order(tensor) || !is_stored(object, tensor)) return false;
    const auto known = dlpack_dtype(tensor.dtype);
    if (!known) return false;
    data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    dtype = *known;
    dims = tensor.dims;
    shape = tensor.shape;
    return true;
  }
};

bool take_text(PyObject* object, std::string_view* text) {
  if (object == Py_None) return true;
  Py_ssize_t length = 0;
  const char* data = PyUnicode_Check(object) != 0 ? PyUnicode_AsUTF8AndSize(object, &length) : nullptr;
  if (data == nullptr) return PyErr_Clear(), false;
  *text = {data, static_cast<std::size_t>(length)};
  return true;
}

bool take_op(PyObject* object, ReduceOp* op) {
  std::string_view text;
  if (!take_text(object, &text)) return false;
  for (int index = 0; index < kReduceOpCount; ++index) {
    *op = static_cast<ReduceOp>(index);
    if (text == reduce_op_name(*op)) return true;
  }
  return false;
}

/// What `find` makes of a name; None leaves the default.
template <class Enum>
bool take_named(PyObject* object, std::optional<Enum> (*find)(std::string_view), Enum* value) {
  std::string_view text;
  if (object == Py_None) return true;
  if (!take_text(object, &text)) return false;
  const std::optional<Enum> found = find(text);
  if (found) *value = *found;
  return found.has_value();
}

bool take_crossing(PyObject* object, MatchKey* key) {
  if (PyDict_CheckExact(object) == 0) return false;
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(object, &position, &name, &value) != 0) {
    std::string_view text;
    if (!take_text(name, &text)) return false;
    const bool known = text == "comm_dtype" ? take_named(value, &find_comm_dtype, &key->comm_dtype)
                                            : text == "order" && take_named(value, &find_order, &key->order);
    if (!known) return false;
  }
  return true;
}

bool take_number(PyObject* object, double* number) {
  if (PyFloat_CheckExact(object) == 0) return false;
  *number = PyFloat_AS_DOUBLE(object);
  return true;
}

/// The arguments of the call in order, of which the first two are `arrays` then; false where one is not of
/// the plain kind.
bool take_arguments(PyObject* const* args, PlainArray (&arrays)[2], Operation* operation, double* timeout) {
  const bool in_place = args[0] == args[1];
  PlainArray& in = arrays[0];
  PlainArray& out = in_place ? in : arrays[1];
  if (!in.take(args[0], in_place)) return false;
  if (!in_place && (!out.take(args[1], true) || out.dtype != in.dtype || out.count != in.count)) return false;
  if (in.data != out.data && in.data < out.data + out.bytes() && out.data < in.data + in.bytes())
    return false;
  Descriptor& descriptor = operation->descriptor;
  std::string_view name = "";
  *timeout = -1.0;
  if (!take_op(args[2], &descriptor.key.op) || !take_text(args[3], &name) ||
      !take_number(args[4], &descriptor.key.prescale) || !take_number(args[5], &descriptor.key.postscale) ||
      (args[6] != Py_None && (!take_number(args[6], timeout) || !(*timeout >= 0))) ||
      !take_crossing(args[7], &descriptor.key))
    return false;
  descriptor.key.kind = OpKind::kAllreduce;
  descriptor.set_name(name);
  descriptor.dtype = in.dtype;
  descriptor.dims = static_cast<std::uint8_t>(in.dims);
  for (int dim = 0; dim < in.dims; ++dim)
    descriptor.shape[static_cast<std::size_t>(dim)] = static_cast<std::uint64_t>(in.shape[dim]);
  set_extents(descriptor);
  operation->input = in.data;
  operation->output = out.data;
  operation->output_bytes = out.bytes();
  return true;
}

PyObject* plain_allreduce(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
  auto* self = static_cast<std::shared_ptr<Communicator>*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (self == nullptr) return nullptr;
  if (count != 8) {
    PyErr_Format(PyExc_TypeError, "expected 8 arguments, got %zd", count);
    return nullptr;
  }
  try {
    PlainArray arrays[2];
    Operation operation;
    double timeout = -1.0;
    if (!take_arguments(args, arrays, &operation, &timeout)) Py_RETURN_FALSE;
    {
      const ProgramCall call(timeout < 0 ? (*self)->number() : 0);
      (*self)->run(operation, call_options(timeout));
    }
    Py_RETURN_TRUE;
  } catch (py::error_already_set& error) {
    error.restore();
#ifdef __GLIBCXX__
  } catch (abi::__forced_unwind&) {  // the thread is being ended
    throw;
#endif
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

PyMethodDef plain_allreduce_method = {
    "allreduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(plain_allreduce)), METH_FASTCALL,
    nullptr};

}  // namespace

py::object make_plain_allreduce(std::shared_ptr<Communicator> communicator) {
  auto* held = new std::shared_ptr<Communicator>(std::move(communicator));
  const py::capsule capsule(held, kCapsule, [](void* pointer) {
    // The last reference joins the progress thread, which may need the GIL to release arrays.
    const GilRelease release;
    delete static_cast<std::shared_ptr<Communicator>*>(pointer);
  });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&plain_allreduce_method, capsule.ptr()));
}

}  // namespace multiring::binding
