#pragma once

#include <cstdint>

// The part of DLPack 0.8, and of 1.2 what is not in it (github.com/dmlc/dlpack, Apache-2.0), that is needed
// here: a stable C ABI.
namespace multiring::binding::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t dims;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: C order
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::uint64_t kReadOnly = 1;  // in `flags`

struct VersionedTensor {
  Version version;
  void* context;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

/// What a library's type has as `__dlpack_c_exchange_api__`, a capsule; lives as long as the process. More
/// functions follow.
struct ExchangeApi {
  Version version;
  const ExchangeApi* previous;
  void* allocator;
  /// Orders nothing. -1: it has set an exception of Python.
  int (*export_tensor)(void* object, VersionedTensor** made);
};
inline constexpr const char* kExchangeApiCapsule = "dlpack_exchange_api";

}  // namespace multiring::binding::dlpack
