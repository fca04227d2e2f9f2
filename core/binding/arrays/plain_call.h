#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/communicator.h"

namespace multiring::binding {

/// The allreduce of plain arrays that training loops call: a plain C function of Python, without what makes a
/// pybind11 call convenient and slow (about 0.4 us of a call that takes 1 us in all).
///
///     call(x, out, op, name, prescale, postscale, timeout, crossing) -> bool
///
/// False, and nothing was done, for anything but arrays in C order of NumPy's own dtypes, or that DLPack's
/// exchange API describes, and arguments of the plain types (op, name: str, the latter may be None; scales:
/// float; timeout: float or None; crossing: dict of the keyword arguments comm_dtype and order, as far as
/// given: str or None): then the caller uses the general function, which also reports what is wrong.
pybind11::object make_plain_allreduce(std::shared_ptr<Communicator> communicator);

}  // namespace multiring::binding
