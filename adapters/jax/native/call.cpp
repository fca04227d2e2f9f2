#include "call.h"

#include <algorithm>
#include <exception>

namespace multiring::xla {
namespace {

struct KnownDtype {
  DataType dtype;
  std::size_t bytes;  // of an element
  int core;           // mr_dtype; -1: cannot travel
};

const KnownDtype& known_dtype(DataType dtype) {
  static constexpr KnownDtype kKnown[] = {{DataType::kBool, 1, MR_BOOL},
                                          {DataType::kInt8, 1, MR_INT8},
                                          {DataType::kUInt8, 1, MR_UINT8},
                                          {DataType::kInt16, 2, MR_INT16},
                                          {DataType::kUInt16, 2, MR_UINT16},
                                          {DataType::kInt32, 4, MR_INT32},
                                          {DataType::kUInt32, 4, MR_UINT32},
                                          {DataType::kInt64, 8, MR_INT64},
                                          {DataType::kUInt64, 8, MR_UINT64},
                                          {DataType::kFloat16, 2, MR_FLOAT16},
                                          {DataType::kBFloat16, 2, MR_BFLOAT16},
                                          {DataType::kFloat32, 4, MR_FLOAT32},
                                          {DataType::kFloat64, 8, MR_FLOAT64},
                                          {DataType::kComplex64, 8, MR_COMPLEX64},
                                          {DataType::kComplex128, 16, MR_COMPLEX128}};
  static constexpr KnownDtype kUnknown{DataType::kToken, 0, -1};
  const auto* found = std::ranges::find(kKnown, dtype, &KnownDtype::dtype);
  return found != std::end(kKnown) ? *found : kUnknown;
}

constexpr int kMajor = 0, kMinor = 3;  // of the ABI that xla_ffi.h describes

std::vector<const Buffer*> buffers(const Values& values) {
  std::vector<const Buffer*> found;
  for (std::int64_t i = 0; i < values.size; ++i) {
    const auto* buffer = static_cast<const Buffer*>(values.values[i]);
    if (buffer->dtype != DataType::kToken) found.push_back(buffer);
  }
  return found;
}

/// XLA asks each handler at registration which version of the ABI it speaks, and refuses other major
/// versions. A newer minor version than the caller's is refused too, so an older caller is answered in its
/// own: nothing that xla_ffi.h describes has changed since 0.0.
bool answer_metadata(const CallFrame& frame) {
  for (auto* extension = frame.extension_start; extension != nullptr; extension = extension->next) {
    if (extension->type != Extension::kMetadata) continue;
    auto& metadata = *reinterpret_cast<MetadataExtension*>(extension)->metadata;
    metadata.version.struct_size = sizeof(ApiVersion);
    metadata.version.extension_start = nullptr;
    metadata.version.major_version = kMajor;
    metadata.version.minor_version = kMinor;
    if (frame.api != nullptr && frame.api->version.major_version == kMajor)
      metadata.version.minor_version = std::min(kMinor, frame.api->version.minor_version);
    metadata.traits = 0;  // so no call becomes part of a CUDA graph
    return true;
  }
  return false;
}

Error* make_error(const CallFrame& frame, const mr_error& error) {
  char text[sizeof error.message + 64];
  mr_error_text(&error, text, sizeof text);
  ErrorCreateArgs args{sizeof(ErrorCreateArgs), nullptr, text, mr_status_code(error.status)};
  return frame.api->error_create(&args);
}

/// The stream of the program that makes the call; an error of XLA's own if it gives none.
Error* find_stream(const CallFrame& frame, void** stream) {
  StreamGetArgs args{sizeof(StreamGetArgs), nullptr, frame.context, nullptr};
  Error* const error = frame.api->stream_get(&args);
  *stream = args.stream;
  return error;
}

}  // namespace

Failure::Failure(mr_status status, const std::string& message) {
  error.status = status;
  mr_error_set_message(&error, message.c_str());
}

Call::Call(const CallFrame& frame, bool on_device, void* stream)
    : frame_(frame),
      on_device_(on_device),
      stream_(stream),
      arguments_(buffers(frame.arguments)),
      results_(buffers(frame.results)) {}

template <class T>
const T* Call::find(std::string_view name, AttributeType type) const {
  const Attributes& attributes = frame_.attributes;
  for (std::int64_t i = 0; i < attributes.size; ++i)
    if (std::string_view(attributes.names[i]->data, attributes.names[i]->size) == name) {
      if (attributes.types[i] != type)
        throw Failure(MR_INTERNAL, "attribute '" + std::string(name) + "' has another type than expected");
      return static_cast<const T*>(attributes.values[i]);
    }
  return nullptr;
}

std::int64_t Call::integer(std::string_view name) const {
  const auto* scalar = find<Scalar>(name, AttributeType::kScalar);
  if (scalar == nullptr || scalar->dtype != DataType::kInt64)
    throw Failure(MR_INTERNAL, "there is no 64-bit integer '" + std::string(name) + "'");
  return *static_cast<const std::int64_t*>(scalar->value);
}

double Call::real(std::string_view name) const {
  const auto* scalar = find<Scalar>(name, AttributeType::kScalar);
  if (scalar == nullptr || scalar->dtype != DataType::kFloat64)
    throw Failure(MR_INTERNAL, "there is no 64-bit number '" + std::string(name) + "'");
  return *static_cast<const double*>(scalar->value);
}

std::string Call::text(std::string_view name) const {
  const auto* span = find<ByteSpan>(name, AttributeType::kString);
  if (span == nullptr) throw Failure(MR_INTERNAL, "there is no text '" + std::string(name) + "'");
  return {span->data, span->size};
}

std::vector<std::uint64_t> Call::integers(std::string_view name) const {
  const auto* array = find<Array>(name, AttributeType::kArray);
  if (array == nullptr) return {};
  if (array->dtype != DataType::kInt64)
    throw Failure(MR_INTERNAL, "attribute '" + std::string(name) + "' holds no 64-bit integers");
  const auto* begin = static_cast<const std::int64_t*>(array->data);
  return {begin, begin + array->size};
}

Error* handle(const CallFrame* frame, void (*body)(const Call&), bool on_device) {
  if (answer_metadata(*frame) || frame->stage != Stage::kExecute) return nullptr;
  try {
    if (frame->struct_size < sizeof(CallFrame) || frame->api->struct_size < sizeof(Api) ||
        frame->api->version.major_version != kMajor)
      throw Failure(MR_USAGE, "XLA speaks another version of its foreign-function interface than " +
                                  std::to_string(kMajor) + "." + std::to_string(kMinor) +
                                  "; update multiring or use an older JAX");
    void* stream = nullptr;
    if (on_device)
      if (Error* const error = find_stream(*frame, &stream)) return error;
    body(Call(*frame, on_device, stream));
    return nullptr;
  } catch (const Failure& failure) {
    return make_error(*frame, failure.error);
  } catch (const std::exception& failure) {
    return make_error(*frame, Failure(MR_INTERNAL, failure.what()).error);
  }
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> found(1);
  for (const char letter : text) {
    if (letter == '\n')
      found.emplace_back();
    else
      found.back() += letter;
  }
  return found;
}

std::size_t element_count(const Buffer& buffer) {
  std::size_t count = 1;
  for (std::int64_t axis = 0; axis < buffer.rank; ++axis)
    count *= static_cast<std::size_t>(buffer.dims[axis]);
  return count;
}

std::size_t byte_count(const Buffer& buffer) {
  return element_count(buffer) * known_dtype(buffer.dtype).bytes;
}

mr_dtype core_dtype(DataType dtype) {
  const int core = known_dtype(dtype).core;
  if (core < 0) throw Failure(MR_USAGE, "arrays of this dtype cannot travel");
  return static_cast<mr_dtype>(core);
}

}  // namespace multiring::xla
