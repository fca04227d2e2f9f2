#include "device/nvrtc.h"

#include <algorithm>
#include <mutex>

namespace multiring::nvrtc {
namespace {

std::string fill(const SharedLibrary& library, Library* table) {
  FunctionFinder find(library);
  find("nvrtcVersion", &table->get_version);
  find("nvrtcGetErrorString", &table->error_string);
  find("nvrtcCreateProgram", &table->create);
  find("nvrtcDestroyProgram", &table->destroy);
  find("nvrtcCompileProgram", &table->compile_program);
  find("nvrtcGetProgramLogSize", &table->log_size);
  find("nvrtcGetProgramLog", &table->log);
  find("nvrtcGetCUBINSize", &table->cubin_size);
  find("nvrtcGetCUBIN", &table->cubin);
  return find.missing();
}

/// A program, which is destroyed in any case.
class Compilation {
 public:
  Compilation(const Library& library, const char* source) : library_(library) {
    check(library_.create(&program_, source, "multiring/reduce.cu", 0, nullptr, nullptr),
          "nvrtcCreateProgram");
  }
  ~Compilation() {
    if (program_ != nullptr) library_.destroy(&program_);
  }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  std::vector<char> run(std::span<const std::string> options) const {
    std::vector<const char*> texts;
    for (const std::string& option : options) texts.push_back(option.c_str());
    check(library_.compile_program(program_, static_cast<int>(texts.size()), texts.data()),
          "nvrtcCompileProgram");
    std::size_t bytes = 0;
    check(library_.cubin_size(program_, &bytes), "nvrtcGetCUBINSize");
    std::vector<char> image(bytes);
    check(library_.cubin(program_, image.data()), "nvrtcGetCUBIN");
    return image;
  }

 private:
  void check(Result result, const char* function) const {
    if (result == kSuccess) return;
    const char* const text = library_.error_string(result);
    throw DeviceError(ErrorKind::kInternal,
                      std::string(function) + " failed: " + (text != nullptr ? text : "unknown error") +
                          " (" + std::to_string(result) + "), NVRTC " + library_.version() + log());
  }
  std::string log() const {
    std::size_t bytes = 0;
    if (program_ == nullptr || library_.log_size(program_, &bytes) != kSuccess || bytes < 2) return "";
    std::string text(bytes, '\0');
    if (library_.log(program_, text.data()) != kSuccess) return "";
    return ": " + std::string(text.c_str());
  }

  const Library& library_;
  Program program_ = nullptr;
};

}  // namespace

std::vector<SharedLibrary::Candidate> Library::candidates(int newest, std::span<const std::string> sites) {
  struct Place {
    int cuda;
    const char* file;
    const char* wheel;
  };
  constexpr Place kPlaces[] = {{13, "libnvrtc.so.13", "nvidia/cu13/lib"},
                               {12, "libnvrtc.so.12", "nvidia/cuda_nvrtc/lib"}};
  std::vector<SharedLibrary::Candidate> found;
  for (const Place& place : kPlaces) {
    if (place.cuda > newest) continue;
    const std::string names[] = {place.file};
    std::ranges::move(SharedLibrary::candidates(names, place.wheel, sites), std::back_inserter(found));
  }
  return found;
}

std::string Library::load(const SharedLibrary& library) {
  *this = {};
  const std::string missing = fill(library, this);
  if (!missing.empty()) return "has no function " + missing + ": a newer one is needed";
  if (get_version(&major, &minor) != kSuccess) return "does not tell its version";
  library.keep();
  return {};
}

const Library* Library::find(int newest, std::string* why) {
  static Library library;
  static std::string reason;
  static bool usable = false;
  static std::once_flag once;
  std::call_once(once, [newest] {
    const auto refuse = [](const SharedLibrary& found) { return library.load(found); };
    usable =
        SharedLibrary::open(candidates(newest, SharedLibrary::known_sites()), refuse, &reason).has_value();
  });
  if (usable) return &library;
  *why = reason;
  return nullptr;
}

std::vector<char> Library::compile(const char* source, std::span<const std::string> options) const {
  return Compilation(*this, source).run(options);
}

}  // namespace multiring::nvrtc
