#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "collective/descriptor.h"
#include "transport/transport.h"

namespace multiring {

/// The headers of all ranks in the round in progress: the full descriptors of what each one asks for.
///
/// A board is read for numbers that differ by rank, such as row counts and offsets, and for errors. A
/// decision that all ranks take together is a question to Agreement instead.
class MULTIRING_API Board : Immovable {
 public:
  explicit Board(Transport& transport) : transport_(transport), size_(transport.size()) {}

  int size() const { return size_; }
  std::uint64_t round() const { return round_; }
  /// Begins the next round, in which this rank asks for `descriptor`.
  void begin(const Descriptor& descriptor) {
    static_assert(sizeof(Descriptor) <= Rounds::kUserHeaderBytes);
    ++round_;
    auto* header = reinterpret_cast<Descriptor*>(transport_.header(transport_.rank(), round_));
    *header = descriptor;
    header->round = round_;
  }

  const Descriptor& of(int rank) const {
    return *reinterpret_cast<const Descriptor*>(transport_.header(rank, round_));
  }
  const Descriptor& mine() const { return of(transport_.rank()); }
  /// Returns the first rank for which `is(rank)` holds; -1: it holds for none.
  template <class Is>
  int find(const Is& is) const {
    for (int rank = 0; rank < size_; ++rank)
      if (is(rank)) return rank;
    return -1;
  }
  /// Returns a field of each rank's descriptor, by rank.
  template <class Field>
  std::vector<Field> each(Field Descriptor::* field) const {
    std::vector<Field> fields;
    for (int rank = 0; rank < size_; ++rank) fields.push_back(of(rank).*field);
    return fields;
  }
  /// Fills in the address of each rank's array in symmetric memory, moved on by `begin` bytes. `offset`: of
  /// the input, or of the output.
  template <class Pointer>
  void locate(const SymmetricRegion& region, std::uint64_t Descriptor::* offset, std::size_t begin,
              std::span<Pointer> pointers) const {
    for (int rank = 0; rank < size_; ++rank)
      pointers[static_cast<std::size_t>(rank)] = region.part(rank) + of(rank).*offset + begin;
  }

 private:
  Transport& transport_;
  const int size_;
  std::uint64_t round_ = 0;
};

}  // namespace multiring
