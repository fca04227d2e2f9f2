#include "support/operations.h"

#include <algorithm>
#include <cstring>

#include "collective/kinds.h"

namespace multiring::testing {

std::vector<DType> tested_dtypes() {
  if (sanitized())
    return {DType::kBool, DType::kInt16, DType::kBFloat16, DType::kFloat32, DType::kComplex128};
  std::vector<DType> all;
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) all.push_back(static_cast<DType>(dtype));
  return all;
}

Operation make_operation(const Request& request) {
  Operation operation;
  Descriptor& descriptor = operation.descriptor;
  descriptor.key.kind = request.kind;
  descriptor.key.root = request.root;
  if (traits_of(request.kind).reduces) {
    descriptor.key.op = request.reduction.op;
    descriptor.key.prescale = request.reduction.prescale;
    descriptor.key.postscale = request.reduction.postscale;
  }
  descriptor.key.comm_dtype = request.comm_dtype;
  descriptor.key.order = request.order;
  descriptor.dtype = request.dtype;
  descriptor.dims = 2;
  descriptor.shape[0] = request.rows;
  descriptor.shape[1] = request.row;
  descriptor.set_name(request.name);
  set_extents(descriptor);
  operation.input = static_cast<const std::byte*>(request.input);
  operation.output = static_cast<std::byte*>(request.output);
  operation.output_bytes = request.output_bytes;
  operation.splits = request.splits;
  return operation;
}

Operation allreduce_of(DType dtype, std::size_t count, const void* input, void* output, std::string_view name,
                       const Reduction& reduction) {
  Request request{.dtype = dtype, .rows = count, .input = input, .output = output};
  request.output_bytes = count * dtype_size(dtype);
  request.reduction = reduction;
  request.name = name;
  return make_operation(request);
}

Operation reduction_of(const ReduceProblem& problem, const void* input, void* output, std::string_view name) {
  return allreduce_of(problem.dtype, problem.count, input, output, name, problem.reduction);
}

Operation barrier_operation(std::string_view name) {
  return make_operation({.kind = OpKind::kBarrier, .name = std::string(name)});
}

Operation send_of(DType dtype, std::size_t count, const void* input, int to, std::string_view name) {
  Request request{.kind = OpKind::kSend, .dtype = dtype, .rows = count, .input = input, .root = to};
  request.name = name;
  return make_operation(request);
}

void perform(Communicator& communicator, Operation& operation, CallMode mode) {
  if (mode == CallMode::kSync) return communicator.run(operation, {});
  const auto work = communicator.submit(std::move(operation), 0, nullptr);
  work->wait(Deadline::never(), {});
  operation = std::move(work->take_result());
}

Operation perform(Communicator& communicator, Operation&& operation, CallMode mode) {
  perform(communicator, operation, mode);
  return std::move(operation);
}

Operation perform(Communicator& communicator, const Request& request, CallMode mode) {
  return perform(communicator, make_operation(request), mode);
}

void expect_result(const ReduceProblem& problem, const void* output, int rank) {
  EXPECT_TRUE(problem.count == 0 || std::memcmp(output, problem.expected.data(), problem.bytes()) == 0)
      << problem.text() << " on rank " << rank;
}

void expect_reduced(Communicator& communicator, const ReduceProblem& problem, CallMode mode,
                    std::byte* place) {
  Bytes own(place == nullptr ? problem.bytes() : 0);
  if (place == nullptr) place = reinterpret_cast<std::byte*>(own.data());
  std::ranges::copy(std::as_bytes(std::span(problem.input(communicator.rank()))), place);
  perform(communicator, reduction_of(problem, place, place), mode);
  expect_result(problem, place, communicator.rank());
}

std::vector<Piece> pieces_of(const ReduceProblem& problem, int rank, Bytes& input, Bytes& output) {
  std::vector<Piece> pieces;
  std::size_t length = 1 + static_cast<std::size_t>(rank);
  for (std::size_t begin = 0; begin < problem.count; length = length * 3 % 1021) {
    const std::size_t offset = begin * dtype_size(problem.dtype);
    const std::size_t bytes = std::min(length - 1, problem.count - begin) * dtype_size(problem.dtype);
    auto* const here = reinterpret_cast<std::byte*>(input.data()) + offset;
    auto* const there = reinterpret_cast<std::byte*>(output.data()) + offset;
    pieces.push_back({here, pieces.size() % 2 == 0 ? here : there, bytes});
    begin += length - 1;
  }
  return pieces;
}

Bytes output_of(const std::vector<Piece>& pieces) {
  Bytes found;
  for (const Piece& piece : pieces) {
    const auto* const begin = reinterpret_cast<const unsigned char*>(piece.output);
    found.insert(found.end(), begin, begin + piece.bytes);
  }
  return found;
}

Bytes result_of(const Operation& operation) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(operation.result.data());
  return {begin, begin + operation.result.bytes()};
}

std::vector<GroupCase> group_cases(const std::vector<int>& sizes, const std::vector<std::size_t>& stagings) {
  std::vector<GroupCase> cases;
  for (const TransportKind transport : kTransports)
    for (const int size : sizes)
      for (const std::size_t staging : stagings) cases.push_back({transport, size, staging, false});
  return cases;
}

std::vector<GroupCase> all_group_cases() {
  std::vector<GroupCase> cases = group_cases({1, 2, 3, 4, 7}, {kSmallStaging});
  cases.push_back({TransportKind::kClusterMpi, 4, kSmallStaging});
  cases.push_back({TransportKind::kClusterRelayed, 7, kSmallStaging, false, 5});
  return cases;
}

std::vector<GroupCase> crowded_and_roomy_cases() {
  std::vector<GroupCase> cases = all_group_cases();
  for (const int size : {2, 3, 4, 7}) cases.push_back({TransportKind::kInproc, size, kSmallStaging, true});
  return cases;
}

void PrintTo(const GroupCase& group, std::ostream* out) {
  *out << transport_name(group.transport) << (group.roomy ? "_roomy_" : "_") << group.size << "_ranks_"
       << group.staging_bytes;
  if (group.hosts != 2) *out << "_hosts" << group.hosts;
  if (*group.unplanned != '\0') *out << "_" << group.unplanned;
}

}  // namespace multiring::testing
