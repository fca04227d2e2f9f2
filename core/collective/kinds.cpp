#include "collective/kinds.h"

#include "collective/collectives.h"

namespace multiring {
namespace {

using Compared = OpTraits::Compared;
using Output = OpTraits::Output;
using Overlap = OpTraits::Overlap;

// In the order of OpKind.
constexpr OpTraits kTraits[] = {
    {.name = "split",
     .run = allgather,
     .compared = Compared::kElements,
     .output = Output::kNone,
     .has_array = false},
    {.name = "symmetric_empty", .run = barrier, .compared = Compared::kElements, .output = Output::kNone},
    {.name = "send",
     .run = nullptr,
     .compared = Compared::kElements,
     .output = Output::kNone,
     .needs_input = true,
     .has_root = true},
    {.name = "recv",
     .run = nullptr,
     .compared = Compared::kElements,
     .output = Output::kSame,
     .has_root = true},
    {.name = "allreduce",
     .run = allreduce,
     .compared = Compared::kElements,
     .output = Output::kSame,
     .overlap = Overlap::kWhole,
     .needs_input = true,
     .reduces = true},
    {.name = "reduce_scatter",
     .run = reduce_scatter,
     .compared = Compared::kElements,
     .output = Output::kBlock,
     .overlap = Overlap::kWhole,
     .needs_input = true,
     .reduces = true},
    {.name = "allgather",
     .run = allgather,
     .compared = Compared::kRow,
     .output = Output::kJoined,
     .needs_input = true},
    {.name = "broadcast",
     .run = broadcast,
     .compared = Compared::kElements,
     .output = Output::kSame,
     .overlap = Overlap::kWhole,
     .needs_input = true,
     .has_root = true},
    {.name = "alltoall",
     .run = alltoall,
     .compared = Compared::kRow,
     .output = Output::kJoined,
     .overlap = Overlap::kDisjoint,
     .needs_input = true},
    {.name = "gather",
     .run = gather,
     .compared = Compared::kRow,
     .output = Output::kJoined,
     .needs_input = true,
     .has_root = true},
    {.name = "scatter",
     .run = scatter,
     .compared = Compared::kNothing,
     .output = Output::kBlock,
     .has_root = true},
    {.name = "barrier",
     .run = barrier,
     .compared = Compared::kNothing,
     .output = Output::kNone,
     .has_array = false},
};
static_assert(std::size(kTraits) == static_cast<std::size_t>(OpKind::kCount));

constexpr OpTraits kUnknown{
    .name = "unknown operation", .run = nullptr, .compared = Compared::kNothing, .output = Output::kNone};

}  // namespace

const OpTraits& traits_of(OpKind kind) {
  const auto index = static_cast<std::size_t>(kind);
  return index < std::size(kTraits) ? kTraits[index] : kUnknown;
}

void set_extents(Descriptor& descriptor) {
  std::uint64_t row = 1;
  for (std::size_t dim = 1; dim < descriptor.dims; ++dim) row *= descriptor.shape[dim];
  const OpTraits& traits = traits_of(descriptor);
  descriptor.rows = descriptor.dims > 0 ? descriptor.shape[0] : 1;
  descriptor.bytes = traits.has_array ? descriptor.rows * row * dtype_size(descriptor.dtype) : 0;
  descriptor.key.count = traits.compared == Compared::kElements ? descriptor.rows * row
                         : traits.compared == Compared::kRow    ? row
                                                                : 0;
}

}  // namespace multiring
