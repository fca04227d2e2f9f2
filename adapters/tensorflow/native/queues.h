#pragma once

#include <cstdint>
#include <string>

#include "multiring.h"

namespace multiring::tensorflow {

/* The queue that was registered under a number; nullptr if there is none. Graphs contain numbers and not
 * addresses, so that a graph that was saved and loaded by another process finds that process's queue or none.
 */
mr_queue* find_queue(int64_t number);

/* Counts the steps of `name` on a queue: 1, 2, ... */
int64_t next_step(int64_t queue, const std::string& name);

/* Whether `name` was not running on this queue; it is from now on, until end_run. */
bool begin_run(int64_t queue, const std::string& name);
void end_run(int64_t queue, const std::string& name);

}  // namespace multiring::tensorflow
