#include "support/operations.h"

#include "collective/kinds.h"

namespace multiring::testing {

std::vector<DType> tested_dtypes() {
  if (sanitized()) return {DType::kBool, DType::kInt16, DType::kBFloat16, DType::kFloat32};
  return {DType::kBool,     DType::kInt8,    DType::kUInt8,  DType::kInt16,  DType::kUInt16,
          DType::kInt32,    DType::kUInt32,  DType::kInt64,  DType::kUInt64, DType::kFloat16,
          DType::kBFloat16, DType::kFloat32, DType::kFloat64};
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

Operation barrier_operation(std::string_view name) {
  return make_operation({.kind = OpKind::kBarrier, .name = std::string(name)});
}

void perform(Communicator& communicator, Operation& operation, CallMode mode) {
  if (mode == CallMode::kSync) return communicator.run(operation, {});
  const auto work = communicator.submit(std::move(operation), 0, nullptr);
  work->wait(Deadline::never(), {});
  operation = std::move(work->take_result());
}

Operation perform(Communicator& communicator, const Request& request, CallMode mode) {
  Operation operation = make_operation(request);
  perform(communicator, operation, mode);
  return operation;
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

std::string case_name(const GroupCase& group) {
  return std::string(transport_name(group.transport)) + (group.roomy ? "_roomy_" : "_") +
         std::to_string(group.size) + "_ranks_" + std::to_string(group.staging_bytes);
}

}  // namespace multiring::testing
