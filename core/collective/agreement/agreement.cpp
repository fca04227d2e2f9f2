#include "collective/agreement/agreement.h"

namespace multiring {

bool Agreement::all_match() const {
  return all([&mine = board_.mine().key](const Descriptor& each) { return same_key(each.key, mine); });
}

SymmetricRanks Agreement::symmetric_ranks(bool outputs) const {
  const auto is_symmetric = [outputs](const Descriptor& each) {
    return each.input_region != 0 && (!outputs || each.output_region != 0);
  };
  if (!any(is_symmetric)) return SymmetricRanks::kNone;
  const bool in_the_same = same(&Descriptor::input_region) && (!outputs || same(&Descriptor::output_region));
  return in_the_same && all(is_symmetric) ? SymmetricRanks::kAll : SymmetricRanks::kSome;
}

}  // namespace multiring
