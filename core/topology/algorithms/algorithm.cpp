#include "topology/algorithms/algorithm.h"

namespace multiring {

const AlgorithmTraits& traits_of(Algorithm algorithm) {
  static constexpr const AlgorithmTraits* kTraits[] = {
#define MULTIRING_ALGORITHM(name) &k##name##Traits,
#include "topology/algorithms/algorithms.inc"
  };
  return *kTraits[static_cast<std::size_t>(algorithm)];
}

std::string algorithm_letters(std::optional<Phase> phase) {
  std::string text;
  for (const Algorithm algorithm : kAllAlgorithms) {
    const AlgorithmTraits& traits = traits_of(algorithm);
    if (phase && traits.reducing_phase != *phase) continue;
    text += (text.empty() ? "" : ", ") + std::string(1, traits.letter) + " " + traits.name;
  }
  return text;
}

}  // namespace multiring
