#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "multiring.h"
#include "xla_ffi.h"

namespace multiring::xla {

/// An error that becomes one of the framework's.
struct Failure : std::exception {
  explicit Failure(const mr_error& cause) : error(cause) {}
  Failure(mr_status status, const std::string& message);
  const char* what() const noexcept override { return error.message; }
  mr_error error = MR_ERROR_INIT;
};

/// Read access to a call frame.
class Call {
 public:
  /// `stream`: that of the device where all arrays lie; null, with `on_device` false: they lie on the host.
  Call(const CallFrame& frame, bool on_device, void* stream);

  /// Arguments and results that hold data: tokens, which only order calls, are left out.
  const std::vector<const Buffer*>& arguments() const { return arguments_; }
  const std::vector<const Buffer*>& results() const { return results_; }

  /// Whether the host must not touch the arrays, and the stream on which the program uses them.
  bool on_device() const { return on_device_; }
  void* stream() const { return stream_; }

  std::int64_t integer(std::string_view name) const;
  double real(std::string_view name) const;
  std::string text(std::string_view name) const;
  /// Integers; empty if there is no such attribute.
  std::vector<std::uint64_t> integers(std::string_view name) const;

 private:
  template <class T>
  const T* find(std::string_view name, AttributeType type) const;
  const CallFrame& frame_;
  const bool on_device_;
  void* const stream_;
  std::vector<const Buffer*> arguments_;
  std::vector<const Buffer*> results_;
};

/// Runs a handler's body: answers the question for metadata, keeps exceptions out of the C ABI. `on_device`:
/// it is the handler of a platform whose arrays lie on devices.
Error* handle(const CallFrame* frame, void (*body)(const Call&), bool on_device = false);

/// The lines of a text, at least one.
std::vector<std::string> lines(const std::string& text);
std::size_t element_count(const Buffer& buffer);
std::size_t byte_count(const Buffer& buffer);
mr_dtype core_dtype(DataType dtype);

}  // namespace multiring::xla
