#include "binding/arrays/result.h"

#include <pybind11/stl.h>

#include <numeric>
#include <string_view>

#include "binding/arrays/array_view.h"
#include "binding/arrays/devices.h"
#include "collective/kinds.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

struct Exported {
  dlpack::ManagedTensor managed;
  std::shared_ptr<ResultBuffer> buffer;
  std::vector<std::int64_t> shape;
};

void delete_exported(dlpack::ManagedTensor* managed) { delete static_cast<Exported*>(managed->context); }

void delete_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;  // consumed: its consumer deletes
  delete_exported(static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

dlpack::DataType dlpack_type(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(dtype_size(dtype) * 8);
  const std::string_view name = dtype_name(dtype);
  const auto code = name == "bool"              ? dlpack::kBool
                    : name == "bfloat16"        ? dlpack::kBfloat
                    : name.starts_with("float") ? dlpack::kFloat
                    : is_complex(dtype)         ? dlpack::kComplex
                    : name.starts_with("uint")  ? dlpack::kUInt
                                                : dlpack::kInt;
  return {code, bits, 1};
}

}  // namespace

py::dtype numpy_dtype(DType dtype) {
  return py::dtype(dtype == DType::kBFloat16 ? "uint16" : dtype_name(dtype));
}

Result::Result(Operation& operation)
    : buffer_(std::make_shared<ResultBuffer>(std::move(operation.result))),
      dtype_(operation.descriptor.dtype),
      received_(operation.received) {
  const Descriptor& descriptor = operation.descriptor;
  shape_.assign(descriptor.shape.begin(), descriptor.shape.begin() + descriptor.dims);
  if (traits_of(descriptor).run == nullptr) return;  // a message has the shape that the descriptor says
  // The rows are what the bytes hold; the rest of the shape is that of the input.
  if (shape_.empty()) shape_.push_back(1);
  shape_[0] = std::accumulate(received_.begin(), received_.end(), std::uint64_t{0});
}

bool Result::on_device() const { return buffer_->buffer().on_device(); }

py::array Result::numpy() const {
  if (on_device()) throw_usage("the result lies in device memory; take it by DLPack");
  auto* held = new std::shared_ptr<ResultBuffer>(buffer_);
  const py::capsule owner(held,
                          [](void* pointer) { delete static_cast<std::shared_ptr<ResultBuffer>*>(pointer); });
  return py::array(numpy_dtype(dtype_), shape_, buffer_->data(), owner);
}

dlpack::Device Result::dlpack_device() const {
  if (on_device()) return {kind_of_devices(*Devices::require()), buffer_->buffer().device};
  return {dlpack::kCpu, 0};
}

py::object Result::dlpack() const {
  auto* exported = new Exported{{}, buffer_, {shape_.begin(), shape_.end()}};
  exported->managed.context = exported;
  exported->managed.deleter = delete_exported;
  dlpack::Tensor& tensor = exported->managed.tensor;
  tensor = {buffer_->data(),
            dlpack_device(),
            static_cast<std::int32_t>(shape_.size()),
            dlpack_type(dtype_),
            exported->shape.data(),
            nullptr,
            0};
  return py::reinterpret_steal<py::object>(PyCapsule_New(&exported->managed, "dltensor", delete_capsule));
}

void bind_result(py::module_& module) {
  py::class_<Result>(module, "Result", "Memory that the core allocated for a result.")
      .def_property_readonly("received", &Result::received, "Rows that came from each rank.")
      .def_property_readonly("shape", &Result::shape)
      .def_property_readonly("dtype", &Result::dtype)
      .def_property_readonly("on_device", &Result::on_device, "Whether the memory is that of a device.")
      .def("numpy", &Result::numpy, "A NumPy array over the memory; bfloat16 as uint16.")
      .def(
          "__dlpack__",
          // What a consumer asks for changes nothing: the memory is complete, new and not shared.
          [](const Result& self, const py::object&, const py::object&, const py::object&, const py::object&) {
            return self.dlpack();
          },
          py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
          py::arg("dl_device") = py::none(), py::arg("copy") = py::none())
      .def("__dlpack_device__", [](const Result& self) {
        const dlpack::Device device = self.dlpack_device();
        return py::make_tuple(device.type, device.id);
      });
}

}  // namespace multiring::binding
