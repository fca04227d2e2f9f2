// A stand-in for libnvrtc.so.12: it compiles nothing, and makes an image that the stand-in for the driver has
// the kernel for. Stricter than NVRTC: it takes the options alone with which results have the bits of the
// host.
//
// The variable FAKE_NVRTC, read at each call, may be "fail=compile".

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fake_cuda/kernel_image.h"

#define FAKE_NVRTC extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidOption = 5;
constexpr int kCompilation = 6;

struct Program {
  std::string source;
  std::string log;
  std::string image;
};

bool is_set(const char* option) {
  const char* const set = std::getenv("FAKE_NVRTC");
  return set != nullptr && std::strstr(set, option) != nullptr;
}

}  // namespace

FAKE_NVRTC int nvrtcVersion(int* major, int* minor) { return *major = 12, *minor = 9, kSuccess; }

FAKE_NVRTC const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_AS_INJECTED"; }

FAKE_NVRTC int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*,
                                  const char* const*) {
  *program = new Program{source, "", ""};
  return kSuccess;
}

FAKE_NVRTC int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}

FAKE_NVRTC int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  std::string others;
  int dtype = -1;
  for (int i = 0; i < count; ++i)
    if (std::sscanf(options[i], "-DMULTIRING_DTYPE=%d", &dtype) != 1) others += std::string(options[i]) + " ";
  const std::string wanted = "--gpu-architecture=sm_" + std::to_string(multiring::testing::kFakeCapability) +
                             " --std=c++17 --fmad=false --ftz=false --prec-div=true ";
  if (others != wanted) return kInvalidOption;
  if (is_set("fail=compile") || program->source.find("multiring_reduce(") == std::string::npos) {
    program->log = "reduce.cu(1): error: as injected";
    return kCompilation;
  }
  char image[64];
  std::snprintf(image, sizeof image, multiring::testing::kFakeImage, dtype);
  program->image = std::string(image) + '\0';
  return kSuccess;
}

FAKE_NVRTC int nvrtcGetProgramLogSize(Program* program, std::size_t* bytes) {
  return *bytes = program->log.size() + 1, kSuccess;
}

FAKE_NVRTC int nvrtcGetProgramLog(Program* program, char* text) {
  std::memcpy(text, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}

FAKE_NVRTC int nvrtcGetCUBINSize(Program* program, std::size_t* bytes) {
  return *bytes = program->image.size(), kSuccess;
}

FAKE_NVRTC int nvrtcGetCUBIN(Program* program, char* image) {
  std::memcpy(image, program->image.data(), program->image.size());
  return kSuccess;
}
