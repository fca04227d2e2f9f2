#include "base/protocol.h"

#ifndef MULTIRING_VERSION
#error "MULTIRING_VERSION comes from the build"
#endif

namespace multiring {

std::string build_text(std::size_t layout) {
  return "multiring " MULTIRING_VERSION " (protocol " + std::to_string(kProtocol) + "." +
         std::to_string(layout) + ")";
}

}  // namespace multiring
