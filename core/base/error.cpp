#include "base/error.h"

#include <cerrno>
#include <system_error>

namespace multiring {

const char* error_kind_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
      return "usage error";
    case ErrorKind::kMismatch:
      return "mismatch";
    case ErrorKind::kTimeout:
      return "timeout";
    case ErrorKind::kPeerLost:
      return "peer lost";
    case ErrorKind::kAborted:
      return "aborted";
    case ErrorKind::kInternal:
      return "internal error";
  }
  return "unknown error";
}

void throw_errno(const std::string& call) {
  const int code = errno;
  throw Error(ErrorKind::kInternal, call + " failed: " + std::generic_category().message(code) +
                                        ". `multiring doctor` checks what this machine lacks.");
}

}  // namespace multiring
