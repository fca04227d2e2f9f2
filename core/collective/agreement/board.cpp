#include "collective/agreement/board.h"

namespace multiring {

static_assert(sizeof(Descriptor) <= Rounds::kUserHeaderBytes);

void Board::begin(const Descriptor& descriptor) {
  ++round_;
  auto* header = reinterpret_cast<Descriptor*>(transport_.header(transport_.rank(), round_));
  *header = descriptor;
  header->round = round_;
}

std::vector<std::uint64_t> Board::rows() const {
  std::vector<std::uint64_t> rows;
  for (int rank = 0; rank < size_; ++rank) rows.push_back(of(rank).rows);
  return rows;
}

std::vector<int> Board::offered_devices() const {
  std::vector<int> devices;
  for (int rank = 0; rank < size_; ++rank) devices.push_back(of(rank).offered_device);
  return devices;
}

}  // namespace multiring
