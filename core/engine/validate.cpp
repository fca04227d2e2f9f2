#include "engine/validate.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "topology/chunks.h"

namespace multiring {

void throw_usage(const Operation& operation, const std::string& message) {
  ErrorContext context;
  context.operation = op_kind_name(operation.descriptor.key.kind);
  context.tensor = operation.descriptor.name_view();
  throw Error(ErrorKind::kUsage, describe(operation.descriptor) + ": " + message, context);
}

namespace {

/// Reductions and broadcasts work in place, and a gather may have its input at its offset there; an
/// all-to-all would read what it has written.
void require_apart(const Operation& operation) {
  const Descriptor& descriptor = operation.descriptor;
  const std::byte *in = operation.input, *out = operation.output;
  if (in == nullptr || out == nullptr || descriptor.bytes == 0 || operation.output_bytes == 0) return;
  const OpKind kind = descriptor.key.kind;
  const bool in_place =
      kind == OpKind::kAllreduce || kind == OpKind::kBroadcast || kind == OpKind::kReduceScatter;
  if (!in_place && kind != OpKind::kAlltoall) return;
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
  const bool has_root = kind == OpKind::kBroadcast || kind == OpKind::kGather || kind == OpKind::kScatter ||
                        kind == OpKind::kSend || kind == OpKind::kReceive;
  if (has_root && (descriptor.key.root < 0 || descriptor.key.root >= size))
    throw_usage(operation, "rank " + std::to_string(descriptor.key.root) + " is not in communicator '" +
                               communicator + "' of size " + std::to_string(size));
  if (descriptor.key.op == ReduceOp::kAverage && descriptor.dtype == DType::kBool)
    throw_usage(operation, "bool has no average; use max (or) or min (and)");
  const bool scales = descriptor.key.prescale != 1.0 || descriptor.key.postscale != 1.0;
  if ((kind == OpKind::kAllreduce || kind == OpKind::kReduceScatter) && scales &&
      descriptor.dtype == DType::kBool)
    throw_usage(operation, "bool cannot be scaled");
  if (is_rounded(descriptor.key.comm_dtype) &&
      (kind != OpKind::kAllreduce || descriptor.dtype != DType::kFloat32))
    throw_usage(operation, "only an allreduce of float32 can be sent as another dtype between hosts");
  require_apart(operation);
  if (kind == OpKind::kReduceScatter && operation.output != nullptr && descriptor.rows > 0) {
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
