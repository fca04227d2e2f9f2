#pragma once

#include <string>

#include "multiring.h"

namespace multiring::tensorflow {

/* Registers the asynchronous kernel of an op; what is wrong, or an empty text. */
std::string register_kernel(const char* op, mr_kind kind);

}  // namespace multiring::tensorflow
