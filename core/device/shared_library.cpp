#include "device/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <utility>

namespace multiring {
namespace {

std::string loader_error() {
  const char* const error = ::dlerror();
  return error != nullptr ? error : "unknown error of the dynamic loader";
}

}  // namespace

std::vector<SharedLibrary::Candidate> SharedLibrary::candidates(std::span<const std::string> names,
                                                                const std::string& wheel,
                                                                std::span<const std::string> sites) {
  std::vector<Candidate> found;
  for (const std::string& name : names) found.push_back({"loaded by the process", name, true});
  if (!wheel.empty())
    for (const std::string& site : sites)
      for (const std::string& name : names) found.push_back({"of a wheel", site + "/" + wheel + "/" + name});
  for (const std::string& name : names) found.push_back({"of the system", name});
  return found;
}

std::optional<SharedLibrary> SharedLibrary::open(std::span<const Candidate> candidates, const Refusal& refuse,
                                                 std::string* why) {
  std::vector<const void*> refused;  // the loaded copy and the system's may be one
  std::string reasons;
  const auto add = [&reasons](const std::string& reason) {
    reasons += (reasons.empty() ? "" : "; ") + reason;
  };
  for (const Candidate& candidate : candidates) {
    void* const handle =
        ::dlopen(candidate.file.c_str(), RTLD_NOW | (candidate.has_to_be_there ? RTLD_NOLOAD : 0));
    if (handle == nullptr) {
      const std::string reason = loader_error();
      if (!candidate.has_to_be_there) add(reason);
      continue;
    }
    if (std::ranges::find(refused, handle) != refused.end()) continue;
    SharedLibrary library(handle, candidate.origin);
    const std::string refusal = refuse(library);
    if (refusal.empty()) return library;
    add(library.path() + ": " + refusal);
    refused.push_back(handle);
  }
  *why = reasons;
  return std::nullopt;
}

void* SharedLibrary::find(const char* name) const { return ::dlsym(handle_, name); }

std::string SharedLibrary::path() const {
  link_map* map = nullptr;
  if (::dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return "unknown file";
  return map->l_name;
}

}  // namespace multiring
