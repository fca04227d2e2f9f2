#include "engine/first_error.h"

#include <new>
#include <stdexcept>

namespace multiring {

bool FirstError::store(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (error_) return false;
  error_ = error;
  set_.store(true, std::memory_order_release);
  return true;
}

void FirstError::throw_broken(const ErrorSeen& seen) const {
  ErrorContext context = error_->context();
  context.rank = rank_;
  if (!seen->exchange(true, std::memory_order_relaxed)) throw Error(error_->kind(), error_->what(), context);
  throw Error(ErrorKind::kAborted,
              what_ + " is broken on rank " + std::to_string(rank_) + " by its first error (" +
                  error_kind_name(error_->kind()) + "): " + error_->what() +
                  " Call multiring.shutdown() and init() to start anew.",
              context);
}

Error FirstError::caught(const std::string& operation, int rank, const std::string& host) {
  const std::string here = "rank " + std::to_string(rank);
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorKind::kInternal, here + " is out of memory in " + operation);
  } catch (const std::runtime_error& error) {
    return Error(ErrorKind::kInternal, here + " in " + operation + ": " + error.what());
  } catch (const std::logic_error& error) {
    return Error(ErrorKind::kInternal, here + " in " + operation + ": " + error.what());
  } catch (...) {  // raised by an interrupt callback: Ctrl-C
    return Error(ErrorKind::kAborted, here + " on " + host + " was interrupted in " + operation);
  }
}

Error FirstError::sent(const Error& error, ErrorContext about) {
  // All ranks are told the same peer.
  const bool about_one = error.kind() == ErrorKind::kPeerLost || error.kind() == ErrorKind::kTimeout;
  if (about_one && about.odd < 0) about.odd = about.peer;
  // A usage error in an operation is an abort on the peers.
  const ErrorKind kind = error.kind() == ErrorKind::kUsage ? ErrorKind::kAborted : error.kind();
  return Error(kind, error.what(), about);
}

}  // namespace multiring
