#include "binding/arrivals.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace multiring::binding {

void Arrivals::set_buckets(std::vector<std::vector<std::size_t>> buckets) {
  buckets_ = std::move(buckets);
  for (std::size_t number = 0; number < buckets_.size(); ++number)
    for (const std::size_t index : buckets_[number]) bucket_of_.at(index) = number;
}

void Arrivals::begin() {
  pending_.clear();
  for (const auto& bucket : buckets_) pending_.push_back(bucket.size());
  open_ = true;
}

bool Arrivals::are_ready(std::size_t bucket) const {
  return std::ranges::all_of(buckets_.at(bucket), [&](std::size_t index) { return state_[index] == kReady; });
}

void Arrivals::set_sent(std::size_t bucket) {
  for (const std::size_t index : buckets_.at(bucket)) state_[index] = kSent;
}

Arrivals::Found Arrivals::mark(std::size_t index) {
  const std::size_t bucket = bucket_of_.at(index);
  if (state_[index] == kSent) return kSecond;
  if (state_[index] == kReady) return kWaits;
  state_[index] = kReady;
  if (recording_) order_.push_back(index);
  return --pending_[bucket] == 0 ? kComplete : kWaits;
}

void bind_arrivals(py::module_& module) {
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(module, "Arrivals",
                                                  "Which gradients of a round have arrived.")
      .def(py::init<py::array_t<std::uint8_t>>(), py::arg("states"), "states: of GradientState, shared.")
      .def("set_buckets", &Arrivals::set_buckets, py::arg("buckets"), "The indices of each bucket.")
      .def("begin", &Arrivals::begin)
      .def("end", &Arrivals::end)
      .def(
          "mark", [](Arrivals& self, std::size_t index) -> int { return self.mark(index); }, py::arg("index"),
          "A gradient is final: 0, 1 if it was the last of its bucket, 2 if its bucket has left.")
      .def("is_complete", &Arrivals::is_complete, py::arg("bucket"))
      .def("are_ready", &Arrivals::are_ready, py::arg("bucket"), "All are, and have not been sent.")
      .def("set_sent", &Arrivals::set_sent, py::arg("bucket"), "All leave.")
      .def("order", &Arrivals::order, "In which order gradients have arrived.")
      .def("clear_order", &Arrivals::clear_order)
      .def("stop_recording", &Arrivals::stop_recording);
}

}  // namespace multiring::binding
