#include "engine/validate.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "collective/kinds.h"
#include "topology/chunks.h"

namespace multiring {

void throw_usage(const Operation& operation, const std::string& message) {
  ErrorContext context;
  context.operation = traits_of(operation.descriptor).name;
  context.tensor = operation.descriptor.name_view();
  throw Error(ErrorKind::kUsage, describe(operation.descriptor) + ": " + message, context);
}

namespace {

void require_apart(const Operation& operation) {
  const Descriptor& descriptor = operation.descriptor;
  const std::byte *in = operation.input, *out = operation.output;
  if (in == nullptr || out == nullptr || descriptor.bytes == 0 || operation.output_bytes == 0) return;
  const OpTraits::Overlap overlap = traits_of(descriptor).overlap;
  if (overlap == OpTraits::Overlap::kAny) return;
  const bool in_place = overlap == OpTraits::Overlap::kWhole;
  if (in_place && in == out && operation.output_bytes == descriptor.bytes) return;
  const std::less<const std::byte*> before;
  if (before(in, out + operation.output_bytes) && before(out, in + descriptor.bytes))
    throw_usage(operation, in_place ? "the output overlaps the input in part; give the input itself to work "
                                      "in place, or other memory"
                                    : "the output overlaps the input; give other memory");
}

}  // namespace

void validate(const Operation& operation, int rank, int size, const std::string& communicator) {
  const Descriptor& descriptor = operation.descriptor;
  const OpKind kind = descriptor.key.kind;
  const OpTraits& traits = traits_of(descriptor);
  if (traits.has_root && (descriptor.key.root < 0 || descriptor.key.root >= size))
    throw_usage(operation, "rank " + std::to_string(descriptor.key.root) + " is not in communicator '" +
                               communicator + "' of size " + std::to_string(size));
  // A sum that counts does not fit into a bool; product, min and max are what they are of 0 and 1.
  const bool adds = descriptor.key.op == ReduceOp::kSum || descriptor.key.op == ReduceOp::kAverage;
  if (traits.reduces && adds && descriptor.dtype == DType::kBool)
    throw_usage(operation, "bool has no " + std::string(reduce_op_name(descriptor.key.op)) +
                               "; use max (any rank has true) or min (all have), or convert to an integer "
                               "dtype to count");
  const bool scales = descriptor.key.prescale != 1.0 || descriptor.key.postscale != 1.0;
  if (traits.reduces && scales && descriptor.dtype == DType::kBool)
    throw_usage(operation, "bool cannot be scaled");
  if (traits.reduces && is_complex(descriptor.dtype) && !has_complex(descriptor.key.op))
    throw_usage(operation, "complex numbers have no " + std::string(reduce_op_name(descriptor.key.op)) +
                               ", only a sum, an average and a product; reduce x.real and x.imag, or abs(x)");
  if (traits.reduces && is_bitwise(descriptor.key.op) && (scales || is_floating(descriptor.dtype)))
    throw_usage(operation, scales ? "a bitwise reduction cannot be scaled"
                                  : "a bitwise reduction takes integers or bool");
  if (is_rounded(descriptor.key.comm_dtype) && !has_comm_dtype(descriptor))
    throw_usage(operation, "only an allreduce of float32 can be sent as another dtype between hosts");
  if (descriptor.key.order == Order::kAny && !traits.reduces)
    throw_usage(operation, "only an allreduce or a reduce_scatter can add in any order");
  require_apart(operation);
  const bool has_output =
      operation.output != nullptr || (operation.strided != nullptr && !operation.strided->outputs.empty());
  if (kind == OpKind::kReduceScatter && has_output && descriptor.rows > 0) {
    const Range block =
        block_range(descriptor.rows, static_cast<std::size_t>(size), static_cast<std::size_t>(rank));
    if (operation.output_bytes != block.size() * (descriptor.bytes / descriptor.rows))
      throw_usage(operation, "out has " + std::to_string(operation.output_bytes) +
                                 " bytes, but the block of rank " + std::to_string(rank) + " has " +
                                 std::to_string(block.size()) + " of " + std::to_string(descriptor.rows) +
                                 " rows");
  }
  if (kind == OpKind::kAlltoall) {
    std::uint64_t left = descriptor.rows;  // a sum could wrap
    bool fits = operation.splits.size() == static_cast<std::size_t>(size);
    for (const std::uint64_t rows : operation.splits) {
      fits = fits && rows <= left;
      left -= std::min(left, rows);
    }
    if (!fits || left > 0)
      throw_usage(operation, "splits must be " + std::to_string(size) + " numbers that add up to the " +
                                 std::to_string(descriptor.rows) + " rows");
  }
}

}  // namespace multiring
