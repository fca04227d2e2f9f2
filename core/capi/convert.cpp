#include "capi/convert.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/text.h"
#include "collective/kinds.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

static_assert(MR_COMPLEX128 == static_cast<int>(DType::kComplex128) &&
              MR_FLOAT64 == static_cast<int>(DType::kFloat64) &&
              MR_BFLOAT16 == static_cast<int>(DType::kBFloat16));
static_assert(MR_BITWISE_XOR == static_cast<int>(ReduceOp::kBitwiseXor));
static_assert(MR_ALLREDUCE == static_cast<int>(OpKind::kAllreduce) &&
              MR_BARRIER == static_cast<int>(OpKind::kBarrier));  // those between are in the same order
static_assert(MR_OUTPUT_JOINED == static_cast<int>(OpTraits::Output::kJoined));
static_assert(MR_INTERNAL == static_cast<int>(ErrorKind::kInternal));

/// Product of extents and the element's size; a usage error if it does not fit.
void check_extent(const mr_operation& asked, std::size_t element_size) {
  std::uint64_t bytes = element_size;
  for (int dim = 0; dim < asked.dims; ++dim)
    if (__builtin_mul_overflow(bytes, asked.shape[dim], &bytes)) refuse("the shape is too large for memory");
}

void place_on_devices(Operation& operation, void* stream) {
  auto arrays = std::make_unique<DeviceArrays>();
  const std::size_t bytes = operation.input != nullptr ? operation.descriptor.bytes : 0;
  try {
    arrays->devices = Devices::require();
    arrays->input = locate(*arrays->devices, operation.input, bytes, stream);
    arrays->output = locate(*arrays->devices, operation.output, operation.output_bytes, stream);
  } catch (const DeviceError& error) {
    throw DeviceError(error.kind(), describe(operation.descriptor) + ": " + error.what());
  } catch (const Error& error) {
    throw Error(error.kind(), describe(operation.descriptor) + ": " + error.what());
  }
  if (arrays->input.on_device() || arrays->output.on_device()) operation.on_devices = std::move(arrays);
}

}  // namespace

Buffer locate(const Devices& devices, const void* address, std::size_t bytes, void* stream) {
  Buffer found{.address = static_cast<std::byte*>(const_cast<void*>(address)), .bytes = bytes};
  if (bytes == 0) return found;
  if (stream != nullptr) found.stream = reinterpret_cast<std::uintptr_t>(stream);
  devices.locate(found);
  if (!found.on_device()) refuse("the array does not lie in a device's memory, but in the host's");
  return found;
}

void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, message); }

mr_error convert(const Error& error) {
  const ErrorContext& context = error.context();
  mr_error made = MR_ERROR_INIT;
  made.status = static_cast<mr_status>(error.kind());
  made.rank = context.rank;
  made.peer = context.peer;
  made.bytes = context.bytes;
  made.elapsed = context.elapsed;
  copy_cut(made.host, context.host);
  copy_cut(made.operation, context.operation);
  copy_cut(made.tensor, context.tensor);
  copy_cut(made.message, error.what());
  return made;
}

Error convert(const mr_error& error) {
  ErrorContext context;
  context.rank = error.rank;
  context.peer = error.peer;
  context.bytes = error.bytes;
  context.elapsed = error.elapsed;
  context.host = error.host;
  context.operation = error.operation;
  context.tensor = error.tensor;
  return Error(static_cast<ErrorKind>(error.status), error.message, context);
}

Operation convert(const mr_operation& asked, int size) {
  if (asked.struct_size != sizeof(mr_operation))
    refuse("mr_operation of another version: initialise it with MR_OPERATION_INIT");
  if (asked.kind < 0 || !is_collective(static_cast<OpKind>(std::min(asked.kind, 255))))
    refuse("unknown kind of operation " + std::to_string(asked.kind));
  if (asked.dtype < MR_BOOL || asked.dtype > MR_COMPLEX128)
    refuse("unknown dtype " + std::to_string(asked.dtype));
  if (asked.op < MR_SUM || asked.op > MR_BITWISE_XOR) refuse("unknown reduction " + std::to_string(asked.op));
  if (asked.dims < 0 || asked.dims > Descriptor::kMaxDims || (asked.dims > 0 && asked.shape == nullptr))
    refuse("dims must be 0 to 8, with a shape");
  check_extent(asked, dtype_size(static_cast<DType>(asked.dtype)));
  const OpTraits& traits = traits_of(static_cast<OpKind>(asked.kind));
  Operation operation;
  Descriptor& descriptor = operation.descriptor;
  descriptor.dtype = static_cast<DType>(asked.dtype);
  descriptor.dims = static_cast<std::uint8_t>(asked.dims);
  std::copy_n(asked.shape, asked.dims, descriptor.shape.begin());
  descriptor.key.kind = static_cast<OpKind>(asked.kind);
  descriptor.key.root = asked.root;
  if (traits.reduces) {
    descriptor.key.op = static_cast<ReduceOp>(asked.op);
    descriptor.key.prescale = asked.prescale;
    descriptor.key.postscale = asked.postscale;
  }
  descriptor.set_name(asked.name != nullptr ? asked.name : "");
  set_extents(descriptor);
  operation.input = static_cast<const std::byte*>(asked.input);
  operation.output = static_cast<std::byte*>(asked.output);
  operation.output_bytes = asked.output_bytes;
  if (descriptor.bytes > 0 && traits.output == OpTraits::Output::kSame &&
      (asked.output == nullptr || asked.output_bytes != descriptor.bytes))
    refuse(describe(descriptor) + " needs an output of " + std::to_string(descriptor.bytes) + " bytes");
  if (descriptor.bytes > 0 && traits.needs_input && asked.input == nullptr)
    refuse(describe(descriptor) + " needs an input");
  if (asked.on_device != 0) place_on_devices(operation, asked.stream);
  if (asked.kind == MR_ALLTOALL)
    for (int rank = 0; rank < size; ++rank)
      operation.splits.push_back(
          asked.splits != nullptr
              ? asked.splits[rank]
              : block_range(descriptor.rows, static_cast<std::size_t>(size), static_cast<std::size_t>(rank))
                    .size());
  return operation;
}

}  // namespace multiring
