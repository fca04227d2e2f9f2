#include "collective/collectives.h"

namespace multiring {

void barrier(Exchange& exchange, const OperationCall& call) {
  exchange.begin(call.descriptor);
  exchange.synchronise(call);
  exchange.require_match(call);
}

}  // namespace multiring
