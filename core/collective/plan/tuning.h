#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "topology/cluster.h"
#include "topology/dimensions.h"

namespace multiring {

/// How an allreduce crosses hosts.
struct Way {
  bool rounds = false;      ///< what every rank has goes to every host whole, in place of a plan
  Mode mode;                ///< of the plan; empty: automatic
  std::size_t segment = 0;  ///< bytes of a segment of the plan, as far as staging memory has room; 0: chosen
};

/// Ways by size, as `multiring tune` has measured them on a cluster. Written in one line, as
/// `4x2:16384=rounds,1048576=2tx4d,67108864=auto/65536`: hosts x ranks on each (or the ranks of each host, as
/// `2+1`), then for every class the most bytes that are in it, the mode ("auto": automatic) or "rounds", and
/// bytes of a segment unless they are chosen. What is larger than all classes goes as the last one.
class MULTIRING_API Tuning {
 public:
  struct SizeClass {
    std::size_t up_to = 0;  ///< bytes
    Way way;
  };

  /// No classes.
  Tuning() = default;
  /// Raises a usage error that shows the text and what is wrong with it.
  static Tuning parse(std::string_view text);

  /// Hosts and ranks that it was measured on, as written.
  const std::string& layout() const { return layout_; }
  const std::vector<SizeClass>& classes() const { return classes_; }
  /// Of an allreduce of so many bytes; null: there are no classes.
  const Way* way(std::size_t bytes) const;

 private:
  std::string layout_;
  std::vector<SizeClass> classes_;
};

/// The hosts of a cluster as a tuning names them.
MULTIRING_API std::string layout_text(const Cluster& cluster);

}  // namespace multiring
