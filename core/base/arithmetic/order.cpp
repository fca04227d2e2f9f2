#include "base/arithmetic/order.h"

#include <string>

#include "base/error.h"
#include "base/names.h"

namespace multiring {

const char* order_name(Order order) {
  static constexpr const char* kNames[] = {"default", "canonical", "any"};
  return name_in(kNames, order, "unknown");
}

std::optional<Order> find_order(std::string_view name) {
  for (const Order order : {Order::kCanonical, Order::kAny})
    if (name == order_name(order)) return order;
  return {};
}

Order parse_order(std::string_view name) {
  if (const std::optional<Order> found = find_order(name)) return *found;
  throw_usage("order is '" + std::string(name) + "'; accepted: canonical, any");
}

}  // namespace multiring
