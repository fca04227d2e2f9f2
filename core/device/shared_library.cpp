#include "device/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <mutex>
#include <utility>

namespace multiring {
namespace {

std::mutex sites_mutex;
std::vector<std::string> sites_of_wheels;

std::string loader_error() {
  const char* const error = ::dlerror();
  return error != nullptr ? error : "unknown error of the dynamic loader";
}

bool is_loaded(const std::string& path) {
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle != nullptr) ::dlclose(handle);
  return handle != nullptr;
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

void SharedLibrary::look_in(std::vector<std::string> sites) {
  const std::lock_guard lock(sites_mutex);
  sites_of_wheels = std::move(sites);
}

std::vector<std::string> SharedLibrary::known_sites() {
  const std::lock_guard lock(sites_mutex);
  return sites_of_wheels;
}

std::optional<SharedLibrary> SharedLibrary::open(std::span<const Candidate> candidates, const Refusal& refuse,
                                                 std::string* why) {
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
    const SharedLibrary library(handle, candidate.origin);
    const std::string refusal = refuse(library);
    if (refusal.empty()) return library;
    const std::string path = library.path();
    add(path + ": " + refusal);
    // A library that stayed would answer for its name when others, or the program, ask for a better one.
    ::dlclose(handle);
    if (is_loaded(path)) {
      add("others are not looked for, as the process has this one");
      break;
    }
  }
  *why = reasons;
  return std::nullopt;
}

void SharedLibrary::keep() const { ::dlopen(path().c_str(), RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE); }

void* SharedLibrary::find(const char* name) const { return ::dlsym(handle_, name); }

std::string SharedLibrary::path() const {
  link_map* map = nullptr;
  if (::dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return "unknown file";
  return map->l_name;
}

}  // namespace multiring
