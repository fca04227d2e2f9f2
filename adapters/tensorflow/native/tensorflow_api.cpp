#include "tensorflow_api.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <string>
#include <vector>

namespace multiring::tensorflow {

// Written once while the library is loaded, only read afterwards.
Api api;
bool done_can_be_moved = false;

namespace {

int collect(dl_phdr_info* info, size_t, void* names) {
  const char* base = std::strrchr(info->dlpi_name, '/');
  base = base == nullptr ? info->dlpi_name : base + 1;
  // Not by a fixed name: the number behind ".so" is TensorFlow's major version. Ours is called
  // libmultiring_...
  for (const char* wanted : {"libtensorflow_cc.so", "libtensorflow_framework.so", "libtensorflow.so",
                             "_pywrap_tensorflow_internal.so", "_pywrap_tensorflow_common.so"}) {
    if (std::strncmp(base, wanted, std::strlen(wanted)) == 0) {
      static_cast<std::vector<std::string>*>(names)->emplace_back(info->dlpi_name);
    }
  }
  return 0;
}

}  // namespace

std::string load_api() {
  std::vector<std::string> names;
  dl_iterate_phdr(collect, &names);
  if (names.empty()) return "TensorFlow is not loaded in this process; import tensorflow first";
  std::vector<void*> handles;
  for (const std::string& name : names) {
    if (void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD)) handles.push_back(handle);
  }
  const auto find = [&](const char* name) -> void* {
    for (void* handle : handles) {
      if (void* address = dlsym(handle, name)) return address;
    }
    return nullptr;
  };
  std::string missing;
#define MULTIRING_FIND(name, result, arguments)                 \
  api.name = reinterpret_cast<decltype(api.name)>(find(#name)); \
  if (api.name == nullptr) missing += missing.empty() ? #name : ", " #name;
  MULTIRING_TENSORFLOW_FUNCTIONS(MULTIRING_FIND)
#undef MULTIRING_FIND
  // tensorflow::Device::ComputeAsync(AsyncOpKernel*, OpKernelContext*, std::function<void()>), of libstdc++
  done_can_be_moved = find(
                          "_ZN10tensorflow6Device12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextESt8"
                          "functionIFvvEE") != nullptr;
  for (void* handle : handles) dlclose(handle);  // TensorFlow stays loaded without our references
  if (missing.empty()) return "";
  return "this TensorFlow's C API lacks " + missing + "; multiring needs TensorFlow 2.16 or newer";
}

}  // namespace multiring::tensorflow

#define MULTIRING_EXPORT extern "C" __attribute__((visibility("default")))

/* Whether operations run while others wait; called by the Python part. */
MULTIRING_EXPORT int multiring_tensorflow_is_asynchronous() {
  return multiring::tensorflow::done_can_be_moved ? 1 : 0;
}

/* Makes kernels wait inside compute, as with a TensorFlow that leaves no other way. For tests. */
MULTIRING_EXPORT void multiring_tensorflow_wait_in_compute() {
  multiring::tensorflow::done_can_be_moved = false;
}
