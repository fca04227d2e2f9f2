#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/export.h"

namespace multiring {

/// The order in which an allreduce adds the ranks' contributions.
enum class Order : std::uint8_t {
  kDefault = 0,    ///< the communicator's
  kCanonical = 1,  ///< one order, whatever the algorithm: the same bits wherever ranks are (reduction.h)
  kAny = 2,        ///< that of the algorithm, the ring's among them: bits depend on placement, mode and size
};
inline constexpr int kOrderCount = 3;

/// "default", "canonical", "any".
MULTIRING_API const char* order_name(Order order);
/// The one with this name, except the default; empty: there is none.
MULTIRING_API std::optional<Order> find_order(std::string_view name);
/// The same, or raises a usage error that says what is accepted.
MULTIRING_API Order parse_order(std::string_view name);

}  // namespace multiring
