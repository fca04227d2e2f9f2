#include "binding/arrays/array_view.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "binding/arrays/devices.h"
#include "binding/arrays/dtypes.h"
#include "collective/kinds.h"

namespace multiring::binding {
namespace {

std::string type_name(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

[[noreturn]] void throw_dtype(py::handle object) {
  std::string dtype = "?";
  if (py::hasattr(object, "dtype")) dtype = py::str(object.attr("dtype"));
  throw_usage("an array of type " + type_name(object) + " has dtype " + dtype +
              "; supported are bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, "
              "float64, complex64 and complex128 in native byte order. Convert it first.");
}

[[noreturn]] void throw_device(py::handle object, const std::string& why) {
  throw_usage("an array of type " + type_name(object) +
              " lies in device memory, which cannot be read: " + why + "; copy it to the host first");
}

std::shared_ptr<Devices> devices_for(py::handle object) {
  std::string why;
  std::shared_ptr<Devices> devices = Devices::of_process(&why);
  if (devices == nullptr) throw_device(object, why);
  return devices;
}

bool is_named_bfloat16(py::handle object) {
  return py::hasattr(object, "__array_interface__") &&
         std::string(py::str(object.attr("dtype"))) == "bfloat16";
}

}  // namespace

void throw_usage(const std::string& message) { throw Error(ErrorKind::kUsage, message); }

ArrayView::ArrayView(py::handle object, bool writable) {
  if (PyObject_CheckBuffer(object.ptr()) != 0)
    take_buffer(object, writable);
  else if (py::hasattr(object, "__dlpack__"))
    take_dlpack(object, writable);
  else if (py::hasattr(object, "__cuda_array_interface__"))
    take_from_device(object, writable, {.kind = MemoryKind::kDevice, .device = 0}, *devices_for(object));
  else
    throw_usage("expected an array (NumPy, or anything with the buffer protocol or DLPack), got " +
                type_name(object));
  require_memory(object);
}

ArrayView::~ArrayView() { release(); }

ArrayView::ArrayView(ArrayView&& other) noexcept { *this = std::move(other); }

ArrayView& ArrayView::operator=(ArrayView&& other) noexcept {
  if (this == &other) return *this;
  release();
  buffer_ = std::exchange(other.buffer_, Py_buffer{});
  owner_ = std::move(other.owner_);
  storage_ = std::move(other.storage_);
  shared_ = std::move(other.shared_);
  memory_ = other.memory_;
  dtype_ = other.dtype_;
  dims_ = other.dims_;
  shape_ = other.shape_;
  strides_ = other.strides_;
  count_ = other.count_;
  contiguous_ = other.contiguous_;
  is_negated_ = other.is_negated_;
  is_conjugated_ = other.is_conjugated_;
  return *this;
}

void ArrayView::release() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  owner_ = storage_ = py::object();
  shared_.reset();
}

void ArrayView::take_buffer(py::handle object, bool writable) {
  const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
    buffer_ = Py_buffer{};
    PyErr_Clear();
    if (is_named_bfloat16(object)) return take_array_interface(object, writable);
    // There are libraries whose arrays have the buffer protocol for memory that the host can read as well, or
    // not for all their dtypes.
    const bool is_foreign = !py::isinstance<py::array>(object) && py::hasattr(object, "__dlpack__");
    if (is_foreign || py::hasattr(object, "__cuda_array_interface__")) return take_dlpack(object, writable);
    if (writable) throw_usage("cannot write to an array of type " + type_name(object) + ": is it read-only?");
    throw_dtype(object);
  }
  const auto dtype = format_dtype(buffer_.format, static_cast<std::size_t>(buffer_.itemsize));
  if (!dtype) {
    release();
    buffer_ = Py_buffer{};
    if (is_named_bfloat16(object)) return take_array_interface(object, writable);
    throw_dtype(object);
  }
  dtype_ = *dtype;
  memory_.address = static_cast<std::byte*>(buffer_.buf);
  static_assert(sizeof(Py_ssize_t) == sizeof(std::int64_t));
  set_layout(buffer_.ndim, reinterpret_cast<const std::int64_t*>(buffer_.shape),
             reinterpret_cast<const std::int64_t*>(buffer_.strides));
}

void ArrayView::take_dlpack(py::handle object, bool writable) {
  shared_ = share_plainly(object.ptr());
  if (shared_ != nullptr) {
    if (writable && (shared_->flags & dlpack::kReadOnly) != 0)
      throw_usage("cannot write to a read-only array of type " + type_name(object));
    return take_tensor(object, shared_->tensor);
  }
  is_negated_ = holds_negatives(object.ptr());
  is_conjugated_ = holds_conjugates(object.ptr());
  if (is_negated_ || is_conjugated_) contiguous_ = false;
  // Conjugates are not exported by DLPack; the conjugate of them is a view of the same memory.
  const py::object plain =
      is_conjugated_ ? object.attr("conj")() : py::reinterpret_borrow<py::object>(object);
  std::int32_t type = 0;
  Buffer where{.kind = MemoryKind::kDevice};
  try {
    const auto device = plain.attr("__dlpack_device__")().cast<py::tuple>();
    type = device[0].cast<std::int32_t>();
    where.device = device[1].cast<int>();
    const bool is_on_host = type == dlpack::kCpu || type == dlpack::kCudaHost || type == dlpack::kRocmHost;
    if (is_on_host) owner_ = plain.attr("__dlpack__")();
  } catch (py::error_already_set& error) {
    throw_usage("cannot take an array of type " + type_name(object) + ": " +
                std::string(py::str(error.value())) +
                ". A tensor that requires a gradient is passed as tensor.detach().");
  }
  if (owner_) {
    memory_.kind = type == dlpack::kCpu ? MemoryKind::kHost : MemoryKind::kPinnedHost;
    return take_capsule(object);
  }
  if (type != dlpack::kCuda && type != dlpack::kCudaManaged && type != dlpack::kRocm)
    throw_device(object, "its DLPack device type is " + std::to_string(type) + ", and " +
                             std::to_string(dlpack::kCuda) + " (CUDA) and " + std::to_string(dlpack::kRocm) +
                             " (ROCm) are the only ones known");
  const std::shared_ptr<Devices> devices = devices_for(object);
  if ((type == dlpack::kRocm) != (kind_of_devices(*devices) == dlpack::kRocm))
    throw_device(object, type == dlpack::kRocm ? "it is ROCm's, and this process uses CUDA's driver"
                                               : "it is CUDA's, and this process uses HIP");
  if (type == dlpack::kCudaManaged) where.kind = MemoryKind::kManaged;
  take_from_device(plain, writable, where, *devices);
}

void ArrayView::take_capsule(py::handle object) {
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(owner_.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  take_tensor(object, managed->tensor);
}

void ArrayView::take_tensor(py::handle object, const dlpack::Tensor& tensor) {
  const auto dtype = dlpack_dtype(tensor.dtype);
  if (!dtype) throw_dtype(object);
  dtype_ = *dtype;
  memory_.address = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  if (tensor.strides == nullptr) return set_layout(tensor.dims, tensor.shape, nullptr);
  std::array<std::int64_t, Descriptor::kMaxDims> strides;
  const int known = std::min(tensor.dims, Descriptor::kMaxDims);  // more are refused
  for (int dim = 0; dim < known; ++dim)
    strides[static_cast<std::size_t>(dim)] =
        tensor.strides[dim] * static_cast<std::int64_t>(dtype_size(dtype_));
  set_layout(tensor.dims, tensor.shape, strides.data());
}

// The CUDA array interface names the stream that the array's library works on; by DLPack the library lets a
// stream that it is told, here the default one, wait for its own.
void ArrayView::take_from_device(py::handle object, bool writable, const Buffer& where,
                                 const Devices& devices) {
  memory_ = where;
  if (take_cuda_interface(object, writable, devices)) return;
  if (!py::hasattr(object, "__dlpack__")) throw_dtype(object);
  try {
    owner_ = object.attr("__dlpack__")(py::arg("stream") = reinterpret_cast<std::uintptr_t>(
                                           devices.driver().stream_of(Buffer::kDefaultStream)));
  } catch (py::error_already_set& error) {
    throw_usage("cannot take an array of type " + type_name(object) + ": " +
                std::string(py::str(error.value())));
  }
  take_capsule(object);
}

/// False: there is no such interface, or it leaves something out that DLPack may know.
bool ArrayView::take_cuda_interface(py::handle object, bool writable, const Devices& devices) {
  const py::object attribute = py::getattr(object, "__cuda_array_interface__", py::none());
  if (attribute.is_none()) return false;
  const auto interface = attribute.cast<py::dict>();
  const auto dtype = typestr_dtype(interface["typestr"].cast<std::string>());
  const bool has_dlpack = py::hasattr(object, "__dlpack__");
  if (!dtype || (has_dlpack && !interface.contains("stream"))) return false;
  if (interface.contains("mask") && !interface["mask"].is_none())
    throw_usage("an array of type " + type_name(object) +
                " has a mask, which is not looked at; fill it first");
  const auto data = interface["data"].cast<py::tuple>();
  if (writable && data[1].cast<bool>()) throw_usage("cannot write to a read-only array");
  const auto shape = interface["shape"].cast<std::vector<std::int64_t>>();
  memory_.address = reinterpret_cast<std::byte*>(data[0].cast<std::uintptr_t>());
  if (interface.contains("stream") && !interface["stream"].is_none())
    memory_.stream = interface["stream"].cast<std::uintptr_t>();
  dtype_ = *dtype;
  owner_ = py::reinterpret_borrow<py::object>(object);
  const bool has_strides = interface.contains("strides") && !interface["strides"].is_none();
  std::vector<std::int64_t> strides;
  if (has_strides) strides = interface["strides"].cast<std::vector<std::int64_t>>();
  set_layout(static_cast<int>(shape.size()), shape.data(), has_strides ? strides.data() : nullptr);
  if (count_ == 0) {  // lies nowhere: there is nothing to be ordered after, either
    memory_.stream = 0;
    return true;
  }
  devices.locate(memory_);
  // Memory that the host could read itself, but for what the stream still does to it.
  if (!memory_.on_device()) memory_.kind = MemoryKind::kManaged;
  if (memory_.device < 0) memory_.device = 0;
  return true;
}

void ArrayView::take_array_interface(py::handle object, bool writable) {
  const auto interface = object.attr("__array_interface__").cast<py::dict>();
  const auto data = interface["data"].cast<py::tuple>();
  if (writable && data[1].cast<bool>()) throw_usage("cannot write to a read-only array");
  owner_ = py::reinterpret_borrow<py::object>(object);
  dtype_ = DType::kBFloat16;
  memory_.address = reinterpret_cast<std::byte*>(data[0].cast<std::uintptr_t>());
  const auto shape = interface["shape"].cast<std::vector<std::int64_t>>();
  const auto strides = object.attr("strides").cast<std::vector<std::int64_t>>();
  set_layout(static_cast<int>(shape.size()), shape.data(), strides.data());
}

// A null pointer means "no output given"; an empty array may have one as well.
void ArrayView::require_memory(py::handle object) {
  static std::byte nothing{};
  if (count_ == 0) {
    if (memory_.address == nullptr) memory_.address = &nothing;
    return;
  }
  const StridedView view = described();
  std::optional<Storage> storage = storage_of(object.ptr());
  // A derived class may have its elements anywhere.
  if (storage && storage->bytes != Storage::kUnknown && memory_.address != nullptr &&
      !storage->holds(view.lowest(), view.extent()) && data_of(object.ptr()) != memory_.address)
    storage.reset();
  const bool is_emptied = storage && storage->bytes == 0;
  if (!is_emptied && (memory_.address == nullptr || (storage && storage->data == nullptr)))
    throw_usage("an array of type " + type_name(object) +
                " has no memory of its own: pass the array that it stands for, such as x.to_local() of a "
                "DTensor");
  if (storage && !storage->holds(view.lowest(), view.extent()))
    throw_usage("an array of type " + type_name(object) + " has elements in " +
                std::to_string(view.extent()) + " bytes, of which its storage of " +
                std::to_string(storage->bytes) +
                " bytes does not have all: it was given back or shortened, as FSDP does between uses of a "
                "parameter");
  if (storage) storage_ = storage->owner;
}

StridedView ArrayView::described() const {
  StridedView view{.data = memory_.address, .dtype = dtype_, .dims = dims_};
  view.is_negated = is_negated_;
  view.is_conjugated = is_conjugated_;
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(dims_); ++dim) {
    view.shape[dim] = static_cast<std::int64_t>(shape_[dim]);
    view.strides[dim] = strides_[dim];
  }
  return view;
}

StridedView ArrayView::strided() const {
  if (memory_.on_device()) throw_usage("the elements of an array on a device do not lie in C order");
  if (is_negated_ && !is_floating(dtype_))
    throw_usage("an array of integers holds the negatives of its elements; pass x.resolve_neg()");
  return described();
}

bool overlap_in_part(const ArrayView& a, const ArrayView& b) {
  if (a.bytes() == 0 || b.bytes() == 0 || (a.data() == b.data() && a.bytes() == b.bytes())) return false;
  const std::less<const std::byte*> before;
  return before(a.data(), b.data() + b.bytes()) && before(b.data(), a.data() + a.bytes());
}

void ArrayView::set_layout(int dims, const std::int64_t* shape, const std::int64_t* byte_strides) {
  if (dims > Descriptor::kMaxDims)
    throw_usage("arrays of more than " + std::to_string(Descriptor::kMaxDims) +
                " dimensions are not supported; reshape it");
  dims_ = dims;
  count_ = 1;
  for (int dim = 0; dim < dims; ++dim) {
    shape_[static_cast<std::size_t>(dim)] = static_cast<std::uint64_t>(shape[dim]);
    count_ *= static_cast<std::uint64_t>(shape[dim]);
  }
  memory_.bytes = bytes();
  auto expected = static_cast<std::int64_t>(dtype_size(dtype_));
  for (int dim = dims - 1; dim >= 0; --dim) {
    const std::int64_t stride = byte_strides == nullptr ? expected : byte_strides[dim];
    strides_[static_cast<std::size_t>(dim)] = stride;
    if (shape[dim] != 1 && count_ > 1 && stride != expected) contiguous_ = false;
    expected *= shape[dim];
  }
}

void ArrayView::describe_in(Descriptor& descriptor) const {
  descriptor.dtype = dtype_;
  descriptor.dims = static_cast<std::uint8_t>(dims_);
  descriptor.shape = shape_;
  set_extents(descriptor);
}

}  // namespace multiring::binding
