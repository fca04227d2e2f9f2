#pragma once

#include <string>
#include <vector>

#include "base/arithmetic/order.h"
#include "topology/dimensions.h"

namespace multiring::testing {

/// `pattern`, such as "1x7?", with the letter of each algorithm in the place of the question mark, if it may
/// be there in a plan that adds in `order`; of blocks, which only some algorithms keep apart, or of an
/// allreduce.
std::vector<std::string> modes_of_all(const std::string& pattern, Order order, bool has_blocks = false);

}  // namespace multiring::testing
