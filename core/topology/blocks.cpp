#include "topology/blocks.h"

#include <algorithm>

namespace multiring {
namespace {

std::size_t most_ranks(const Cluster& cluster) {
  std::size_t most = 0;
  for (const Host& host : cluster.hosts) most = std::max(most, host.ranks.size());
  return most;
}

/// The first column of the rank with this local rank on a host of `ranks`; of the number after the last, the
/// number of columns.
std::size_t first_column(std::size_t local_rank, std::size_t ranks, std::size_t columns) {
  return local_rank * columns / ranks;
}

/// Calls visit(column, rank) in the order of the blocks.
template <class Visit>
void for_each_block(const Cluster& cluster, const Visit& visit) {
  const std::size_t columns = most_ranks(cluster);
  std::vector<std::size_t> next(cluster.hosts.size(), 0);  // local rank on each host
  for (std::size_t column = 0; column < columns; ++column)
    for (std::size_t number = 0; number < next.size(); ++number) {
      const std::vector<int>& ranks = cluster.hosts[number].ranks;
      if (next[number] == ranks.size() || first_column(next[number], ranks.size(), columns) != column)
        continue;
      visit(column, ranks[next[number]++]);
    }
}

}  // namespace

std::vector<int> Blocks::order(const Cluster& cluster) {
  std::vector<int> ranks;
  for_each_block(cluster, [&](std::size_t, int rank) { ranks.push_back(rank); });
  return ranks;
}

Blocks::Blocks(const Cluster& cluster, std::span<const std::size_t> sizes)
    : ranges_(sizes.size()), column_of_(sizes.size()) {
  std::size_t begin = 0;
  for_each_block(cluster, [&](std::size_t column, int rank) {
    if (column == column_begins_.size()) column_begins_.push_back(begin);
    const auto index = static_cast<std::size_t>(rank);
    column_of_[index] = column;
    ranges_[index] = {begin, begin + sizes[index]};
    begin += sizes[index];
  });
  column_begins_.push_back(begin);
}

std::vector<Range> Blocks::shares(const Host& host) const {
  std::vector<Range> found;
  for (std::size_t local_rank = 0; local_rank < host.ranks.size(); ++local_rank)
    found.push_back({column_begins_[first_column(local_rank, host.ranks.size(), columns())],
                     column_begins_[first_column(local_rank + 1, host.ranks.size(), columns())]});
  return found;
}

int Blocks::carrier(const Host& host, int rank) const {
  const std::size_t column = column_of_[static_cast<std::size_t>(rank)];
  // The last one whose first column is not behind it.
  return host.ranks[((column + 1) * host.ranks.size() - 1) / columns()];
}

}  // namespace multiring
