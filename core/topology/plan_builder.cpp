#include "topology/plan_builder.h"

#include <algorithm>
#include <map>
#include <utility>

#include "topology/stripes.h"

namespace multiring {
std::vector<Step> PlanBuilder::build() {
  if (plan_.count() == 0) return {};
  if (plan_.blocks())
    reduce_to_carriers();
  else
    reduce_within_hosts();
  divide_into_stripes();
  for (int dimension = 1; dimension < static_cast<int>(plan_.mode().size()); ++dimension)
    reduce_across(dimension);
  const auto reducing = static_cast<std::ptrdiff_t>(steps_.size());
  if (plan_.collective() != Collective::kReduceScatter) add_return_steps();
  if (!adds(plan_.collective())) steps_.erase(steps_.begin(), steps_.begin() + reducing);
  return std::move(steps_);
}

void PlanBuilder::reduce_within_hosts() {
  const std::vector<Host>& hosts = plan_.cluster().hosts;
  const Algorithm algorithm = *plan_.mode().front().algorithm;
  const Phase phase = traits_of(algorithm).reducing_phase;
  Step step{phase, 0, algorithm, {}, {}};
  for (const Host& host : hosts) {
    if (host.ranks.size() > 1)
      step.groups.push_back({host.ranks, {0, plan_.count()}, -1, step.holdings.size()});
    for (const int rank : host.ranks) step.holdings.push_back(plan_.holding({rank}));
  }
  if (!step.groups.empty()) steps_.push_back(std::move(step));
  if (phase == Phase::kReduceScatter) {
    cells_ = shared_cells();
    return;
  }
  cells_ = {{{0, plan_.count()}, -1, {}}};
  for (const Host& host : hosts) cells_[0].owners.push_back(host.ranks.front());
}

/// The same for blocks of ranks, each of which is a cell.
void PlanBuilder::reduce_to_carriers() {
  const std::vector<Host>& hosts = plan_.cluster().hosts;
  Step step{Phase::kReduceScatter, 0, Algorithm::kPairwise, {}, {}};
  for (const Host& host : hosts) {
    const std::vector<Range> shares = plan_.host_shares(host);
    for (std::size_t local = 0; local < shares.size(); ++local)
      if (shares.size() > 1 && !shares[local].empty())
        step.groups.push_back(
            {host.ranks, shares[local], -1, step.holdings.size(), false, static_cast<int>(local)});
    for (const int rank : host.ranks) step.holdings.push_back(plan_.holding({rank}));
  }
  if (!step.groups.empty()) steps_.push_back(std::move(step));
  const std::vector<int> host_of = plan_.cluster().host_of_rank();
  for (int rank = 0; rank < plan_.cluster().size(); ++rank) {
    Cell cell{plan_.blocks()->of(rank), -1, {}, false, host_of[static_cast<std::size_t>(rank)]};
    if (cell.range.empty()) continue;
    for (const Host& host : hosts) cell.owners.push_back(plan_.blocks()->carrier(host, rank));
    cells_.push_back(std::move(cell));
  }
}

/// Hosts with different numbers of ranks divide the elements differently. Each range that no host divides
/// further is a cell, so that every host is busy with all its ranks.
std::vector<PlanBuilder::Cell> PlanBuilder::shared_cells() const {
  const Range whole{0, plan_.count()};
  std::vector<std::size_t> ends;
  const auto share = [&](const Host& host, std::size_t local) {
    return plan_.share({host.ranks, whole, -1, 0}, local);
  };
  for (const Host& host : plan_.cluster().hosts)
    for (std::size_t local = 0; local < host.ranks.size(); ++local) ends.push_back(share(host, local).end);
  std::ranges::sort(ends);
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  std::vector<Cell> cells;
  std::vector<std::size_t> local(plan_.cluster().hosts.size(), 0);  // the owner of the cell on each host
  for (std::size_t begin = 0; const std::size_t end : ends) {
    if (end == begin) continue;
    Cell cell{{begin, end}, -1, {}};
    for (std::size_t number = 0; number < local.size(); ++number) {
      const Host& host = plan_.cluster().hosts[number];
      while (share(host, local[number]).end <= begin) ++local[number];
      cell.owners.push_back(host.ranks[local[number]]);
    }
    cells.push_back(std::move(cell));
    begin = end;
  }
  return cells;
}

void PlanBuilder::divide_into_stripes() {
  if (plan_.channels().empty()) return;
  std::vector<double> weights;
  for (const Channel& channel : plan_.channels()) weights.push_back(channel.bytes_per_second);
  std::vector<Cell> cells;
  for (const Cell& cell : cells_) {
    const std::vector<Range> stripes = stripe_ranges(cell.range, weights, plan_.granule());
    for (std::size_t channel = 0; channel < stripes.size(); ++channel)
      if (!stripes[channel].empty())
        cells.push_back({stripes[channel], static_cast<int>(channel), cell.owners, false, cell.owner});
  }
  cells_ = std::move(cells);
}

void PlanBuilder::reduce_across(int dimension) {
  const auto& [size, algorithm] = plan_.mode()[static_cast<std::size_t>(dimension)];
  if (size == 1) return;
  const auto group_size = static_cast<std::size_t>(size);
  const AlgorithmTraits& traits = traits_of(*algorithm);
  if (traits.both_directions && size > 2) divide_into_directions();
  Step step{traits.reducing_phase, dimension, *algorithm, {}, block_holdings(hosts_in_block_)};
  for (const Cell& cell : cells_) add_groups(step, cell, group_size);
  steps_.push_back(std::move(step));
  if (plan_.blocks()) return;  // all is where it belongs
  hosts_in_block_ *= group_size;
  std::vector<Cell> cells;
  for (const Cell& cell : cells_) {
    if (traits.reducing_phase == Phase::kReduceScatter) {
      for (Cell& part : divide(cell, group_size)) cells.push_back(std::move(part));
    } else {
      Cell first{cell.range, cell.channel, {}};
      for (std::size_t owner = 0; owner < cell.owners.size(); owner += group_size)
        first.owners.push_back(cell.owners[owner]);
      cells.push_back(std::move(first));
    }
  }
  cells_ = std::move(cells);
}

/// Half of the elements goes round in each direction: a link to a neighbour carries as much each way. Of a
/// block half of it, for each goes another part of the way round.
void PlanBuilder::divide_into_directions() {
  const std::vector<int> host_of = plan_.cluster().host_of_rank();
  const auto first_host = [&](const Cell& cell) { return host_of[static_cast<std::size_t>(cell.owners[0])]; };
  std::map<int, std::size_t> count;  // of the cells of the same hosts
  for (const Cell& cell : cells_) ++count[first_host(cell)];
  std::map<int, bool> next;
  std::vector<Cell> cells;
  for (const Cell& cell : cells_) {
    if (cell.owner < 0 && count[first_host(cell)] % 2 == 0) {
      bool& backward = next[first_host(cell)];
      cells.push_back({cell.range, cell.channel, cell.owners, backward});
      backward = !backward;
      continue;
    }
    for (const bool backward : {false, true}) {
      const Range half = aligned_block_range(cell.range.size(), 2, backward ? 1 : 0, plan_.granule());
      const Range range{cell.range.begin + half.begin, cell.range.begin + half.end};
      if (!range.empty()) cells.push_back({range, cell.channel, cell.owners, backward, cell.owner});
    }
  }
  cells_ = std::move(cells);
}

void PlanBuilder::add_groups(Step& step, const Cell& cell, std::size_t group_size) const {
  for (std::size_t first = 0; first < cell.owners.size(); first += group_size) {
    const auto begin = cell.owners.begin() + static_cast<std::ptrdiff_t>(first);
    step.groups.push_back({{begin, begin + static_cast<std::ptrdiff_t>(group_size)},
                           cell.range,
                           cell.channel,
                           first,
                           cell.backward,
                           cell.owner});
  }
}

/// The cells that a reduce-scatter in groups of neighbouring owners leaves.
std::vector<PlanBuilder::Cell> PlanBuilder::divide(const Cell& cell, std::size_t group_size) const {
  const Group any{std::vector<int>(group_size), cell.range, cell.channel, 0};
  std::vector<Cell> parts;
  for (std::size_t position = 0; position < group_size; ++position) {
    Cell part{plan_.share(any, position), cell.channel, {}};
    if (part.range.empty()) continue;
    for (std::size_t owner = position; owner < cell.owners.size(); owner += group_size)
      part.owners.push_back(cell.owners[owner]);
    parts.push_back(std::move(part));
  }
  return parts;
}

/// What the ranks that own cells of each block of hosts hold: the contributions of all ranks of the block.
std::vector<Holding> PlanBuilder::block_holdings(std::size_t hosts_in_block) const {
  const std::vector<Host>& hosts = plan_.cluster().hosts;
  std::vector<Holding> holdings;
  for (std::size_t first = 0; first < hosts.size(); first += hosts_in_block) {
    std::vector<int> ranks;
    for (std::size_t host = first; host < first + hosts_in_block; ++host)
      ranks.insert(ranks.end(), hosts[host].ranks.begin(), hosts[host].ranks.end());
    std::ranges::sort(ranks);
    holdings.push_back(plan_.holding(std::move(ranks)));
  }
  return holdings;
}

void PlanBuilder::add_return_steps() {
  for (std::size_t index = steps_.size(); index-- > 0;) {
    const Step& step = steps_[index];
    if (step.phase == Phase::kAllreduce) continue;
    const Phase phase = step.phase == Phase::kReduce ? Phase::kBroadcast : Phase::kAllGather;
    steps_.push_back({phase, step.dimension, step.algorithm, step.groups, {}});
  }
}

}  // namespace multiring
