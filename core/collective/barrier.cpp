#include "collective/collectives.h"

namespace multiring {

void barrier(Exchange& exchange, const OperationCall& call, Operation& operation) {
  exchange.match(call, operation.descriptor);
}

}  // namespace multiring
