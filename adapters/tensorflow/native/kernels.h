#pragma once

#include <string>

#include "multiring.h"

namespace multiring::tensorflow {

/* Registers the asynchronous kernel of an op; what is wrong, or an empty text. */
std::string register_kernel(const char* op, mr_kind kind);

/* Registers the kernel of an op that is no collective of the core: that counts steps, or is delegated. */
std::string register_other_kernel(const char* op);

}  // namespace multiring::tensorflow
