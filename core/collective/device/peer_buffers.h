#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/immovable.h"
#include "collective/agreement/round_exchange.h"
#include "device/devices.h"

namespace multiring {

/// The buffers of all ranks for one choice of devices, as this rank has them, and its stream. At its end no
/// kernel of any rank works on them, unless they are abandoned: then they stay as they are.
struct PeerBuffers : Immovable {
  class Reason;    // why a rank cannot do its part
  struct Offered;  // what a rank tells of its buffer

  PeerBuffers(std::shared_ptr<Devices> its, int number) : devices(std::move(its)), device(number) {}
  ~PeerBuffers() {
    if (is_abandoned) return;
    try {
      close();
      if (stream != nullptr) devices->release_stream(device, stream);
    } catch (const DeviceError&) {  // of a fork, or the driver has ended
    }
  }

  /// Makes them, by all ranks together. Empty: they are; else why not, alike on all ranks.
  std::string set_up(RoundExchange& exchange, const OperationCall& call, std::size_t wanted);
  /// Has the kernel for a dtype, likewise.
  std::string compile(RoundExchange& exchange, const OperationCall& call, DType dtype);
  void close();

  std::shared_ptr<Devices> devices;
  int device;
  cuda::Stream stream = nullptr;
  std::size_t bytes = 0;  // of each
  std::byte* own = nullptr;
  std::vector<std::byte*> addresses;      // by rank
  std::vector<cuda::Pointer> imported;    // those of other processes
  std::map<int, cuda::Function> kernels;  // by dtype; null: a rank cannot have it
  bool is_largest = false;                // larger ones have been refused
  bool is_abandoned = false;

 private:
  Offered make(std::size_t wanted);
  Reason open(const std::vector<Offered>& all, int rank);
};

}  // namespace multiring
