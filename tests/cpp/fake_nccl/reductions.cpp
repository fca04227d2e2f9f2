#include <bit>
#include <iterator>
#include <utility>

#include "fake_nccl/communicator.h"

namespace multiring::testing::fake_nccl {
namespace {

/// What is added of it is float, and rounded once for each operator.
struct BFloat16 {
  std::uint16_t bits;

  explicit BFloat16(float value) : bits(from(std::bit_cast<std::uint32_t>(value))) {}
  explicit BFloat16(int value) : BFloat16(static_cast<float>(value)) {}
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U); }  // NOLINT

 private:
  static std::uint16_t from(std::uint32_t value) {
    return static_cast<std::uint16_t>((value + 0x7fffU + (value >> 16U & 1U)) >> 16U);
  }
};

template <class T>
T combined(T a, T b, int op) {
  if (op == 1) return static_cast<T>(a * b);
  if (op == 2) return a > b ? a : b;
  if (op == 3) return a < b ? a : b;
  return static_cast<T>(a + b);
}

/// From the last rank to the first.
template <class T>
void add_all(std::vector<std::vector<char>>& inputs, int op) {
  auto* const sums = reinterpret_cast<T*>(inputs.back().data());
  const std::size_t count = inputs.back().size() / sizeof(T);
  for (std::size_t rank = inputs.size() - 1; rank-- > 0;)
    for (std::size_t i = 0; i < count; ++i)
      sums[i] = combined(sums[i], reinterpret_cast<const T*>(inputs[rank].data())[i], op);
  const T ranks = static_cast<T>(static_cast<int>(inputs.size()));
  if (op == 4)
    for (std::size_t i = 0; i < count; ++i) sums[i] = static_cast<T>(sums[i] / ranks);
}

struct Type {
  void (*add_all)(std::vector<std::vector<char>>& inputs, int op);
  std::size_t size;
};
template <class T>
constexpr Type type_of() {
  return {add_all<T>, sizeof(T)};
}
// In the order of ncclDataType_t.
constexpr Type kTypes[] = {type_of<std::int8_t>(),   type_of<std::uint8_t>(), type_of<std::int32_t>(),
                           type_of<std::uint32_t>(), type_of<std::int64_t>(), type_of<std::uint64_t>(),
                           type_of<_Float16>(),      type_of<float>(),        type_of<double>(),
                           type_of<BFloat16>()};

}  // namespace

std::size_t dtype_size(int dtype) {
  return dtype >= 0 && dtype < static_cast<int>(std::size(kTypes)) ? kTypes[dtype].size : 0;
}

std::vector<char> reduced(std::vector<std::vector<char>> inputs, int dtype, int op) {
  kTypes[dtype].add_all(inputs, op);
  return std::move(inputs.back());
}

}  // namespace multiring::testing::fake_nccl
