#include <pybind11/pybind11.h>

#include "binding/arrays/devices.h"
#include "binding/arrays/result.h"
#include "binding/arrivals.h"
#include "binding/errors.h"
#include "binding/fork_lock.h"
#include "binding/gil.h"
#include "binding/py_communicator.h"
#include "binding/py_operation.h"
#include "binding/tensor_gradients.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The native core of multiring. Use the multiring package instead.";
  multiring::binding::register_errors();
  // In this order each signature names classes that are known already.
  multiring::binding::bind_result(module);
  multiring::binding::bind_devices(module);
  multiring::binding::bind_operation(module);
  multiring::binding::bind_plan(module);
  multiring::binding::bind_communicator(module);
  multiring::binding::bind_probe(module);
  multiring::binding::bind_named_queue(module);
  multiring::binding::bind_connect(module);
  multiring::binding::bind_network(module);
  multiring::binding::bind_arrivals(module);
  multiring::binding::bind_tensor_gradients(module);
  multiring::binding::bind_fork_lock(module);
  multiring::binding::watch_interpreter(module);
}
