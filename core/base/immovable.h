#pragma once

namespace multiring {

/// Base of what is neither copied nor moved, because others hold its address or it has to end once.
class Immovable {
 public:
  Immovable(const Immovable&) = delete;
  Immovable& operator=(const Immovable&) = delete;

 protected:
  Immovable() = default;
  ~Immovable() = default;
};

}  // namespace multiring
