#pragma once

#include "base/export.h"
#include "transport/failures.h"
#include "transport/mailboxes.h"
#include "transport/ranks.h"
#include "transport/rounds.h"
#include "transport/subgroups.h"

namespace multiring {

class Hierarchy;

/// What the collectives need from a group of ranks.
///
/// A rank reads what the others have published, and writes only its own memory, unless the ranks *share
/// memory*: then it may write to the others' staging and symmetric memory, too.
class MULTIRING_API Transport : public Ranks,
                                public Rounds,
                                public Mailboxes,
                                public Subgroups,
                                public Failures {
 public:
  virtual ~Transport() = default;

  /// Null if all ranks share memory.
  virtual Hierarchy* hierarchy() { return nullptr; }
};

}  // namespace multiring
