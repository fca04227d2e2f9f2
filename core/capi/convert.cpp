// The C ABI's structs in the engine's terms, and back.

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "capi/handles.h"
#include "collective/kinds.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

static_assert(MR_FLOAT64 == static_cast<int>(DType::kFloat64) &&
              MR_BFLOAT16 == static_cast<int>(DType::kBFloat16));
static_assert(MR_PRODUCT == static_cast<int>(ReduceOp::kProduct));
static_assert(MR_COMM_DTYPE_BFLOAT16 == static_cast<int>(CommDtype::kBFloat16));
static_assert(MR_RECV == kPublicOpKinds - 1 && MR_BARRIER == static_cast<int>(OpKind::kBarrier));
static_assert(MR_OUTPUT_JOINED == static_cast<int>(OpTraits::Output::kJoined));
static_assert(MR_INTERNAL == static_cast<int>(ErrorKind::kInternal));

}  // namespace

mr_status report(mr_error* error, ErrorKind kind, const char* message, const ErrorContext& context) {
  const auto status = static_cast<mr_status>(kind);
  if (error == nullptr) return status;
  error->status = status;
  error->rank = context.rank;
  error->peer = context.peer;
  const std::size_t length = cut_length(message, sizeof error->message - 1);
  std::memcpy(error->message, message, length);
  error->message[length] = '\0';
  return status;
}

void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, message); }

namespace {

/// Product of extents and the element's size; a usage error if it does not fit.
void check_extent(const mr_operation& asked, std::size_t element_size) {
  std::uint64_t bytes = element_size;
  for (int dim = 0; dim < asked.dims; ++dim)
    if (__builtin_mul_overflow(bytes, asked.shape[dim], &bytes)) refuse("the shape is too large for memory");
}

}  // namespace

Operation convert(const mr_operation& asked, int size) {
  if (asked.struct_size != sizeof(mr_operation))
    refuse("mr_operation of another version: initialise it with MR_OPERATION_INIT");
  if (asked.kind < 0 || asked.kind >= kPublicOpKinds)
    refuse("unknown kind of operation " + std::to_string(asked.kind));
  if (asked.dtype < MR_BOOL || asked.dtype > MR_FLOAT64)
    refuse("unknown dtype " + std::to_string(asked.dtype));
  if (asked.op < MR_SUM || asked.op > MR_PRODUCT) refuse("unknown reduction " + std::to_string(asked.op));
  if (asked.comm_dtype < MR_COMM_DTYPE_DEFAULT || asked.comm_dtype > MR_COMM_DTYPE_BFLOAT16)
    refuse("unknown comm_dtype " + std::to_string(asked.comm_dtype));
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
  descriptor.key.comm_dtype = static_cast<CommDtype>(asked.comm_dtype);
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
