#pragma once

#include <cstddef>
#include <cstdint>

// The part of XLA's C ABI for foreign functions (version 0.x) that the handlers use. XLA keeps this ABI
// stable: structs grow at their end only, within one major version. Everything that is read beyond
// `struct_size` and `extension_start` is checked against the size or the version that XLA gives.

namespace multiring::xla {

enum class Extension : int { kMetadata = 1 };

struct ExtensionBase {
  std::size_t struct_size;
  Extension type;
  ExtensionBase* next;
};

struct ApiVersion {
  std::size_t struct_size;
  ExtensionBase* extension_start;
  int major_version;
  int minor_version;
};

struct Error;

struct ErrorCreateArgs {
  std::size_t struct_size;
  ExtensionBase* extension_start;
  const char* message;
  int code;  // of absl
};

struct StreamGetArgs {
  std::size_t struct_size;
  ExtensionBase* extension_start;
  void* context;
  void* stream;  // out: a CUstream on CUDA's devices
};

struct Api {
  std::size_t struct_size;
  ExtensionBase* extension_start;
  ApiVersion version;
  const void* internal;
  Error* (*error_create)(ErrorCreateArgs*);
  const void* error_get_message;
  const void* error_destroy;
  const void* handler_register;
  Error* (*stream_get)(StreamGetArgs*);
};

enum class DataType : int {
  kBool = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kUInt8 = 6,
  kUInt16 = 7,
  kUInt32 = 8,
  kUInt64 = 9,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kComplex64 = 15,
  kBFloat16 = 16,
  kToken = 17,
  kComplex128 = 18,
};

struct Buffer {
  std::size_t struct_size;
  ExtensionBase* extension_start;
  DataType dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

struct Values {  // arguments and results
  std::size_t struct_size;
  ExtensionBase* extension_start;
  std::int64_t size;
  int* types;  // 1: a buffer
  void** values;
};

struct ByteSpan {
  const char* data;
  std::size_t size;
};

struct Scalar {
  DataType dtype;
  void* value;
};

struct Array {
  DataType dtype;
  std::size_t size;
  void* data;
};

enum class AttributeType : int { kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };

struct Attributes {
  std::size_t struct_size;
  ExtensionBase* extension_start;
  std::int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** values;
};

enum class Stage : int { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

struct CallFrame {
  std::size_t struct_size;
  ExtensionBase* extension_start;
  const Api* api;
  void* context;
  Stage stage;
  Values arguments;
  Values results;
  Attributes attributes;
};

struct Metadata {
  std::size_t struct_size;
  ApiVersion version;
  std::uint32_t traits;
};

struct MetadataExtension {
  ExtensionBase base;
  Metadata* metadata;
};

}  // namespace multiring::xla
