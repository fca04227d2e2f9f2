#include "support/fake_gpu.h"

#include <gtest/gtest.h>

#include <utility>

namespace multiring::testing {
namespace {

using Lock = std::unique_lock<std::recursive_mutex>;

}  // namespace

// The driver's library is linked to this test, so it is the one that the process has.
FakeGpu::FakeGpu() {
  std::string why;
  if (!cuda::Driver::load("libcuda.so.1", &driver_, &why)) ADD_FAILURE() << why;
}

FakeGpu::~FakeGpu() {
  const Lock lock(machine_.mutex());
  if (ignores_) return;
  EXPECT_EQ(machine_.misuse(), "");
}

std::byte* FakeGpu::allocate(int device, std::size_t bytes) {
  const Lock lock(machine_.mutex());
  return machine_.allocate(device, bytes);
}

std::uintptr_t FakeGpu::make_stream(int device) {
  const Lock lock(machine_.mutex());
  return reinterpret_cast<std::uintptr_t>(&machine_.make_stream(device));
}

void FakeGpu::launch(std::uintptr_t stream, std::function<void()> kernel, bool ends) {
  const Lock lock(machine_.mutex());
  machine_.enqueue(*machine_.find_stream(stream, 0), {.work = std::move(kernel), .ends = ends});
}

void FakeGpu::synchronize(std::uintptr_t stream) {
  Lock lock(machine_.mutex());
  if (!machine_.await(machine_.end_of(*machine_.find_stream(stream, 0)), lock))
    ADD_FAILURE() << "the stream has work that never ends";
}

void FakeGpu::set_capturing(std::uintptr_t stream, bool capturing) {
  const Lock lock(machine_.mutex());
  machine_.find_stream(stream, 0)->capturing = capturing;
}

void FakeGpu::set_progress(Progress progress, std::uint64_t seed) {
  const Lock lock(machine_.mutex());
  machine_.set_progress(progress, seed);
}

void FakeGpu::ignore(Ordering ordering, int number) {
  const Lock lock(machine_.mutex());
  ignores_ = true;
  machine_.ignore(ordering, number);
}

void FakeGpu::ignore_own_record(int number) {
  const Lock lock(machine_.mutex());
  ignores_ = ignores_ || number >= 0;
  machine_.ignore_own_record(number);
}

int FakeGpu::orderings(Ordering ordering) {
  const Lock lock(machine_.mutex());
  return machine_.orderings(ordering);
}

void FakeGpu::fail_next(const std::string& function, cuda::Result result, int after) {
  const Lock lock(machine_.mutex());
  machine_.fail(function, result, after);
}

void FakeGpu::set_lateness(int queries) {
  const Lock lock(machine_.mutex());
  machine_.set_lateness(queries);
}

int FakeGpu::calls(const std::string& function) {
  const Lock lock(machine_.mutex());
  return machine_.calls(function);
}

std::size_t FakeGpu::pinned() {
  const Lock lock(machine_.mutex());
  return machine_.count(MemoryKind::kPinnedHost);
}

std::size_t FakeGpu::device_blocks() {
  const Lock lock(machine_.mutex());
  return machine_.count(MemoryKind::kDevice);
}

}  // namespace multiring::testing
