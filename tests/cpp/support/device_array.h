#pragma once

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "support/fake_gpu.h"
#include "support/operations.h"

namespace multiring::testing {

/// Floats on a device, with a stream of their own, and what an operation has to know of them.
class DeviceArray {
 public:
  DeviceArray(FakeGpu& gpu, int device, std::vector<float> values)
      : gpu_(gpu), count_(values.size()), stream_(gpu.make_stream(device)) {
    buffer_ = {gpu.allocate(device, bytes()), bytes(), MemoryKind::kDevice, device, stream_};
    set(std::move(values));
  }
  /// By a kernel that has not run yet.
  void set(std::vector<float> values) {
    std::byte* const memory = gpu_.view(buffer_.address);
    gpu_.launch(stream_, [memory, values = std::move(values)] {
      std::memcpy(memory, values.data(), values.size() * sizeof(float));
    });
  }
  std::vector<float> values() const {
    const auto* const begin = reinterpret_cast<const float*>(gpu_.view(buffer_.address));
    return {begin, begin + count_};
  }
  /// What a kernel sees that the stream is given now; returns when it has run.
  std::vector<float> seen() const {
    std::vector<float> seen;
    gpu_.launch(stream_, [&] { seen = values(); });
    gpu_.synchronize(stream_);
    return seen;
  }
  const Buffer& buffer() const { return buffer_; }
  std::size_t bytes() const { return count_ * sizeof(float); }

 private:
  FakeGpu& gpu_;
  const std::size_t count_;
  const std::uintptr_t stream_;
  Buffer buffer_;
};

/// Of any dtype, written by a kernel that has not run yet.
class DeviceBytes {
 public:
  DeviceBytes(FakeGpu& gpu, const Bytes& values) : DeviceBytes(gpu, values, gpu.make_stream(0)) {}
  DeviceBytes(FakeGpu& gpu, const Bytes& values, std::uintptr_t stream) : gpu_(gpu), stream_(stream) {
    buffer_ = {gpu.allocate(0, values.size()), values.size(), MemoryKind::kDevice, 0, stream_};
    gpu.launch(stream_, [memory = gpu.view(buffer_.address), values] {
      std::memcpy(memory, values.data(), values.size());
    });
  }
  Bytes seen() const {
    Bytes seen(buffer_.bytes);
    gpu_.launch(stream_, [&] { std::memcpy(seen.data(), gpu_.view(buffer_.address), seen.size()); });
    gpu_.synchronize(stream_);
    return seen;
  }
  const Buffer& buffer() const { return buffer_; }

 private:
  FakeGpu& gpu_;
  const std::uintptr_t stream_;
  Buffer buffer_;
};

/// `operation` on arrays of devices; null: that one is on the host, or there is none.
inline Operation on_devices(Operation operation, const std::shared_ptr<Devices>& devices,
                            const DeviceArray* input, const DeviceArray* output) {
  operation.on_devices = std::make_unique<DeviceArrays>();
  operation.on_devices->devices = devices;
  if (input != nullptr) {
    operation.on_devices->input = input->buffer();
    operation.input = input->buffer().address;
  }
  if (output != nullptr) {
    operation.on_devices->output = output->buffer();
    operation.output = output->buffer().address;
    operation.output_bytes = output->bytes();
  }
  return operation;
}

/// A sum of all, from one array to another one, or the same.
inline Operation allreduce_of(const DeviceArray& input, const DeviceArray& output,
                              const std::shared_ptr<Devices>& devices, std::string_view name = {}) {
  const std::size_t count = input.bytes() / sizeof(float);
  return on_devices(allreduce_of(DType::kFloat32, count, nullptr, nullptr, name), devices, &input, &output);
}

/// A sum in place of an array that lies in pieces, on devices or not.
inline Operation allreduce_of_pieces(const std::vector<Buffer>& pieces,
                                     const std::shared_ptr<Devices>& devices) {
  std::size_t bytes = 0;
  for (const Buffer& each : pieces) bytes += each.bytes;
  Operation operation = allreduce_of(DType::kFloat32, bytes / sizeof(float), nullptr, nullptr);
  operation.on_devices = std::make_unique<DeviceArrays>();
  operation.on_devices->devices = devices;
  for (const Buffer& each : pieces) {
    operation.pieces.push_back({each.address, each.address, each.bytes});
    operation.on_devices->pieces.push_back(each);
  }
  return operation;
}

}  // namespace multiring::testing
