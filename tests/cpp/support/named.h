#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/named/named_queue.h"
#include "support/errors.h"
#include "support/operations.h"

namespace multiring::testing {

/// "name 3". (GCC 12 warns of `"name " + std::to_string(3)`.)
template <class Number>
std::string numbered(std::string text, Number number) {
  return text.append(std::to_string(number));
}

inline std::shared_ptr<NamedQueue> queue_over(Communicator& communicator) {
  return NamedQueue::create(communicator, "queue", {});
}

/// A sum in place.
inline NamedRequest sum_of(Array& array, std::string name, NamedRequest::Done done = {}) {
  NamedRequest request;
  request.name = std::move(name);
  request.operations.push_back(allreduce_of(DType::kInt64, array.size(), array.data(), array.data()));
  request.done = std::move(done);
  return request;
}

inline std::shared_ptr<Work> submit(NamedQueue& queue, Array& array, const std::string& name) {
  return queue.submit(sum_of(array, name)).front();
}

inline void wait(const std::shared_ptr<Work>& work) { work->wait(Deadline::never(), {}); }

template <class... Fragments>
Error error_of_work(ErrorKind kind, const std::shared_ptr<Work>& work, const Fragments&... fragments) {
  return error_of(kind, [&] { wait(work); }, fragments...);
}

}  // namespace multiring::testing
