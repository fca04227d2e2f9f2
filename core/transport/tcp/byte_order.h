#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace multiring::tcp {

/// Writes numbers one after the other, little endian whatever the processor. The caller knows that they fit.
class FieldWriter {
 public:
  explicit FieldWriter(std::span<std::byte> to) : to_(to) {}
  template <class Number>
  void put(Number number) {
    auto bits = static_cast<std::make_unsigned_t<Number>>(number);
    for (std::size_t i = 0; i < sizeof(Number); ++i) to_[i] = static_cast<std::byte>(bits >> (8 * i));
    to_ = to_.subspan(sizeof(Number));
  }
  void put(std::span<const std::byte> bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) to_[i] = bytes[i];
    to_ = to_.subspan(bytes.size());
  }

 private:
  std::span<std::byte> to_;
};

/// Reads what FieldWriter wrote.
class FieldReader {
 public:
  explicit FieldReader(std::span<const std::byte> from) : from_(from) {}
  template <class Number>
  Number get() {
    std::make_unsigned_t<Number> bits = 0;
    for (std::size_t i = 0; i < sizeof(Number); ++i)
      bits = static_cast<std::make_unsigned_t<Number>>(
          bits |
          static_cast<std::make_unsigned_t<Number>>(
              static_cast<std::make_unsigned_t<Number>>(std::to_integer<std::uint8_t>(from_[i])) << (8 * i)));
    from_ = from_.subspan(sizeof(Number));
    return static_cast<Number>(bits);
  }
  void get(std::span<std::byte> bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = from_[i];
    from_ = from_.subspan(bytes.size());
  }

 private:
  std::span<const std::byte> from_;
};

}  // namespace multiring::tcp
