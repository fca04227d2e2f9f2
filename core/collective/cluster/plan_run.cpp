#include "collective/cluster/plan_run.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "base/arithmetic/kernels/copy.h"
#include "base/cache.h"

namespace multiring {
namespace {

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

DType PlanRun::carried_dtype(const Operation& operation) {
  const CommDtype comm_dtype = operation.descriptor.key.comm_dtype;
  return is_rounded(comm_dtype) ? rounded_dtype(comm_dtype) : operation.dtype();
}

PlanRun::PlanRun(Exchange& exchange, const OperationCall& call, const Operation& operation,
                 const PieceList& pieces, Collective collective, std::vector<Segment> segments,
                 Members members)
    : exchange_(exchange),
      call_(call),
      pieces_(pieces),
      hierarchy_(*exchange.transport().hierarchy()),
      local_ranks_(members.local),
      local_rank_(static_cast<int>(std::ranges::find(local_ranks_, exchange.rank()) - local_ranks_.begin())),
      collective_(collective),
      order_(operation.descriptor.key.order),
      sums_(operation.dtype(), operation.reduction(), members.size, order_),
      carried_(carried_dtype(operation)),
      element_(operation.element_size()),
      carried_element_(dtype_size(carried_)),
      segments_(std::move(segments)),
      waiting_(call.waiting) {
  waiting_.brief = true;  // all are in the operation
  if (is_rounded(operation.descriptor.key.comm_dtype))
    rounded_.emplace(carried_, rounded_reduction(operation, members.size), members.size, order_);
  steps_ = segments_.front().schedule->steps.size();
  std::size_t slot_bytes = 0;
  for (const Segment& segment : segments_) {
    if (adds(collective_)) published_at_ = std::max(published_at_, segment.range.size());
    slot_bytes = std::max(slot_bytes, segment.schedule->bytes);
  }
  in_flight_.resize(std::min(segments_.size(), steps_ * kPipelineDepth + 1));
  workspace_ = exchange.plans().workspace(slot_bytes * in_flight_.size());
  for (std::size_t index = 0; index < in_flight_.size(); ++index)
    in_flight_[index].memory = workspace_->data() + index * slot_bytes;
}

// Messages still posted here belong to a failed operation: the network keeps their memory.
PlanRun::~PlanRun() {
  const bool failed =
      std::ranges::any_of(in_flight_, [](const InFlightSegment& each) { return !each.tickets.empty(); });
  if (failed) hierarchy_.keep(workspace_);
  for (const InFlightSegment& each : in_flight_)
    if (!each.tickets.empty()) hierarchy_.give_up(each.tickets);
}

void PlanRun::connect() {
  std::set<int> peers;
  std::set<const RankSchedule*> schedules;
  for (const Segment& segment : segments_) schedules.insert(segment.schedule.get());
  for (const RankSchedule* schedule : schedules)
    for (const RankSchedule::Step& step : schedule->steps)
      for (const auto* messages : {&step.sends, &step.receives})
        for (const RankSchedule::Message& message : *messages) peers.insert(message.peer);
  const std::vector<int> all(peers.begin(), peers.end());
  check(hierarchy_.connect(all, waiting_), nullptr);
}

void PlanRun::run() {
  connect();
  const std::size_t iterations = segments_.size() + steps_ * kPipelineDepth;
  for (std::size_t iteration = 0; iteration < iterations; ++iteration) {
    advance(iteration);
    exchange_within_host(iteration);
  }
}

void PlanRun::advance(std::size_t iteration) {
  // The oldest first: its peers' messages were posted before.
  for (std::size_t step = steps_; step-- > 0;) {
    const std::size_t age = (step + 1) * kPipelineDepth;
    if (iteration < age || iteration - age >= segments_.size()) continue;
    InFlightSegment& current = in_flight(iteration - age);
    await(current);
    for (const RankSchedule::Join& join : current.schedule->steps[step].joins) add(current, join);
    if (step + 1 < steps_) post(current, step + 1);
  }
}

void PlanRun::exchange_within_host(std::size_t iteration) {
  const std::size_t age = steps_ * kPipelineDepth;
  const bool starts = iteration < segments_.size();
  const bool ends = iteration >= age;
  const bool stages = starts && adds(collective_);
  const bool publishes = ends && collective_ != Collective::kReduceScatter;
  if (local_ranks_.size() > 1 && (stages || publishes)) {
    if (stages) stage(iteration);
    if (publishes) publish(iteration - age);
    check(hierarchy_.synchronise(waiting_), nullptr);
  }
  // The segment that ends makes room for the one that starts.
  if (ends) write_results(iteration - age);
  if (starts) start(iteration);
}

void PlanRun::stage(std::size_t index) {
  pieces_.read(read_cursor_, segments_[index].range, hierarchy_.staging(local_rank_));
}

void PlanRun::publish(std::size_t index) {
  const InFlightSegment& finished = in_flight(index);
  const RankSchedule& schedule = *finished.schedule;
  if (schedule.share.empty()) return;
  copy_bytes(hierarchy_.staging(local_rank_) + published_at_, result_at(finished, schedule.share.begin),
             schedule.share.size() * carried_element_);
}

/// See the class. What is rounded has another type in the arrays.
void PlanRun::use_arrays(std::size_t index) {
  InFlightSegment& current = in_flight(index);
  current.input = nullptr;
  current.output = nullptr;
  if (collective_ != Collective::kAllreduce || rounded_ || hierarchy_.outlasts_give_up()) return;
  const std::optional<Piece> piece = pieces_.piece_of(array_cursor_, segments_[index].range);
  if (!piece) return;
  if (local_ranks_.size() == 1) current.input = piece->input;
  if (piece->output != nullptr) current.output = piece->output + current.schedule->share.begin * element_;
}

std::byte* PlanRun::at(const InFlightSegment& current, std::size_t offset) const {
  const RankSchedule& schedule = *current.schedule;
  const bool result =
      offset >= schedule.result && offset - schedule.result < schedule.share.size() * carried_element_;
  return current.output != nullptr && result ? current.output + (offset - schedule.result)
                                             : current.memory + offset;
}

const std::byte* PlanRun::source_at(const InFlightSegment& current, std::size_t offset) const {
  if (current.input == nullptr) return at(current, offset);
  const std::size_t begin = current.schedule->host_sums[0].offset;
  const bool own = offset >= begin && offset - begin < current.schedule->share.size() * carried_element_;
  return own ? current.input + (offset - begin) : at(current, offset);
}

/// Adds this rank's share of what its host has staged, or takes this rank's own block, and sends it on.
void PlanRun::start(std::size_t index) {
  InFlightSegment& current = in_flight(index);
  current.schedule = segments_[index].schedule.get();
  const RankSchedule& schedule = *current.schedule;
  use_arrays(index);
  if (!adds(collective_)) {
    pieces_.read(read_cursor_, bytes_of(index, schedule.block), result_at(current, schedule.block.begin));
    return post(current, 0);
  }
  if (local_ranks_.size() == 1) {
    if (current.input == nullptr) contribute(index, current.memory + schedule.host_sums[0].offset);
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
void PlanRun::contribute(std::size_t index, std::byte* to) {
  if (!rounded_) return pieces_.read(read_cursor_, segments_[index].range, to);
  pieces_.for_each_share(
      read_cursor_, segments_[index].range,
      [&](const Piece& piece, std::size_t offset, std::size_t range_offset, std::size_t bytes) {
        const std::byte* const inputs[] = {piece.input + offset};
        rounded_->contribute(inputs, to + range_offset / element_ * carried_element_, bytes / element_);
      });
}

/// Writes the results of a segment to where they belong.
void PlanRun::write_results(std::size_t index) {
  const InFlightSegment& finished = in_flight(index);
  const RankSchedule& schedule = *finished.schedule;
  if (collective_ == Collective::kReduceScatter)
    return pieces_.write(write_cursor_, bytes_of(index, schedule.block),
                         result_at(finished, schedule.block.begin));
  for (std::size_t local_rank = 0; local_rank < local_ranks_.size(); ++local_rank) {
    const Range share = schedule.host_shares[local_rank];
    const bool own = static_cast<int>(local_rank) == local_rank_;
    if (own && finished.output != nullptr) continue;
    const std::byte* const results = own ? finished.memory + schedule.result
                                         : hierarchy_.staged(static_cast<int>(local_rank)) + published_at_;
    const Range range = bytes_of(index, share);
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

void PlanRun::post(InFlightSegment& current, std::size_t step) {
  const RankSchedule::Step& messages = current.schedule->steps[step];
  current.tickets.clear();
  current.peers.clear();
  for (const RankSchedule::Message& message : messages.receives) {
    const auto [offset, size] = message.parts[0];
    current.tickets.push_back(hierarchy_.post_receive(message.peer, {at(current, offset), size}));
    current.peers.push_back(message.peer);
  }
  for (const RankSchedule::Message& message : messages.sends) {
    spans_.clear();
    for (const auto [offset, size] : message.parts) spans_.push_back({source_at(current, offset), size});
    current.tickets.push_back(hierarchy_.post_send(message.peer, spans_));
    current.peers.push_back(message.peer);
  }
}

void PlanRun::await(InFlightSegment& current) {
  if (current.tickets.empty()) return;
  check(hierarchy_.wait(current.tickets, waiting_), &current);
  current.tickets.clear();
}

void PlanRun::add(const InFlightSegment& current, const RankSchedule::Join& join) {
  for (const RankSchedule::Sum& output : join.outputs) {
    parts_.clear();
    for (const RankSchedule::Sum& input : join.inputs)
      if (is_part(input.node, output.node)) parts_.push_back({input.node, source_at(current, input.offset)});
    std::byte* const to = at(current, output.offset);
    if (rounded_)
      rounded_->join(parts_, output.node, to, join.range.size());
    else
      sums_.join(parts_, output.node, to, join.range.size());
  }
}

void PlanRun::check(const WaitResult& result, const InFlightSegment* current) const {
  if (result.ok()) return;
  int late = result.peer;
  if (current != nullptr && result.outcome == WaitResult::Outcome::kTimeout)
    for (std::size_t index = current->tickets.size(); index-- > 0;)
      if (!hierarchy_.done(current->tickets[index])) late = current->peers[index];
  exchange_.throw_in_progress(call_, result, late);
}

namespace {

PlanRun::Members all_members(const Exchange& exchange) {
  return {exchange.transport().hierarchy()->host_ranks(), exchange.size()};
}

/// `request`: but for the count.
void run_allreduce(Exchange& exchange, const OperationCall& call, const Operation& first,
                   const PieceList& pieces, PlanCache::Request request, std::size_t full,
                   PlanRun::Members members) {
  Transport& transport = exchange.transport();
  const std::size_t bytes = pieces.bytes();
  std::vector<PlanRun::Segment> segments;
  for (std::size_t index = 0; index < segment_count(bytes, full); ++index) {
    const Range range = segment_range(bytes, full, index);
    if (index > 0 && range.size() == full) {
      segments.push_back({range, segments.front().schedule});
      continue;
    }
    request.count = range.size() / first.element_size();
    segments.push_back({range, exchange.plans().schedule(transport, request)});
  }
  PlanRun(exchange, call, first, pieces, Collective::kAllreduce, std::move(segments), members).run();
}

}  // namespace

void allreduce_by_plan(Exchange& exchange, const OperationCall& call, std::span<Operation* const> operations,
                       const PieceList& pieces, const CrossingAlgorithm& algorithm) {
  const Operation& first = *operations[0];
  const std::size_t staging_bytes = exchange.transport().hierarchy()->staging_bytes();
  run_allreduce(exchange, call, first, pieces,
                {.dtype = PlanRun::carried_dtype(first),
                 .rounded = is_rounded(first.descriptor.key.comm_dtype),
                 .order = first.descriptor.key.order,
                 .mode = algorithm.mode},
                plan_segment_bytes(pieces.bytes(), staging_bytes, algorithm.segment), all_members(exchange));
}

void allreduce_across_hosts(Exchange& exchange, const OperationCall& call, const Operation& operation,
                            std::byte* memory, std::size_t bytes, Mode mode) {
  if (bytes == 0) return;
  Hierarchy& hierarchy = *exchange.transport().hierarchy();
  const int ranks = static_cast<int>(hierarchy.host_ranks().size());
  if (!mode.empty()) mode.front() = {1};
  Operation whole;
  whole.descriptor = operation.descriptor;
  whole.pieces = {{memory, memory, bytes}};
  Operation* const operations[] = {&whole};
  const int self[] = {exchange.rank()};
  run_allreduce(exchange, call, whole, PieceList(operations),
                {.dtype = PlanRun::carried_dtype(operation),
                 .rounded = is_rounded(operation.descriptor.key.comm_dtype),
                 .order = Order::kAny,
                 .mode = std::move(mode),
                 .across_hosts = true},
                plan_segment_bytes(bytes, hierarchy.staging_bytes()), {self, exchange.size() / ranks});
}

void run_blocks(Exchange& exchange, const OperationCall& call, const Operation& operation,
                Collective collective, std::span<const Piece> blocks, const CrossingAlgorithm& algorithm) {
  Transport& transport = exchange.transport();
  Operation whole;
  whole.descriptor = operation.descriptor;
  whole.is_widened = operation.is_widened;
  if (!adds(collective)) {  // of bytes: nothing is added
    whole.descriptor.dtype = DType::kUInt8;
    whole.descriptor.key.order = Order::kAny;
  }
  const std::size_t element = whole.element_size();
  std::vector<std::size_t> sizes;
  for (const Piece& block : blocks) sizes.push_back(block.bytes);
  std::vector<PlanRun::Segment> segments;
  const std::vector<int>& order = exchange.plans().block_order(transport);
  PlanCache::Request request{.dtype = whole.dtype(),
                             .order = whole.descriptor.key.order,
                             .mode = algorithm.mode,
                             .collective = collective,
                             .blocks = std::vector<std::size_t>(sizes.size())};
  std::size_t begin = 0;
  const std::vector<Range> parts =
      block_segments(sizes, transport.hierarchy()->staging_bytes(), algorithm.segment);
  if (parts.empty())
    throw_usage("MULTIRING_STAGING_BYTES is too small for the blocks of " + std::to_string(sizes.size()) +
                " ranks by " + algorithm_name(algorithm));
  std::shared_ptr<const RankSchedule> schedule;
  for (const Range part : parts) {
    std::size_t end = begin;
    for (const int rank : order) {
      const auto index = static_cast<std::size_t>(rank);
      const Piece& block = blocks[index];
      const Range taken = intersect(part, {0, block.bytes});
      if (request.blocks[index] != taken.size() / element) schedule = nullptr;  // another one
      request.blocks[index] = taken.size() / element;
      end += taken.size();
      if (taken.empty()) continue;
      whole.pieces.push_back({block.input == nullptr ? nullptr : block.input + taken.begin,
                              block.output == nullptr ? nullptr : block.output + taken.begin, taken.size()});
    }
    if (schedule == nullptr) schedule = exchange.plans().schedule(transport, request);
    segments.push_back({{begin, end}, schedule});
    begin = end;
  }
  Operation* const operations[] = {&whole};
  const PieceList pieces(operations);
  PlanRun(exchange, call, whole, pieces, collective, std::move(segments), all_members(exchange)).run();
}

}  // namespace multiring
