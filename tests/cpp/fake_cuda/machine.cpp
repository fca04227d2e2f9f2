#include "fake_cuda/machine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>
#include <utility>

namespace multiring::testing {
namespace {

constexpr std::size_t kAllBytes = FakeMachine::kDevices * FakeMachine::kDeviceBytes;
constexpr std::size_t kWorthFreeing = std::size_t{1} << 20;
constexpr std::size_t kMaxFilled = std::size_t{64} << 20;
constexpr int kMaxSteps = 3;  // at one call

FakeMachine* latest = nullptr;

[[noreturn]] void end(const std::string& why) {
  std::fprintf(stderr, "fake CUDA driver: %s\n", why.c_str());
  std::abort();
}

std::size_t pages(std::size_t bytes) {
  return (std::max<std::size_t>(bytes, 1) + FakeMachine::kPage - 1) / FakeMachine::kPage * FakeMachine::kPage;
}

std::byte* map(std::size_t bytes, int access, int file, std::uint64_t offset) {
  void* const mapped =
      ::mmap(nullptr, bytes, access, MAP_SHARED | MAP_NORESERVE, file, static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) end("no address range");
  return static_cast<std::byte*>(mapped);
}

}  // namespace

FakeMachine::FakeMachine() : previous_(latest) {
  file_ = ::memfd_create("fake_cuda", MFD_CLOEXEC);
  if (file_ < 0 || ::ftruncate(file_, static_cast<off_t>(kAllBytes)) != 0) end("no memory");
  addresses_ = map(kAllBytes, PROT_NONE, file_, 0);
  memory_ = map(kAllBytes, PROT_READ | PROT_WRITE, file_, 0);
  latest = this;
}

FakeMachine::~FakeMachine() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  for (const auto& stream : streams_)
    if (stream->thread.joinable()) stream->thread.join();
  for (const auto& [address, block] : blocks_)
    if (block.kind != MemoryKind::kDevice) std::free(address);
  ::munmap(addresses_, kAllBytes);
  ::munmap(memory_, kAllBytes);
  ::close(file_);
  latest = previous_;
}

FakeMachine& FakeMachine::current() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (latest != nullptr) return;
    const char* const options = std::getenv("FAKE_CUDA");
    auto* const made = new FakeMachine;
    made->configure(options != nullptr ? options : "");
  });
  if (latest == nullptr) end("there is no machine any more");
  return *latest;
}

void FakeMachine::configure(const std::string& options) {
  std::istringstream words(options);
  Progress progress = progress_;
  std::uint64_t seed = 0;
  for (std::string word; words >> word;) {
    std::ranges::replace(word, '=', ' ');
    std::ranges::replace(word, ':', ' ');
    std::istringstream parts(word);
    std::string option, name;
    int first = 0, second = 0;
    parts >> option;
    if (option == "progress" || option == "ignore" || option == "fail") parts >> name;
    parts >> first >> second;
    if (option == "progress" && name == "late")
      progress = Progress::kLate;
    else if (option == "progress" && name == "seeded")
      progress = Progress::kSeeded;
    else if (option == "progress" && name == "threads")
      progress = Progress::kThreads;
    else if (option == "seed")
      seed = static_cast<std::uint64_t>(first);
    else if (option == "ignore" && name == "wait")
      ignore(Ordering::kWait, first);
    else if (option == "ignore" && name == "record")
      ignore(Ordering::kRecord, first);
    else if (option == "lateness")
      set_lateness(first);
    else if (option == "fail")
      fail(name, first, second);
    else if (option == "no_access")
      no_access_.emplace(first, second);
    else if (option == "recover")
      recover();
    else
      end("unknown option " + word);
  }
  set_progress(progress, seed);
}

void FakeMachine::set_progress(Progress progress, std::uint64_t seed) {
  progress_ = progress;
  random_.seed(seed);
  for (const auto& stream : streams_) {
    draw_speed(*stream);
    start_thread(*stream);
  }
  changed_.notify_all();
}

void FakeMachine::ignore(Ordering ordering, int number) {
  const auto which = static_cast<std::size_t>(ordering);
  ignored_[which] = number < 0 ? -1 : counted_[which] + number;
}

void FakeMachine::ignore_own_record(int number) {
  late_thread_ = std::this_thread::get_id();
  own_records_ = number;
}

bool FakeMachine::is_ignored(Ordering ordering) {
  const auto which = static_cast<std::size_t>(ordering);
  return counted_[which]++ == ignored_[which];
}

std::byte* FakeMachine::find_room(int device, std::size_t bytes) const {
  std::byte* const begin = addresses_ + static_cast<std::size_t>(device) * kDeviceBytes;
  std::byte* room = begin;
  for (auto each = blocks_.lower_bound(begin); each != blocks_.end(); ++each) {
    if (each->first >= begin + kDeviceBytes || each->first >= room + bytes + kPage) break;
    room = each->first + pages(each->second.bytes) + kPage;  // what runs over an end meets no other block
  }
  return room + bytes <= begin + kDeviceBytes ? room : nullptr;
}

std::byte* FakeMachine::allocate(int device, std::size_t bytes) {
  std::byte* room = find_room(device, pages(bytes));
  if (room == nullptr) {
    run_all();  // memory may be freed when streams get there
    room = find_room(device, pages(bytes));
  }
  if (room == nullptr) return nullptr;
  blocks_[room] = {bytes, MemoryKind::kDevice, device, memory_ + (room - addresses_)};
  return room;
}

std::byte* FakeMachine::allocate_on_host(int device, std::size_t bytes, MemoryKind kind) {
  auto* const made = static_cast<std::byte*>(std::aligned_alloc(kPage, pages(bytes)));
  if (made == nullptr) return nullptr;
  std::memset(made, 0xab, std::min(bytes, kMaxFilled));
  blocks_[made] = {bytes, kind, device, made};
  return made;
}

bool FakeMachine::release(std::byte* memory) {
  const auto found = blocks_.find(memory);
  if (found == blocks_.end()) return false;
  const Block block = found->second;
  blocks_.erase(found);
  const bool is_own = memory >= addresses_ && memory < addresses_ + kAllBytes;
  if (block.kind != MemoryKind::kDevice) {
    std::free(memory);
  } else if (!is_own) {
    ::munmap(memory, pages(block.bytes));
    ::munmap(block.view, pages(block.bytes));
  } else if (block.bytes >= kWorthFreeing) {
    ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory - addresses_,
                static_cast<off_t>(pages(block.bytes)));
  }
  return true;
}

const FakeMachine::Block* FakeMachine::block_of(const void* memory) const {
  auto* const address = const_cast<std::byte*>(static_cast<const std::byte*>(memory));
  const auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  const auto& [begin, block] = *std::prev(after);
  return address < begin + std::max<std::size_t>(block.bytes, 1) ? &block : nullptr;
}

std::size_t FakeMachine::count(MemoryKind kind) const {
  return static_cast<std::size_t>(
      std::ranges::count_if(blocks_, [kind](const auto& each) { return each.second.kind == kind; }));
}

std::byte* FakeMachine::view(const void* memory) {
  auto* const address = const_cast<std::byte*>(static_cast<const std::byte*>(memory));
  if (address >= addresses_ && address < addresses_ + kAllBytes) return memory_ + (address - addresses_);
  const std::lock_guard lock(mutex_);
  const auto after = blocks_.upper_bound(address);
  if (block_of(memory) == nullptr) return address;
  return std::prev(after)->second.view + (address - std::prev(after)->first);
}

bool FakeMachine::export_block(std::byte* memory, IpcHandle* handle) const {
  const auto found = blocks_.find(memory);
  if (found == blocks_.end() || found->second.kind != MemoryKind::kDevice) return false;
  if (memory < addresses_ || memory >= addresses_ + kAllBytes) return false;  // another process's
  *handle = {::getpid(),           file_,
             found->second.device, static_cast<std::uint64_t>(memory - addresses_),
             found->second.bytes,  {}};
  return true;
}

std::byte* FakeMachine::import_block(const IpcHandle& handle) {
  if (handle.process == ::getpid()) return nullptr;  // as the driver: by its address
  const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  std::byte* const address = map(pages(handle.bytes), PROT_NONE, file, handle.offset);
  std::byte* const view = map(pages(handle.bytes), PROT_READ | PROT_WRITE, file, handle.offset);
  ::close(file);
  blocks_[address] = {handle.bytes, MemoryKind::kDevice, handle.device, view};
  return address;
}

cuda::Result FakeMachine::enter(const char* function, int device) {
  ++calls_[function];
  if (progress_ == Progress::kSeeded) run_random(std::uniform_int_distribution(0, kMaxSteps)(random_));
  if (const auto failed = failed_devices_.find(device); failed != failed_devices_.end())
    return failed->second;
  const auto found = failures_.find(function);
  if (found == failures_.end() || found->second.after-- > 0) return cuda::kSuccess;
  const cuda::Result result = found->second.result;
  failures_.erase(found);
  if (result < 0) ::kill(::getpid(), -result);
  return result;
}

}  // namespace multiring::testing
