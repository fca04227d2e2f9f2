// Libraries that are opened at run time: where they are looked for, and what is said where none can be used.

#include "device/shared_library.h"

#include <dlfcn.h>

#include "device/driver.h"
#include "device/libraries.h"
#include "device/nvrtc.h"
#include "support/errors.h"

namespace multiring {
namespace {

using namespace testing;
using Candidate = SharedLibrary::Candidate;

std::string no_refusal(const SharedLibrary&) { return {}; }

TEST(SharedLibraryTest, LoadedCopyThenWheelsThenTheSystem) {
  const std::string names[] = {"liba.so.2", "liba.so.1"};
  const std::string sites[] = {"/x", "/y"};
  std::string found;
  for (const Candidate& each : SharedLibrary::candidates(names, "a/lib", sites))
    found += each.origin.substr(0, 6) + (each.has_to_be_there ? "! " : " ") + each.file + "\n";
  EXPECT_EQ(found,
            "loaded! liba.so.2\nloaded! liba.so.1\n"
            "of a w /x/a/lib/liba.so.2\nof a w /x/a/lib/liba.so.1\n"
            "of a w /y/a/lib/liba.so.2\nof a w /y/a/lib/liba.so.1\n"
            "of the liba.so.2\nof the liba.so.1\n");
  EXPECT_EQ(SharedLibrary::candidates(names, "", sites).size(), 4U);
}

TEST(SharedLibraryTest, LoadedCopyIsTaken) {
  const std::string names[] = {"libm.so.6"};
  std::string why = "unchanged";
  const auto found = SharedLibrary::open(SharedLibrary::candidates(names, "", {}), no_refusal, &why);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->origin(), "loaded by the process");
  expect_text(found->path(), "/libm.so.6");
  EXPECT_NE(found->find("cos"), nullptr);
  EXPECT_EQ(found->find("cuInit"), nullptr);
  EXPECT_EQ(why, "unchanged");
}

TEST(SharedLibraryTest, EachPlaceHasAReason) {
  const Candidate places[] = {{"loaded", "libnot-loaded.so.1", true},
                              {"of a wheel", "/not/there/libm.so.6"},
                              {"of the system", "libnot-there.so.6"}};
  std::string why;
  EXPECT_FALSE(SharedLibrary::open(places, no_refusal, &why).has_value());
  expect_text(why, "/not/there/libm.so.6: cannot open shared object file");
  expect_text(why, "; libnot-there.so.6: cannot open shared object file");
}

TEST(SharedLibraryTest, NoneIsOpenedBesideOneThatTheProcessKeeps) {
  const Candidate places[] = {{"loaded", "libm.so.6", true}, {"of a wheel", "/not/there/libm.so.6"}};
  std::string why;
  const auto refuse = [](const SharedLibrary&) { return "too old"; };
  EXPECT_FALSE(SharedLibrary::open(places, refuse, &why).has_value());
  expect_text(why, "/libm.so.6: too old; others are not looked for, as the process has this one");
  EXPECT_EQ(why.find("/not/there"), std::string::npos) << why;
}

// Any library that this process has no other use for.
TEST(SharedLibraryTest, RefusedOneIsClosedUnlessItIsToBeKept) {
  const char* const file = "libanl.so.1";
  const Candidate places[] = {{"of the system", file}};
  std::string why;
  for (const bool is_kept : {false, true}) {
    const auto refuse = [&](const SharedLibrary& library) {
      if (is_kept) library.keep();
      return "too old";
    };
    EXPECT_FALSE(SharedLibrary::open(places, refuse, &why).has_value());
    void* const handle = ::dlopen(file, RTLD_NOW | RTLD_NOLOAD);
    EXPECT_EQ(handle != nullptr, is_kept) << why;
    if (handle != nullptr) ::dlclose(handle);
  }
}

TEST(SharedLibraryTest, MissingFunctionsOfTheDriverAreNamed) {
  const std::string names[] = {"libm.so.6"};
  std::string why;
  const auto refuse = [&](const SharedLibrary& library) { return cuda::Driver().load(library); };
  SharedLibrary::open(SharedLibrary::candidates(names, "", {}), refuse, &why);
  expect_text(why, "has no function cuInit: a newer driver is needed");
}

TEST(DeviceLibrariesTest, EachIsFoundOrHasAReason) {
  const std::string sites[] = {"/nowhere"};
  const std::vector<DeviceLibrary> found = find_device_libraries(sites);
  ASSERT_EQ(found.size(), 5U);
  const char* const names[] = {"CUDA driver", "NCCL", "NVRTC", "HIP", "RCCL"};
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].name, names[i]);
    EXPECT_EQ(found[i].path.empty(), !found[i].why.empty());
    EXPECT_EQ(found[i].path.empty(), found[i].version.empty());
  }
  if (found[1].path.empty()) expect_text(found[1].why, "/nowhere/nvidia/nccl/lib/libnccl.so.2: cannot open");
  if (found[2].path.empty())
    expect_text(found[2].why, "/nowhere/nvidia/cuda_nvrtc/lib/libnvrtc.so.12: cannot open");
}

TEST(DeviceLibrariesTest, CompilerIsOneThatTheDriverIsNewEnoughFor) {
  EXPECT_EQ(nvrtc::Library::candidates(13, {}).size(), 4U);
  for (const Candidate& each : nvrtc::Library::candidates(12, {})) EXPECT_EQ(each.file, "libnvrtc.so.12");
  EXPECT_EQ(nvrtc::Library::candidates(11, {}).size(), 0U);
}

}  // namespace
}  // namespace multiring
