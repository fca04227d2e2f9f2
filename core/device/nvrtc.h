#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/export.h"
#include "device/driver.h"
#include "device/shared_library.h"

namespace multiring::nvrtc {

// The part of the C ABI of NVRTC, CUDA's run-time compiler, that is needed here, declared anew.
using Result = int;
using Program = struct _nvrtcProgram*;

inline constexpr Result kSuccess = 0;

/// The functions that are used, by the names of their entries in the library.
struct MULTIRING_API Library {
  Result (*get_version)(int* major, int* minor);
  const char* (*error_string)(Result result);
  Result (*create)(Program* program, const char* source, const char* name, int headers,
                   const char* const* texts, const char* const* names);
  Result (*destroy)(Program* program);
  Result (*compile_program)(Program program, int count, const char* const* options);
  Result (*log_size)(Program program, std::size_t* bytes);
  Result (*log)(Program program, char* text);
  Result (*cubin_size)(Program program, std::size_t* bytes);
  Result (*cubin)(Program program, char* image);
  int major;
  int minor;

  /// Where it is looked for: the newest first that makes what a driver of CUDA `newest` runs (of 12 or
  /// later).
  static std::vector<SharedLibrary::Candidate> candidates(int newest, std::span<const std::string> sites);
  /// That of this process, opened at the first call; null, with the reason in `why`, if there is none that
  /// can be used.
  static const Library* find(int newest, std::string* why);
  /// Fills the table. Why the library cannot be used; empty: it can.
  std::string load(const SharedLibrary& library);

  /// "12.9"
  std::string version() const { return std::to_string(major) + "." + std::to_string(minor); }
  /// The machine code of a source, for the device that the options name. Raises a DeviceError with what the
  /// compiler says.
  std::vector<char> compile(const char* source, std::span<const std::string> options) const;
};

inline constexpr int kNewestCuda = 13;  ///< whose NVRTC is looked for

}  // namespace multiring::nvrtc
