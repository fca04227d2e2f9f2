#include "collective/device/peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <random>
#include <set>
#include <utility>

#include "base/cache.h"
#include "base/text.h"
#include "collective/device/device_arrays.h"
#include "collective/device/device_offers.h"
#include "collective/exchange.h"
#include "collective/sums/integer_average.h"
#include "device/peer_kernels.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

/// Of smaller allocations the driver gives other processes all that lies beside them.
constexpr std::size_t kMinBuffer = std::size_t{2} << 20;
/// Larger arrays pass through it in segments.
constexpr std::size_t kMaxBuffer = std::size_t{64} << 20;
/// How long a device that has work of a failed operation is waited for.
constexpr double kEndSeconds = 5;

std::size_t buffer_bytes(std::size_t bytes) {
  return std::clamp(std::bit_ceil(bytes), kMinBuffer, kMaxBuffer);
}

/// Tells this process from all others, in whatever container they are.
std::uint64_t process_number() {
  static const std::uint64_t number = [] {
    std::random_device random;
    return std::uint64_t{random()} << 32U | random();
  }();
  return number;
}

/// Why a rank cannot do its part; empty: it can.
class Reason {
 public:
  void set(const std::string& text) {
    const std::size_t length = cut_length(text, text_.size() - 1);
    std::memcpy(text_.data(), text.data(), length);
    text_[length] = '\0';
  }
  std::string text() const { return {text_.data(), ::strnlen(text_.data(), text_.size())}; }

 private:
  std::array<char, 320> text_{};
};

/// What a rank tells of its buffer, through staging memory.
struct Offered {
  Reason why_not;
  cuda::IpcHandle handle;
  std::uint64_t process = 0;
  int process_id = 0;
  std::array<char, 16> device{};
  std::uintptr_t address = 0;  ///< for ranks that are threads of one process
};

/// Of the first rank that has one.
std::string refusal_of(const std::vector<Reason>& reasons, const Exchange& exchange) {
  for (std::size_t rank = 0; rank < reasons.size(); ++rank)
    if (const std::string text = reasons[rank].text(); !text.empty())
      return exchange.name_of(static_cast<int>(rank)) + ": " + text;
  return "";
}

}  // namespace

/// The buffers of all ranks for one choice of devices, as this rank has them, and its stream. At its end no
/// kernel of any rank works on them, unless they are abandoned: then they stay as they are.
struct PeerBuffers : Immovable {
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
  std::string set_up(Exchange& exchange, const OperationCall& call, std::size_t wanted);
  /// Has the kernel for a dtype, likewise.
  std::string compile(Exchange& exchange, const OperationCall& call, DType dtype);
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

/// This rank's part, by itself.
Offered PeerBuffers::make(std::size_t wanted) {
  Offered made;
  try {
    const cuda::Driver& driver = devices->driver();
    own = devices->take_shared(device, wanted);
    bytes = wanted;
    const Devices::Current current(*devices, device);
    stream = devices->take_stream(device);
    cuda::Device handle = 0;
    made.address = reinterpret_cast<std::uintptr_t>(own);
    driver.check(driver.ipc_export(&made.handle, made.address), cuda::on("cuIpcGetMemHandle", device));
    driver.check(driver.device_get(&handle, device), cuda::on("cuDeviceGet", device));
    driver.check(driver.device_uuid(made.device.data(), handle), cuda::on("cuDeviceGetUuid", device));
    made.process = process_number();
    made.process_id = ::getpid();
  } catch (const DeviceError& error) {
    made.why_not.set(error.what());
  }
  return made;
}

/// Has the buffers of the others.
Reason PeerBuffers::open(const std::vector<Offered>& all, int rank) {
  Reason why_not;
  const Offered& mine = all[static_cast<std::size_t>(rank)];
  try {
    const Devices::Current current(*devices, device);
    for (const Offered& each : all) {
      cuda::Pointer address = each.address;
      if (each.process != mine.process || each.process_id != mine.process_id) {
        devices->driver().check(devices->driver().ipc_import(&address, each.handle, cuda::kIpcEnableAccess),
                                cuda::on("cuIpcOpenMemHandle", device));
        imported.push_back(address);
      } else if (each.device != mine.device) {
        throw DeviceError(ErrorKind::kUsage, "ranks of one process have their arrays on different devices");
      }
      addresses.push_back(reinterpret_cast<std::byte*>(address));
    }
  } catch (const DeviceError& error) {
    why_not.set(error.what());
  }
  return why_not;
}

std::string PeerBuffers::set_up(Exchange& exchange, const OperationCall& call, std::size_t wanted) {
  const std::vector<Offered> all = exchanged(exchange, call, make(wanted));
  std::vector<Reason> reasons;
  for (const Offered& each : all) reasons.push_back(each.why_not);
  const std::string refusal = refusal_of(reasons, exchange);
  return refusal.empty() ? refusal_of(exchanged(exchange, call, open(all, exchange.rank())), exchange)
                         : refusal;
}

std::string PeerBuffers::compile(Exchange& exchange, const OperationCall& call, DType dtype) {
  Reason why_not;
  cuda::Function kernel = nullptr;
  try {
    kernel = peer::reduce_kernel(*devices, device, dtype);
  } catch (const DeviceError& error) {
    why_not.set(error.what());
  }
  std::string refusal = refusal_of(exchanged(exchange, call, why_not), exchange);
  kernels[static_cast<int>(dtype)] = refusal.empty() ? kernel : nullptr;
  return refusal;
}

void PeerBuffers::close() {
  addresses.clear();
  if (own != nullptr) devices->release_shared(device, bytes, std::exchange(own, nullptr));
  if (imported.empty()) return;
  const Devices::Current current(*devices, device);
  for (const cuda::Pointer each : std::exchange(imported, {})) devices->driver().ipc_close(each);
}

namespace {

/// One operation on this rank.
class PeerReduction {
 public:
  PeerReduction(Exchange& exchange, const OperationCall& call, const Operation& operation,
                PeerBuffers& buffers)
      : exchange_(exchange), call_(call), operation_(operation), buffers_(buffers) {}

  void run() {
    const std::size_t element = operation_.element_size();
    const std::size_t count = operation_.descriptor.key.count;
    const std::size_t step = buffers_.bytes / element;
    for (std::size_t begin = 0; begin < count; begin += step)
      run_segment({begin, std::min(begin + step, count)});
    await_stream(false);
  }

 private:
  /// A range of elements, which lies at the begin of each buffer.
  void run_segment(Range segment) {
    const std::size_t element = operation_.element_size();
    const Range slice = aligned_block_range(segment.size(), static_cast<std::size_t>(exchange_.size()),
                                            static_cast<std::size_t>(exchange_.rank()), kCacheLine / element);
    const std::byte* const input = operation_.input + segment.begin * element;
    std::byte* const output = operation_.output + segment.begin * element;
    std::byte* const buffer = buffers_.addresses[static_cast<std::size_t>(exchange_.rank())];
    // The rank's own slice is read and written where it is.
    const Range others[] = {{0, slice.begin}, {slice.end, segment.size()}};
    for (const Range part : others) copy(buffer, input, part);
    await_stream();
    exchange_.next(call_, [] {});       // all buffers hold what their ranks contribute
    exchange_.throw_if_aborted(call_);  // a peer that has failed meanwhile may be gone, with its buffer
    if (!slice.empty()) reduce(slice, input, output);
    await_stream();
    exchange_.next(call_, [] {});  // all slices of this rank's buffer are reduced
    for (const Range part : others) copy(output, buffer, part);
  }

  void copy(std::byte* to, const std::byte* from, Range part) {
    if (part.empty()) return;
    const std::size_t element = operation_.element_size();
    const Devices::Current current(*buffers_.devices, buffers_.device);
    const cuda::Driver& driver = buffers_.devices->driver();
    driver.check(driver.copy_on_device(reinterpret_cast<cuda::Pointer>(to + part.begin * element),
                                       reinterpret_cast<cuda::Pointer>(from + part.begin * element),
                                       part.size() * element, buffers_.stream),
                 cuda::on("cuMemcpyDtoDAsync", buffers_.device));
  }

  void reduce(Range slice, const std::byte* input, std::byte* output) {
    const Reduction reduction = operation_.reduction();
    const std::size_t offset = slice.begin * operation_.element_size();
    peer::ReduceJob job{};
    for (std::size_t rank = 0; rank < buffers_.addresses.size(); ++rank)
      job.inputs[rank] = job.outputs[rank] = buffers_.addresses[rank] + offset;
    job.inputs[exchange_.rank()] = input + offset;
    job.outputs[exchange_.rank()] = output + offset;
    job.count = slice.size();
    job.prescale = reduction.prescale;
    job.postscale = reduction.postscale;
    job.ranks = static_cast<unsigned>(exchange_.size());
    job.op = static_cast<unsigned>(reduction.op);
    job.divisor = reduction.op == ReduceOp::kAverage ? job.ranks : 1;
    const Devices::Current current(*buffers_.devices, buffers_.device);
    peer::launch(*buffers_.devices, buffers_.device,
                 buffers_.kernels.at(static_cast<int>(operation_.dtype())), job, buffers_.stream);
  }

  /// `needs_peers`: which have not done all of their part then.
  void await_stream(bool needs_peers = true) {
    Devices& devices = *buffers_.devices;
    const cuda::Driver& driver = devices.driver();
    cuda::Event done = nullptr;
    {
      const Devices::Current current(devices, buffers_.device);
      done = devices.take_event(buffers_.device);
      driver.check(driver.event_record(done, buffers_.stream), cuda::on("cuEventRecord", buffers_.device));
    }
    const auto is_done = [&] {
      const Devices::Current current(devices, buffers_.device);
      const cuda::Result result = driver.event_query(done);
      if (result != cuda::kNotReady)
        driver.check(result, cuda::on("the allreduce in peer memory", buffers_.device));
      return result != cuda::kNotReady;
    };
    poll(exchange_, call_, is_done, "the device to reduce in peer memory.", needs_peers);
    devices.release_event(buffers_.device, done);
  }

  Exchange& exchange_;
  const OperationCall& call_;
  const Operation& operation_;
  PeerBuffers& buffers_;
};

}  // namespace

PeerMemory::PeerMemory() = default;
PeerMemory::~PeerMemory() = default;

bool PeerMemory::serves(const Operation& operation, int ranks) const {
  // Kernels read and write elements where they lie.
  const auto is_aligned = [&](const Buffer& buffer) {
    return reinterpret_cast<std::uintptr_t>(buffer.address) % operation.element_size() == 0;
  };
  const DeviceArrays& arrays = *operation.on_devices;
  if (ranks > peer::kMaxRanks || !operation.pieces.empty() || averages_integers(operation.descriptor) ||
      !is_aligned(arrays.input) || !is_aligned(arrays.output))
    return false;
  const std::string why = peer::why_no_kernels(operation.on_devices->devices->driver());
  static std::once_flag told;  // of the process
  if (!why.empty()) std::call_once(told, [&] { tell(why); });
  return why.empty();
}

bool PeerMemory::prepare(Exchange& exchange, const OperationCall& call, const Operation& operation) {
  agreed_ = nullptr;
  const auto [found, is_new] = made_.try_emplace(offered_devices(exchange));
  std::unique_ptr<PeerBuffers>& buffers = found->second;
  if (!is_new && buffers == nullptr) return false;
  const std::size_t wanted = buffer_bytes(operation.descriptor.bytes);
  std::string refusal;
  if (is_new || (buffers->bytes < wanted && !buffers->is_largest)) {
    auto larger =
        std::make_unique<PeerBuffers>(operation.on_devices->devices, operation.descriptor.offered_device);
    refusal = larger->set_up(exchange, call, wanted);
    if (refusal.empty()) {
      if (!is_new) {
        larger->kernels = buffers->kernels;
        // To close them may take as long as all that their device has been given.
        outgrown_.push_back(std::move(buffers));
      }
      buffers = std::move(larger);
    } else if (!is_new) {
      buffers->is_largest = true;  // arrays pass through them in segments
      refusal.clear();
    }
  }
  const int dtype = static_cast<int>(operation.dtype());
  if (refusal.empty() && !buffers->kernels.contains(dtype))
    refusal = buffers->compile(exchange, call, operation.dtype());
  if (exchange.rank() == 0 && !refusal.empty()) tell(refusal);
  if (buffers != nullptr && buffers->kernels[dtype] != nullptr) agreed_ = buffers.get();
  return agreed_ != nullptr;
}

void PeerMemory::tell(const std::string& refusal) const {
  if (warn_) warn_("arrays on devices pass through the host, and not through peer memory: " + refusal);
}

void PeerMemory::run(Exchange& exchange, const OperationCall& call, const Operation& operation) {
  // Copies that have not been needed read the arrays as long as they run.
  await_part(operation, Staging::kAll, exchange, call);
  running_ = agreed_;
  PeerReduction(exchange, call, operation, *agreed_).run();
  running_ = nullptr;
}

void PeerMemory::end_failed() {
  if (running_ == nullptr) return;
  PeerBuffers& failed = *std::exchange(running_, nullptr);
  // Kernels of the others may still write to this rank's buffer, which must not serve again.
  failed.is_abandoned = true;
  try {
    failed.devices->reaches_end(failed.device, failed.stream, kEndSeconds);
  } catch (const DeviceError&) {  // what has failed before is told
  }
}

void PeerMemory::release() {
  made_.clear();
  outgrown_.clear();
}

}  // namespace multiring
