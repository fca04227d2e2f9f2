#pragma once

#include <exception>

#include "base/error.h"
#include "multiring.h"

namespace multiring {

/// Runs `body` and returns MR_OK, or passes the error that it raises to `report` and returns the error's
/// kind. No exception leaves the C ABI.
template <class Report, class Body>
mr_status guarded_by(const Report& report, const Body& body) {
  const auto fail = [&](const Error& failure) {
    report(failure);
    return static_cast<mr_status>(failure.kind());
  };
  try {
    body();
    return MR_OK;
  } catch (const Error& failure) {
    return fail(failure);
  } catch (const std::exception& failure) {
    return fail(Error(ErrorKind::kInternal, failure.what()));
  } catch (...) {
    return fail(Error(ErrorKind::kInternal, "unknown error"));
  }
}

}  // namespace multiring
