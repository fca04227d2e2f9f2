#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "device/buffer.h"
#include "device/driver.h"

namespace multiring {

/// The devices of a process: for each that has arrays its context, two streams for copies, and events; and
/// pinned host memory, which all share. Thread-safe.
///
/// What is pinned stays pinned, up to `kMaxIdleBytes` that no operation uses: to pin memory takes the driver
/// longer than to copy it. Nothing is given back at the end: the driver ends with the process, perhaps
/// before.
class MULTIRING_API Devices : public std::enable_shared_from_this<Devices>, Immovable {
 public:
  static constexpr std::size_t kMaxIdleBytes = std::size_t{1} << 30;

  explicit Devices(const cuda::Driver& driver) : driver_(driver) {}

  /// Those of this process, for arrays that others have made; null, with the reason in `why`, if there is no
  /// driver that can be used. Made at the first call, and never freed: arrays may be freed when the driver
  /// has ended.
  static std::shared_ptr<Devices> of_process(std::string* why);
  /// The same; a usage error if there is no driver.
  static std::shared_ptr<Devices> require();

  const cuda::Driver& driver() const { return driver_; }
  /// Kind and device of memory of which only the address is known; the rest of `buffer` stays.
  void locate(Buffer& buffer) const;
  /// A usage error if the stream is being captured into a graph, or is of another device. Its device's
  /// context has to be current.
  void refuse_capture(int device, cuda::Stream stream) const;
  /// A usage error if this is how a call with a stream of another device fails. HIP's first one that does is
  /// the record of an event.
  static void refuse_stream_elsewhere(int device, cuda::Result result);
  /// Gives the stream of `to` a copy of as many bytes on its device.
  void copy(const Buffer& to, const std::byte* from);

  /// Host memory that devices copy to and from; goes back when the last reference is gone.
  std::shared_ptr<std::byte> pinned(int device, std::size_t bytes);
  /// Keeps memory, and the event, until the event of `device` is complete: a copy may still be under way.
  void keep_until(int device, cuda::Event event, std::vector<std::shared_ptr<std::byte>> memory);
  /// Memory of a device; freed, once the device is idle, when the last reference is gone.
  std::shared_ptr<std::byte> device_memory(int device, std::size_t bytes);

  /// The same for other processes to have as well (cuIpcGetMemHandle). It is never freed, for that would have
  /// to wait until they do without: it goes back when it is released, and serves again for as many bytes.
  std::byte* take_shared(int device, std::size_t bytes);
  void release_shared(int device, std::size_t bytes, std::byte* memory);

  /// A function of a module by its number and its name, of which `make` gives the machine code when it is
  /// first asked for on a device.
  cuda::Function function(int device, int number, const char* name,
                          const std::function<std::vector<char>()>& make);

  /// Makes a device's context the calling thread's while it lives, in which a capture of the program's does
  /// not forbid calls.
  class Current : Immovable {
   public:
    Current(Devices& devices, int device);
    ~Current();

   private:
    friend class Devices;
    Current(const cuda::Driver& driver, cuda::Context context, int device);

    const cuda::Driver& driver_;
    int before_ = 0;  // the device that was current, of HIP
    int capture_mode_ = cuda::kCaptureRelaxed;
  };

  /// Copies to the host and to the device have a stream each, so that they do not wait for one another.
  cuda::Stream down(int device) { return get(device).down; }
  cuda::Stream up(int device) { return get(device).up; }

  /// A stream for one user at a time, which goes back, with all its work done, when it is released. Its
  /// device's context has to be current.
  cuda::Stream take_stream(int device);
  void release_stream(int device, cuda::Stream stream);

  /// Whether the stream does all that it was given within so many seconds, or its device has failed.
  bool reaches_end(int device, cuda::Stream stream, double seconds);

  /// An event, which goes back when it is released. Its device's context has to be current.
  cuda::Event take_event(int device);
  void release_event(int device, cuda::Event event);

 private:
  struct Device {
    cuda::Context context = nullptr;
    cuda::Stream down = nullptr;
    cuda::Stream up = nullptr;
    std::vector<cuda::Event> events;                // not in use
    std::vector<cuda::Stream> streams;              // likewise
    std::multimap<std::size_t, std::byte*> shared;  // likewise: memory that other processes may have
    std::map<int, cuda::Function> functions;
  };

  struct Kept {
    int device;
    cuda::Event event;
    std::vector<std::shared_ptr<std::byte>> memory;
  };

  Device& get(int device);
  Device open(int device) const;
  std::shared_ptr<std::byte> share(int device, std::byte* memory, std::size_t bytes);
  void take_back(int device, std::byte* memory, std::size_t bytes);
  void release_kept();
  std::byte* allocate_pinned(int device, std::size_t bytes);
  void free_pinned(int device, std::span<std::byte* const> blocks);
  std::vector<std::byte*> take_largest_idle(std::size_t until);
  /// A child of a fork has no driver.
  bool is_forked() const { return ::getpid() != process_; }

  const cuda::Driver& driver_;
  const pid_t process_ = ::getpid();
  std::mutex mutex_;  // guards all below; no other lock is taken while it is held
  std::map<int, Device> devices_;
  std::multimap<std::size_t, std::byte*> idle_;  // pinned memory by its size
  std::size_t idle_bytes_ = 0;
  std::vector<Kept> kept_;
};

}  // namespace multiring
