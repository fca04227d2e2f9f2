// The functions of libcuda.so.1 that load kernels and run them. What the stand-in for NVRTC has compiled is
// the number of a dtype: kernels are those of core/device/kernels, compiled for the host.

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "fake_cuda/host_kernels.h"
#include "fake_cuda/kernel_image.h"
#include "fake_cuda/machine.h"

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))

extern "C" multiring::cuda::Result cuCtxPopCurrent_v2(multiring::cuda::Context* context);
extern "C" multiring::cuda::Result cuCtxPushCurrent_v2(multiring::cuda::Context context);

namespace multiring::testing {
namespace {

using namespace cuda;  // NOLINT: the types of the driver
constexpr Result kInvalidImage = 200;
constexpr Result kNotFound = 500;
// Of element sizes, by the numbers of DType.
constexpr std::size_t kSizes[kKernelDTypes] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};

FakeMachine& machine() { return FakeMachine::current(); }

int current_device() {
  Context context = nullptr;
  if (cuCtxPopCurrent_v2(&context) != kSuccess) return -1;
  cuCtxPushCurrent_v2(context);
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
}

/// A handle that names a dtype.
template <class Handle>
Handle handle_of(int dtype) {
  return reinterpret_cast<Handle>(static_cast<std::uintptr_t>(dtype) + 1);
}

bool is_on_device(const void* memory, std::size_t bytes) {
  const FakeMachine::Block* const block = machine().block_of(memory);
  return block != nullptr && block->kind == MemoryKind::kDevice &&
         block == machine().block_of(static_cast<const std::byte*>(memory) + bytes - 1);
}

/// The elements [begin, end) of what a kernel is given.
void run(int dtype, const peer::ReduceJob& all, std::size_t begin, std::size_t end, int device) {
  peer::ReduceJob job = all;
  const std::size_t size = kSizes[dtype];
  const auto part_of = [&](const void* memory) {
    const auto* const part = static_cast<const std::byte*>(memory) + begin * size;
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(part) % size == 0;
    return is_aligned && is_on_device(part, (end - begin) * size) ? machine().view(part) : nullptr;
  };
  bool all_found = true;
  for (unsigned rank = 0; rank < job.ranks; ++rank)
    all_found = (job.inputs[rank] = part_of(all.inputs[rank])) != nullptr && all_found;
  for (unsigned rank = 0; rank < job.written; ++rank)
    all_found = (job.outputs[rank] = part_of(all.outputs[rank])) != nullptr && all_found;
  if (!all_found) return machine().fail_device(device, kIllegalAddress);
  job.count = end - begin;
  reduce_on_host(dtype, job);
}

}  // namespace
}  // namespace multiring::testing

using namespace multiring;           // NOLINT
using namespace multiring::testing;  // NOLINT
using namespace multiring::cuda;     // NOLINT

FAKE_CUDA Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  const std::lock_guard lock(machine().mutex());
  *value = attribute == kMultiprocessors ? 2 : attribute == kCapabilityMajor ? kFakeCapability / 10 : 0;
  return machine().enter("device_attribute", device);
}

FAKE_CUDA Result cuModuleLoadData(Module* module, const void* image) {
  const std::lock_guard lock(machine().mutex());
  if (const Result result = machine().enter("module_load", current_device()); result != kSuccess)
    return result;
  if (current_device() < 0) return kInvalidContext;
  int dtype = -1;
  if (std::sscanf(static_cast<const char*>(image), kFakeImage, &dtype) != 1) return kInvalidImage;
  *module = handle_of<Module>(dtype);
  return kSuccess;
}

FAKE_CUDA Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  const std::lock_guard lock(machine().mutex());
  if (std::strcmp(name, "multiring_reduce") != 0) return kNotFound;
  *function = reinterpret_cast<Function>(module);
  return machine().enter("module_function", current_device());
}

FAKE_CUDA Result cuLaunchKernel(Function function, unsigned blocks, unsigned, unsigned, unsigned threads,
                                unsigned, unsigned, unsigned, Stream handle, void** arguments, void**) {
  const std::lock_guard lock(machine().mutex());
  const int device = current_device();
  if (const Result result = machine().enter("launch_kernel", device); result != kSuccess) return result;
  FakeMachine::Stream* const stream = machine().find_stream(reinterpret_cast<std::uintptr_t>(handle), device);
  if (device < 0 || stream == nullptr || stream->device != device) return kInvalidContext;
  if (blocks == 0 || threads == 0 || threads > 1024) return kInvalidValue;
  const int dtype = static_cast<int>(reinterpret_cast<std::uintptr_t>(function)) - 1;
  const auto job = *static_cast<const peer::ReduceJob*>(arguments[0]);
  // Others may see one half.
  const std::size_t half = job.count / 2;
  if (half > 0) machine().enqueue(*stream, {.work = [=] { run(dtype, job, 0, half, device); }});
  machine().enqueue(*stream, {.work = [=] { run(dtype, job, half, job.count, device); }});
  return kSuccess;
}
