// The driver's library: what is said where there is none, or one that cannot be used.

#include "device/driver.h"
#include "support/errors.h"

namespace multiring {
namespace {

using namespace testing;

TEST(DeviceDriverTest, MissingLibraryIsNamed) {
  cuda::Driver driver;
  std::string why;
  EXPECT_FALSE(cuda::Driver::load("libnot-there.so.1", &driver, &why));
  expect_text(why, "libnot-there.so.1");
}

TEST(DeviceDriverTest, MissingFunctionIsNamed) {
  cuda::Driver driver;
  std::string why;
  EXPECT_FALSE(cuda::Driver::load("libm.so.6", &driver, &why));
  expect_text(why, "libm.so.6: driver of unknown version has no function cuInit: a newer driver is needed");
}

TEST(DeviceDriverTest, FoundOrNotItIsTheSameAgain) {
  std::string why;
  const cuda::Driver* const found = cuda::Driver::find(&why);
  EXPECT_EQ(found == nullptr, !why.empty());
  std::string again;
  EXPECT_EQ(cuda::Driver::find(&again), found);
  EXPECT_EQ(again, why);
}

}  // namespace
}  // namespace multiring
