#include "transport/shm/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <string>

#include "base/error.h"
#include "base/immovable.h"

namespace multiring {
namespace {

class MappedBlock final : public SharedBlock, Immovable {
 public:
  MappedBlock(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  ~MappedBlock() override { ::munmap(data_, bytes_); }
  std::byte* data() const override { return data_; }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

}  // namespace

UniqueFd create_memory_file(std::size_t bytes) {
  UniqueFd file(::memfd_create("multiring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_errno("memfd_create");
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
    throw_errno("ftruncate of " + std::to_string(bytes) + " bytes of shared memory");
  // Sealed: if a process shrank it, its peers would get SIGBUS.
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw_errno("F_ADD_SEALS");
  return file;
}

std::shared_ptr<SharedBlock> map_memory_file(const UniqueFd& file, std::size_t bytes) {
  struct stat info{};
  if (::fstat(file.get(), &info) != 0) throw_errno("fstat");
  if (static_cast<std::size_t>(info.st_size) != bytes)
    throw Error(ErrorKind::kInternal, "shared memory has " + std::to_string(info.st_size) +
                                          " bytes where this rank expects " + std::to_string(bytes) +
                                          ": the ranks run different versions or settings");
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) throw_errno("mmap of " + std::to_string(bytes) + " bytes of shared memory");
  // Huge pages, where the system gives them for shared memory on request. A refusal is no error.
  ::madvise(data, bytes, MADV_HUGEPAGE);
  return std::make_shared<MappedBlock>(static_cast<std::byte*>(data), bytes);
}

}  // namespace multiring
