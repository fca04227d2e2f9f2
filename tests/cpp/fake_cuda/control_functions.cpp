// What arrays and tests in Python ask of the devices, by ctypes: memory, streams and kernels as a framework
// has them. No context need be current.

#include <cstdint>
#include <cstring>
#include <vector>

#include "fake_cuda/machine.h"

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))

namespace multiring::testing {
namespace {

using Lock = std::unique_lock<std::recursive_mutex>;

FakeMachine& machine() { return FakeMachine::current(); }

std::byte* as_memory(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

/// An array of up to `kMaxDims` dimensions that need not be contiguous.
struct Layout {
  std::uintptr_t address;
  std::vector<std::int64_t> strides;  // bytes
};

void copy_elements(std::byte* to, std::byte* from, const Layout& to_layout, const Layout& from_layout,
                   const std::vector<std::int64_t>& shape, std::size_t item, std::size_t dim) {
  if (dim == shape.size()) {
    std::memcpy(to, from, item);
    return;
  }
  for (std::int64_t i = 0; i < shape[dim]; ++i)
    copy_elements(to + i * to_layout.strides[dim], from + i * from_layout.strides[dim], to_layout,
                  from_layout, shape, item, dim + 1);
}

void launch(std::uintptr_t stream, FakeMachine::Step step) {
  machine().enqueue(*machine().find_stream(stream, 0), std::move(step));
}

}  // namespace
}  // namespace multiring::testing

using namespace multiring;           // NOLINT
using namespace multiring::testing;  // NOLINT

/// The options of the variable FAKE_CUDA, from now on.
FAKE_CUDA void fake_cuda_configure(const char* options) {
  const Lock lock(machine().mutex());
  machine().configure(options);
}

FAKE_CUDA int fake_cuda_calls(const char* function) {
  const Lock lock(machine().mutex());
  return machine().calls(function);
}

FAKE_CUDA int fake_cuda_orderings(int ordering) {
  const Lock lock(machine().mutex());
  return machine().orderings(static_cast<Ordering>(ordering));
}

FAKE_CUDA std::uintptr_t fake_cuda_stream(int device) {
  const Lock lock(machine().mutex());
  return reinterpret_cast<std::uintptr_t>(&machine().make_stream(device));
}

FAKE_CUDA void fake_cuda_capture(std::uintptr_t stream, int capturing) {
  const Lock lock(machine().mutex());
  machine().find_stream(stream, 0)->capturing = capturing != 0;
}

/// 0: there is no room.
FAKE_CUDA std::uintptr_t fake_cuda_allocate(int device, std::size_t bytes) {
  const Lock lock(machine().mutex());
  return reinterpret_cast<std::uintptr_t>(machine().allocate(device, bytes));
}

FAKE_CUDA std::uintptr_t fake_cuda_allocate_managed(int device, std::size_t bytes) {
  const Lock lock(machine().mutex());
  return reinterpret_cast<std::uintptr_t>(machine().allocate_on_host(device, bytes, MemoryKind::kManaged));
}

/// When the stream gets there: the memory may be used again for what comes after in that stream.
FAKE_CUDA void fake_cuda_free(std::uintptr_t stream, std::uintptr_t memory) {
  const Lock lock(machine().mutex());
  launch(stream, {.work = [=] { machine().release(as_memory(memory)); }});
}

FAKE_CUDA void fake_cuda_write(std::uintptr_t stream, std::uintptr_t to, const char* from,
                               std::size_t bytes) {
  const Lock lock(machine().mutex());
  launch(stream, {.work = [to, data = std::vector<char>(from, from + bytes)] {
           std::memcpy(machine().view(as_memory(to)), data.data(), data.size());
         }});
}

/// Copies elements between arrays that need not be contiguous; strides in bytes.
FAKE_CUDA void fake_cuda_copy(std::uintptr_t stream, std::uintptr_t to, const std::int64_t* to_strides,
                              std::uintptr_t from, const std::int64_t* from_strides,
                              const std::int64_t* shape, int dims, std::size_t item) {
  const Lock lock(machine().mutex());
  const Layout target{to, {to_strides, to_strides + dims}};
  const Layout source{from, {from_strides, from_strides + dims}};
  launch(stream, {.work = [=, shape = std::vector<std::int64_t>(shape, shape + dims)] {
           copy_elements(machine().view(as_memory(target.address)), machine().view(as_memory(source.address)),
                         target, source, shape, item, 0);
         }});
}

/// to[i] = from[i] * factor + summand, of contiguous float32.
FAKE_CUDA void fake_cuda_scale(std::uintptr_t stream, std::uintptr_t to, std::uintptr_t from,
                               std::size_t count, float factor, float summand) {
  const Lock lock(machine().mutex());
  launch(stream, {.work = [=] {
           auto* const target = reinterpret_cast<float*>(machine().view(as_memory(to)));
           const auto* const source = reinterpret_cast<const float*>(machine().view(as_memory(from)));
           for (std::size_t i = 0; i < count; ++i) target[i] = source[i] * factor + summand;
         }});
}

/// What `after` is given from now on waits for what `before` has.
FAKE_CUDA void fake_cuda_order(std::uintptr_t before, std::uintptr_t after) {
  const Lock lock(machine().mutex());
  launch(after, {.waits_for = machine().end_of(*machine().find_stream(before, 0))});
}

/// A kernel that runs so long; negative: it never ends.
FAKE_CUDA void fake_cuda_busy(std::uintptr_t stream, double seconds) {
  const Lock lock(machine().mutex());
  launch(stream, {.ends = seconds >= 0, .seconds = std::max(seconds, 0.0)});
}

/// A kernel that fails: from then on every call that concerns its device does.
FAKE_CUDA void fake_cuda_fail(std::uintptr_t stream, int result) {
  const Lock lock(machine().mutex());
  const int device = machine().find_stream(stream, 0)->device;
  launch(stream, {.work = [=] { machine().fail_device(device, result); }});
}

/// Copies an array that is contiguous to the host, when the stream has done all that it was given.
FAKE_CUDA int fake_cuda_read(std::uintptr_t stream, void* to, std::uintptr_t from, std::size_t bytes) {
  Lock lock(machine().mutex());
  if (!machine().await(machine().end_of(*machine().find_stream(stream, 0)), lock)) return 1;
  std::memcpy(to, machine().view(as_memory(from)), bytes);
  return 0;
}
