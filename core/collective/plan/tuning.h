#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "topology/cluster.h"
#include "topology/dimensions.h"

namespace multiring {

/// How an allreduce across hosts runs.
struct AllreduceAlgorithm {
  bool staged = false;      ///< every rank's whole array goes to every host, without a plan ("rounds")
  Mode mode;                ///< of the plan; empty: automatic
  std::size_t segment = 0;  ///< bytes of a segment of the plan, as far as staging memory has room; 0: chosen
};

/// The algorithm for each size, as `multiring tune` has measured them on a cluster. Written in one line, as
/// `4x2:16384=rounds,1048576=2tx4d,67108864=auto/65536`: hosts x ranks on each (or the ranks of each host, as
/// `2+1`), then for every class its largest size in bytes, the mode ("auto": automatic) or "rounds" (staged),
/// and bytes of a segment unless chosen automatically. Larger sizes belong to the last class.
class MULTIRING_API Tuning {
 public:
  struct SizeClass {
    std::size_t up_to = 0;  ///< bytes
    AllreduceAlgorithm algorithm;
  };

  /// No classes.
  Tuning() = default;
  /// Raises a usage error that shows the text and what is wrong with it.
  static Tuning parse(std::string_view text);

  /// Hosts and ranks of the measurement, as written.
  const std::string& layout() const { return layout_; }
  const std::vector<SizeClass>& classes() const { return classes_; }
  /// For an allreduce of so many bytes; null: there are no classes.
  const AllreduceAlgorithm* algorithm(std::size_t bytes) const;

 private:
  std::string layout_;
  std::vector<SizeClass> classes_;
};

/// The hosts of a cluster as a tuning names them.
MULTIRING_API std::string layout_text(const Cluster& cluster);

}  // namespace multiring
