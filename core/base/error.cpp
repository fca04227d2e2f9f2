#include "base/error.h"

#include <cerrno>
#include <system_error>

#include "base/names.h"

namespace multiring {

const char* error_kind_name(ErrorKind kind) {
  static constexpr const char* kNames[] = {"no error",  "usage error", "mismatch",      "timeout",
                                           "peer lost", "aborted",     "internal error"};
  return name_in(kNames, kind, "unknown error");
}

const char* error_class_name(ErrorKind kind) {
  static constexpr const char* kNames[] = {"InternalError", "UsageError",   "MismatchError", "TimeoutError",
                                           "PeerLostError", "AbortedError", "InternalError"};
  return name_in(kNames, kind, "InternalError");
}

void throw_usage(const std::string& message) { throw Error(ErrorKind::kUsage, message); }

void throw_errno(const std::string& call) {
  const int code = errno;
  throw Error(ErrorKind::kInternal, call + " failed: " + std::generic_category().message(code) +
                                        ". `multiring doctor` checks what this machine lacks.");
}

}  // namespace multiring
