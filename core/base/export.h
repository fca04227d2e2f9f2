#pragma once

/// Marks what the shared library shows to the Python extension and to the C++ tests.
#define MULTIRING_API __attribute__((visibility("default")))
