#include "collective/cluster_allreduce.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace multiring {
namespace {

constexpr std::size_t kCacheLine = 64;

// Fewer bytes should not be worth the messages of another segment. Estimated, as is the number below.
constexpr std::size_t kLeastSegment = 128 * 1024;
// With so many segments most of the time several are on their way.
constexpr std::size_t kSegments = 4;

DType carried_dtype(const Operation& operation) {
  const Wire wire = operation.descriptor.key.wire;
  return is_rounded(wire) ? wire_dtype(wire) : operation.dtype();
}

std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

ClusterAllreduce::ClusterAllreduce(Exchange& exchange, const Call& call,
                                   std::span<Operation* const> operations, const PieceList& pieces,
                                   Hierarchy& hierarchy)
    : exchange_(exchange),
      call_(call),
      pieces_(pieces),
      hierarchy_(hierarchy),
      mates_(hierarchy.host_ranks()),
      place_(static_cast<int>(std::ranges::find(mates_, exchange.rank()) - mates_.begin())),
      sums_(operations[0]->dtype(), operations[0]->reduction(), exchange.size()),
      carried_(carried_dtype(*operations[0])),
      element_(operations[0]->element_size()),
      carried_element_(dtype_size(carried_)),
      bytes_(pieces.bytes()),
      waiting_(call.waiting) {
  waiting_.brief = true;  // all are in the operation
  const bool rounded = is_rounded(operations[0]->descriptor.key.wire);
  if (rounded) rounded_.emplace(carried_, operations[0]->reduction(), exchange.size());
  PlanCache& plans = exchange.plans();
  const Way* const given = plans.way(bytes_, rounded);
  const Way way = given != nullptr ? *given : Way{};
  divide(way.segment);
  const Range last = segment(segments_ - 1);
  full_ = plans.schedule(exchange.transport(), segment_bytes_ / element_, carried_, rounded, way.mode);
  last_ = plans.schedule(exchange.transport(), last.size() / element_, carried_, rounded, way.mode);
  rounds_ = full_->rounds.size();
  flights_.resize(std::min(segments_, rounds_ * kRest + 1));
  const std::size_t place = std::max(full_->bytes, last_->bytes);
  workspace_ = plans.workspace(place * flights_.size());
  for (std::size_t index = 0; index < flights_.size(); ++index)
    flights_[index].memory = workspace_->data() + index * place;
}

// What has been posted and not waited for is of an operation that failed: its memory may go.
ClusterAllreduce::~ClusterAllreduce() {
  const bool failed = std::ranges::any_of(flights_, [](const Flight& each) { return !each.tickets.empty(); });
  if (failed) hierarchy_.keep(workspace_);
  for (const Flight& flight : flights_)
    if (!flight.tickets.empty()) hierarchy_.give_up(flight.tickets);
}

/// Segments of about the same size, at most `wanted` unless that is 0. Staging memory has to hold one, and a
/// share of the results of another.
void ClusterAllreduce::divide(std::size_t wanted) {
  const std::size_t most = hierarchy_.staging_bytes() / 2 / kCacheLine * kCacheLine;
  std::size_t bytes = wanted > 0 ? std::clamp(round_up(wanted, kCacheLine), std::min(kCacheLine, most), most)
                                 : std::clamp(bytes_ / kSegments, std::min(kLeastSegment, most), most);
  const std::size_t count = segment_count(bytes_, bytes);
  bytes = round_up((bytes_ + count - 1) / count, kCacheLine);
  segment_bytes_ = std::min({bytes, most, bytes_});
  segments_ = segment_count(bytes_, segment_bytes_);
}

void ClusterAllreduce::connect() {
  std::set<int> peers;
  for (const RankSchedule* schedule : {full_.get(), last_.get()})
    for (const RankSchedule::Round& round : schedule->rounds)
      for (const auto* messages : {&round.sends, &round.receives})
        for (const RankSchedule::Message& message : *messages) peers.insert(message.peer);
  const std::vector<int> all(peers.begin(), peers.end());
  check(hierarchy_.connect(all, waiting_), nullptr);
}

void ClusterAllreduce::run() {
  connect();
  const std::size_t turns = segments_ + rounds_ * kRest;
  for (std::size_t turn = 0; turn < turns; ++turn) {
    advance(turn);
    meet(turn);
  }
}

void ClusterAllreduce::advance(std::size_t turn) {
  // The oldest first: the others of its messages were posted before.
  for (std::size_t round = rounds_; round-- > 0;) {
    const std::size_t rested = (round + 1) * kRest;
    if (turn < rested || turn - rested >= segments_) continue;
    Flight& current = flight(turn - rested);
    await(current);
    for (const RankSchedule::Join& join : current.schedule->rounds[round].joins) add(current, join);
    if (round + 1 < rounds_) post(current, round + 1);
  }
}

void ClusterAllreduce::meet(std::size_t turn) {
  const std::size_t rested = rounds_ * kRest;
  const bool starts = turn < segments_;
  const bool ends = turn >= rested;
  if (mates_.size() > 1 && (starts || ends)) {
    if (starts) stage(turn);
    if (ends) publish(turn - rested);
    check(hierarchy_.synchronise(waiting_), nullptr);
  }
  // The last to land makes room for the first that starts.
  if (ends) take(turn - rested);
  if (starts) start(turn);
}

void ClusterAllreduce::stage(std::size_t index) {
  pieces_.read(staged_, segment(index), hierarchy_.staging(place_));
}

void ClusterAllreduce::publish(std::size_t index) {
  const Flight& landed = flight(index);
  const RankSchedule& schedule = *landed.schedule;
  if (schedule.share.empty()) return;
  std::memcpy(hierarchy_.staging(place_) + segment_bytes_, landed.memory + schedule.result,
              schedule.share.size() * carried_element_);
}

/// Adds this rank's share of what its host has staged, and sends it on.
void ClusterAllreduce::start(std::size_t index) {
  Flight& current = flight(index);
  current.schedule = index + 1 == segments_ ? last_.get() : full_.get();
  const RankSchedule& schedule = *current.schedule;
  if (mates_.size() == 1) {
    contribute(index, current.memory + schedule.host_sums[0].offset);
    return post(current, 0);
  }
  for (const RankSchedule::Sum& sum : schedule.host_sums) {
    parts_.clear();
    inputs_.clear();
    for (std::size_t place = 0; place < mates_.size(); ++place) {
      const int rank = mates_[place];
      if (rank < sum.node.begin || rank >= sum.node.end) continue;
      const std::byte* const staged = hierarchy_.staged(static_cast<int>(place));
      inputs_.push_back(staged + schedule.share.begin * element_);
      parts_.push_back({{rank, rank + 1}, inputs_.back()});
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
  if (!rounded_) return pieces_.read(staged_, segment(index), to);
  pieces_.for_each_share(staged_, segment(index),
                         [&](const Piece& piece, std::size_t offset, std::size_t place, std::size_t bytes) {
                           const std::byte* const inputs[] = {piece.input + offset};
                           rounded_->contribute(inputs, to + place / element_ * carried_element_,
                                                bytes / element_);
                         });
}

/// Writes the results of a segment to where they belong.
void ClusterAllreduce::take(std::size_t index) {
  const Flight& landed = flight(index);
  const RankSchedule& schedule = *landed.schedule;
  const std::size_t begin = segment(index).begin;
  for (std::size_t place = 0; place < mates_.size(); ++place) {
    const Range share = schedule.host_shares[place];
    const std::byte* const results = static_cast<int>(place) == place_
                                         ? landed.memory + schedule.result
                                         : hierarchy_.staged(static_cast<int>(place)) + segment_bytes_;
    const Range range{begin + share.begin * element_, begin + share.end * element_};
    if (!rounded_) {
      pieces_.write(taken_, range, results);
      continue;
    }
    pieces_.for_each_share(taken_, range,
                           [&](const Piece& piece, std::size_t offset, std::size_t at, std::size_t bytes) {
                             rounded_->restore(results + at / element_ * carried_element_,
                                               piece.output + offset, bytes / element_);
                           });
  }
}

void ClusterAllreduce::post(Flight& current, std::size_t round) {
  const RankSchedule::Round& messages = current.schedule->rounds[round];
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

void ClusterAllreduce::await(Flight& current) {
  if (current.tickets.empty()) return;
  check(hierarchy_.wait(current.tickets, waiting_), &current);
  current.tickets.clear();
}

void ClusterAllreduce::add(const Flight& current, const RankSchedule::Join& join) {
  for (const RankSchedule::Sum& output : join.outputs) {
    parts_.clear();
    for (const RankSchedule::Sum& input : join.inputs)
      if (output.node.begin <= input.node.begin && input.node.end <= output.node.end)
        parts_.push_back({input.node, current.memory + input.offset});
    std::byte* const to = current.memory + output.offset;
    if (rounded_)
      rounded_->join(parts_, output.node, to, join.range.size());
    else
      sums_.join(parts_, output.node, to, join.range.size());
  }
}

void ClusterAllreduce::check(const WaitResult& result, const Flight* current) const {
  if (result.ok()) return;
  int late = result.peer;
  if (current != nullptr && result.outcome == WaitResult::Outcome::kTimeout)
    for (std::size_t index = current->tickets.size(); index-- > 0;)
      if (!hierarchy_.done(current->tickets[index])) late = current->peers[index];
  exchange_.throw_on_the_way(call_, result, late);
}

}  // namespace multiring
