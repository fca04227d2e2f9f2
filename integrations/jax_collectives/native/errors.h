#pragma once

#include <string>

#include "multiring.h"

namespace multiring::jax_collectives {

/// MPI's functions return numbers, and XLA asks for the text of a number later, maybe from another thread.

/// Keeps a text and returns its number, which is positive.
int keep_error(const std::string& text);
int keep_error(const mr_error& error);
/// MPI_Error_string.
int error_text(int code, char* text, int* length);

}  // namespace multiring::jax_collectives
