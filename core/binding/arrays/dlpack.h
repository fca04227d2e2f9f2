#pragma once

#include <cstdint>

// The part of DLPack 1.3 (github.com/dmlc/dlpack, Apache-2.0) that is needed here: a stable C ABI.
namespace multiring::binding::dlpack {

enum DeviceType : std::int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,
  kRocm = 10,
  kRocmHost = 11,
  kCudaManaged = 13
};

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

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

struct VersionedTensor {
  Version version;
  void* context;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

constexpr std::uint32_t kMajorVersion = 1;
constexpr std::uint64_t kReadOnly = 1;

/// What a type offers as `__dlpack_c_exchange_api__`, in a capsule: functions that return 0, or set a Python
/// error. None of them waits for the work of a device.
struct ExchangeApi {
  Version version;
  const ExchangeApi* earlier;  // of another major version
  void* allocate;
  int (*share)(void* object, VersionedTensor** out);
  void* wrap;
  /// May be null. What it tells holds while the object is unchanged.
  int (*describe)(void* object, Tensor* out);
  void* current_stream;
};

}  // namespace multiring::binding::dlpack
