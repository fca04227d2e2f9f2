#include "collective/cluster/cluster_allreduce.h"

#include <algorithm>
#include <set>

#include "base/arithmetic/kernels/copy.h"
#include "base/cache.h"

namespace multiring {
namespace {

DType carried_dtype(const Operation& operation) {
  const CommDtype comm_dtype = operation.descriptor.key.comm_dtype;
  return is_rounded(comm_dtype) ? rounded_dtype(comm_dtype) : operation.dtype();
}

/// In any order sums of many hosts are rounded on the way: those of an average are divided before, so that
/// they stay in the range of float16.
Reduction rounded_reduction(const Operation& operation, int ranks) {
  Reduction reduction = operation.reduction();
  if (operation.descriptor.key.order != Order::kAny || reduction.op != ReduceOp::kAverage) return reduction;
  reduction.op = ReduceOp::kSum;
  reduction.prescale /= ranks;
  return reduction;
}

}  // namespace

ClusterAllreduce::ClusterAllreduce(Exchange& exchange, const OperationCall& call,
                                   std::span<Operation* const> operations, const PieceList& pieces,
                                   Hierarchy& hierarchy)
    : exchange_(exchange),
      call_(call),
      pieces_(pieces),
      hierarchy_(hierarchy),
      local_ranks_(hierarchy.host_ranks()),
      local_rank_(static_cast<int>(std::ranges::find(local_ranks_, exchange.rank()) - local_ranks_.begin())),
      order_(operations[0]->descriptor.key.order),
      sums_(operations[0]->dtype(), operations[0]->reduction(), exchange.size(), order_),
      carried_(carried_dtype(*operations[0])),
      element_(operations[0]->element_size()),
      carried_element_(dtype_size(carried_)),
      bytes_(pieces.bytes()),
      waiting_(call.waiting) {
  waiting_.brief = true;  // all are in the operation
  const bool rounded = is_rounded(operations[0]->descriptor.key.comm_dtype);
  if (rounded)
    rounded_.emplace(carried_, rounded_reduction(*operations[0], exchange.size()), exchange.size(), order_);
  PlanCache& plans = exchange.plans();
  const AllreduceAlgorithm algorithm = plans.algorithm(exchange.transport(), bytes_, order_, rounded);
  segment_bytes_ = plan_segment_bytes(bytes_, hierarchy_.staging_bytes(), algorithm.segment);
  segments_ = segment_count(bytes_, segment_bytes_);
  const Range last = segment(segments_ - 1);
  const auto schedule = [&](std::size_t bytes) {
    return plans.schedule(exchange.transport(),
                          {bytes / element_, carried_, rounded, order_, algorithm.mode});
  };
  full_ = schedule(segment_bytes_);
  last_ = schedule(last.size());
  steps_ = full_->steps.size();
  in_flight_.resize(std::min(segments_, steps_ * kPipelineDepth + 1));
  const std::size_t slot_bytes = std::max(full_->bytes, last_->bytes);
  workspace_ = plans.workspace(slot_bytes * in_flight_.size());
  for (std::size_t index = 0; index < in_flight_.size(); ++index)
    in_flight_[index].memory = workspace_->data() + index * slot_bytes;
}

// Messages still posted here belong to a failed operation: the network keeps their memory.
ClusterAllreduce::~ClusterAllreduce() {
  const bool failed =
      std::ranges::any_of(in_flight_, [](const InFlightSegment& each) { return !each.tickets.empty(); });
  if (failed) hierarchy_.keep(workspace_);
  for (const InFlightSegment& each : in_flight_)
    if (!each.tickets.empty()) hierarchy_.give_up(each.tickets);
}

void ClusterAllreduce::connect() {
  std::set<int> peers;
  for (const RankSchedule* schedule : {full_.get(), last_.get()})
    for (const RankSchedule::Step& step : schedule->steps)
      for (const auto* messages : {&step.sends, &step.receives})
        for (const RankSchedule::Message& message : *messages) peers.insert(message.peer);
  const std::vector<int> all(peers.begin(), peers.end());
  check(hierarchy_.connect(all, waiting_), nullptr);
}

void ClusterAllreduce::run() {
  connect();
  const std::size_t iterations = segments_ + steps_ * kPipelineDepth;
  for (std::size_t iteration = 0; iteration < iterations; ++iteration) {
    advance(iteration);
    exchange_within_host(iteration);
  }
}

void ClusterAllreduce::advance(std::size_t iteration) {
  // The oldest first: its peers' messages were posted before.
  for (std::size_t step = steps_; step-- > 0;) {
    const std::size_t age = (step + 1) * kPipelineDepth;
    if (iteration < age || iteration - age >= segments_) continue;
    InFlightSegment& current = in_flight(iteration - age);
    await(current);
    for (const RankSchedule::Join& join : current.schedule->steps[step].joins) add(current, join);
    if (step + 1 < steps_) post(current, step + 1);
  }
}

void ClusterAllreduce::exchange_within_host(std::size_t iteration) {
  const std::size_t age = steps_ * kPipelineDepth;
  const bool starts = iteration < segments_;
  const bool ends = iteration >= age;
  if (local_ranks_.size() > 1 && (starts || ends)) {
    if (starts) stage(iteration);
    if (ends) publish(iteration - age);
    check(hierarchy_.synchronise(waiting_), nullptr);
  }
  // The segment that ends makes room for the one that starts.
  if (ends) write_results(iteration - age);
  if (starts) start(iteration);
}

void ClusterAllreduce::stage(std::size_t index) {
  pieces_.read(read_cursor_, segment(index), hierarchy_.staging(local_rank_));
}

void ClusterAllreduce::publish(std::size_t index) {
  const InFlightSegment& finished = in_flight(index);
  const RankSchedule& schedule = *finished.schedule;
  if (schedule.share.empty()) return;
  copy_bytes(hierarchy_.staging(local_rank_) + segment_bytes_, finished.memory + schedule.result,
             schedule.share.size() * carried_element_);
}

/// Adds this rank's share of what its host has staged, and sends it on.
void ClusterAllreduce::start(std::size_t index) {
  InFlightSegment& current = in_flight(index);
  current.schedule = index + 1 == segments_ ? last_.get() : full_.get();
  const RankSchedule& schedule = *current.schedule;
  if (local_ranks_.size() == 1) {
    contribute(index, current.memory + schedule.host_sums[0].offset);
    return post(current, 0);
  }
  for (const RankSchedule::Sum& sum : schedule.host_sums) {
    parts_.clear();
    inputs_.clear();
    for (std::size_t local_rank = 0; local_rank < local_ranks_.size(); ++local_rank) {
      const Subtree alone{local_ranks_[local_rank], local_ranks_[local_rank] + 1};
      if (!is_part(alone, sum.node)) continue;
      const std::byte* const staged = hierarchy_.staged(static_cast<int>(local_rank));
      inputs_.push_back(staged + schedule.share.begin * element_);
      parts_.push_back({alone, inputs_.back()});
    }
    std::byte* const to = current.memory + sum.offset;
    if (rounded_)
      rounded_->contribute(inputs_, to, schedule.share.size());
    else
      sums_.join(parts_, sum.node, to, schedule.share.size());
  }
  post(current, 0);
}

/// A segment of a rank that is alone on its host.
void ClusterAllreduce::contribute(std::size_t index, std::byte* to) {
  if (!rounded_) return pieces_.read(read_cursor_, segment(index), to);
  pieces_.for_each_share(
      read_cursor_, segment(index),
      [&](const Piece& piece, std::size_t offset, std::size_t range_offset, std::size_t bytes) {
        const std::byte* const inputs[] = {piece.input + offset};
        rounded_->contribute(inputs, to + range_offset / element_ * carried_element_, bytes / element_);
      });
}

/// Writes the results of a segment to where they belong.
void ClusterAllreduce::write_results(std::size_t index) {
  const InFlightSegment& finished = in_flight(index);
  const RankSchedule& schedule = *finished.schedule;
  const std::size_t begin = segment(index).begin;
  for (std::size_t local_rank = 0; local_rank < local_ranks_.size(); ++local_rank) {
    const Range share = schedule.host_shares[local_rank];
    const std::byte* const results = static_cast<int>(local_rank) == local_rank_
                                         ? finished.memory + schedule.result
                                         : hierarchy_.staged(static_cast<int>(local_rank)) + segment_bytes_;
    const Range range{begin + share.begin * element_, begin + share.end * element_};
    if (!rounded_) {
      pieces_.write(write_cursor_, range, results);
      continue;
    }
    pieces_.for_each_share(
        write_cursor_, range,
        [&](const Piece& piece, std::size_t offset, std::size_t range_offset, std::size_t bytes) {
          rounded_->restore(results + range_offset / element_ * carried_element_, piece.output + offset,
                            bytes / element_);
        });
  }
}

void ClusterAllreduce::post(InFlightSegment& current, std::size_t step) {
  const RankSchedule::Step& messages = current.schedule->steps[step];
  current.tickets.clear();
  current.peers.clear();
  for (const RankSchedule::Message& message : messages.receives) {
    const auto [offset, size] = message.parts[0];
    current.tickets.push_back(hierarchy_.post_receive(message.peer, {current.memory + offset, size}));
    current.peers.push_back(message.peer);
  }
  for (const RankSchedule::Message& message : messages.sends) {
    spans_.clear();
    for (const auto [offset, size] : message.parts) spans_.push_back({current.memory + offset, size});
    current.tickets.push_back(hierarchy_.post_send(message.peer, spans_));
    current.peers.push_back(message.peer);
  }
}

void ClusterAllreduce::await(InFlightSegment& current) {
  if (current.tickets.empty()) return;
  check(hierarchy_.wait(current.tickets, waiting_), &current);
  current.tickets.clear();
}

void ClusterAllreduce::add(const InFlightSegment& current, const RankSchedule::Join& join) {
  for (const RankSchedule::Sum& output : join.outputs) {
    parts_.clear();
    for (const RankSchedule::Sum& input : join.inputs)
      if (is_part(input.node, output.node)) parts_.push_back({input.node, current.memory + input.offset});
    std::byte* const to = current.memory + output.offset;
    if (rounded_)
      rounded_->join(parts_, output.node, to, join.range.size());
    else
      sums_.join(parts_, output.node, to, join.range.size());
  }
}

void ClusterAllreduce::check(const WaitResult& result, const InFlightSegment* current) const {
  if (result.ok()) return;
  int late = result.peer;
  if (current != nullptr && result.outcome == WaitResult::Outcome::kTimeout)
    for (std::size_t index = current->tickets.size(); index-- > 0;)
      if (!hierarchy_.done(current->tickets[index])) late = current->peers[index];
  exchange_.throw_in_progress(call_, result, late);
}

}  // namespace multiring
