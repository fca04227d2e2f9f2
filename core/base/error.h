#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/export.h"

namespace multiring {

/// What went wrong. The values are part of the C ABI (multiring.h) and of the record that ranks share.
enum class ErrorKind : std::uint8_t {
  kUsage = 1,
  kMismatch = 2,
  kTimeout = 3,
  kPeerLost = 4,
  kAborted = 5,
  kInternal = 6,
};

/// "usage error", "mismatch", ...
MULTIRING_API const char* error_kind_name(ErrorKind kind);
/// Name of the Python exception: "UsageError", "MismatchError", ...
MULTIRING_API const char* error_class_name(ErrorKind kind);

/// What is known about the cause; mirrored as attributes of the Python exceptions.
struct ErrorContext {
  int rank = -1;
  int peer = -1;
  std::string host;
  std::string operation;
  std::string tensor;
  std::int64_t bytes = -1;
  double elapsed = -1.0;  ///< seconds since the operation started
  // The same on all ranks. Of a mismatch: the first of those who asked for what most did, and the first who
  // did not. Of a rank that is lost or missing: `odd` is that rank. Negative: not known. No attributes;
  // `peer` is one of them.
  int common = -1;
  int odd = -1;
};

/// Root of all errors of multiring; `kind` distinguishes the branches of the tree, so that an error can be
/// stored, sent to a peer and raised again without knowing its class.
class MULTIRING_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, ErrorContext context = {})
      : std::runtime_error(message), kind_(kind), context_(std::move(context)) {}

  ErrorKind kind() const { return kind_; }
  const ErrorContext& context() const { return context_; }

 private:
  ErrorKind kind_;
  ErrorContext context_;
};

/// Raises a usage error.
[[noreturn]] MULTIRING_API void throw_usage(const std::string& message);
/// Raises an internal error that names the failing system call and errno's text.
[[noreturn]] MULTIRING_API void throw_errno(const std::string& call);

}  // namespace multiring
