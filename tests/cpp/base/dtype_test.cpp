#include "base/arithmetic/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <string>

namespace multiring {
namespace {

TEST(DType, Sizes) {
  const std::size_t expected[kDTypeCount] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16};
  for (int i = 0; i < kDTypeCount; ++i) EXPECT_EQ(dtype_size(static_cast<DType>(i)), expected[i]) << i;
}

TEST(DType, NamesAreThoseOfNumPy) {
  EXPECT_STREQ(dtype_name(DType::kBool), "bool");
  EXPECT_STREQ(dtype_name(DType::kInt8), "int8");
  EXPECT_STREQ(dtype_name(DType::kUInt64), "uint64");
  EXPECT_STREQ(dtype_name(DType::kFloat16), "float16");
  EXPECT_STREQ(dtype_name(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(dtype_name(DType::kFloat64), "float64");
  EXPECT_STREQ(dtype_name(DType::kComplex128), "complex128");
  std::set<std::string> names;
  for (int i = 0; i < kDTypeCount; ++i) names.insert(dtype_name(static_cast<DType>(i)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kDTypeCount));
}

TEST(DType, NameTellsSizeAndKind) {
  for (int i = 1; i < kDTypeCount; ++i) {
    const DType dtype = static_cast<DType>(i);
    const std::string name = dtype_name(dtype);
    EXPECT_TRUE(name.ends_with(std::to_string(8 * dtype_size(dtype)))) << name;
    EXPECT_EQ(name.starts_with("complex"), is_complex(dtype)) << name;
    EXPECT_EQ(name.find("float") != std::string::npos || is_complex(dtype), is_floating(dtype)) << name;
  }
  EXPECT_FALSE(is_floating(DType::kBool));
}

TEST(DType, UnknownNumberIsRefused) {
  const DType unknown = static_cast<DType>(kDTypeCount);
  EXPECT_THROW(dtype_size(unknown), std::invalid_argument);
  EXPECT_THROW(dtype_name(unknown), std::invalid_argument);
  EXPECT_THROW(is_floating(unknown), std::invalid_argument);
}

}  // namespace
}  // namespace multiring
