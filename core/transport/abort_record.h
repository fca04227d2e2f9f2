#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/error.h"

namespace multiring {

/// The first error of a transport's ranks.
struct AbortRecord {
  // Longer ones are cut when they are sent.
  static constexpr std::size_t kOperationBytes = 31;
  static constexpr std::size_t kTensorBytes = 255;

  AbortRecord() = default;
  AbortRecord(ErrorKind what, int rank, std::string text, ErrorContext context = {})
      : kind(what), origin(rank), message(std::move(text)), about(std::move(context)) {}

  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;
  std::string message;
  ErrorContext about;  ///< common, odd, operation and tensor of the origin's error; nothing else is sent
};

}  // namespace multiring
