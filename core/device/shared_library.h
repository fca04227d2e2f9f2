#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/export.h"

namespace multiring {

/// A library that is opened at run time. One that is taken stays open: what was taken from it may be in use
/// to the end.
class MULTIRING_API SharedLibrary {
 public:
  /// Where a library may be.
  struct Candidate {
    std::string origin;            ///< "loaded by the process", "of a wheel", "of the system"
    std::string file;              ///< a path, or a name for the dynamic loader
    bool has_to_be_there = false;  ///< only a copy that the process has loaded already counts
  };
  /// Why a library cannot be used; empty: it can.
  using Refusal = std::function<std::string(const SharedLibrary&)>;

  /// In the order in which they are to be tried: the copy that the process has loaded (frameworks bring
  /// their own, and two in one process do not know of each other), files in the folders of wheels, the
  /// system's. `names`: file names, the best first. `wheel`: their folder within one of `sites`; empty: no
  /// wheel has them.
  static std::vector<Candidate> candidates(std::span<const std::string> names, const std::string& wheel,
                                           std::span<const std::string> sites);
  /// Before libraries are looked for: the folders that wheels are installed in; thread-safe. One of the
  /// system would stay in the place of the one that a framework comes with.
  static void look_in(std::vector<std::string> sites);
  static std::vector<std::string> known_sites();
  /// The first candidate that can be opened and is not refused; none, with a reason for each in `why`. What
  /// is refused is closed. Where it stays loaded all the same, because others in the process have it or it
  /// cannot be unloaded, no other candidate is opened beside it.
  static std::optional<SharedLibrary> open(std::span<const Candidate> candidates, const Refusal& refuse,
                                           std::string* why);

  /// A function by its name; null: there is none.
  void* find(const char* name) const;
  /// Has it stay loaded, though it be refused: once functions of it have run, it may have threads.
  void keep() const;
  const std::string& origin() const { return origin_; }
  /// Its file, as the dynamic loader has found it.
  std::string path() const;

 private:
  SharedLibrary(void* handle, std::string origin) : handle_(handle), origin_(std::move(origin)) {}

  void* handle_;
  std::string origin_;
};

/// Fills a table of functions; the first of them that the library lacks is told.
class FunctionFinder {
 public:
  explicit FunctionFinder(const SharedLibrary& library) : library_(library) {}
  template <class Function>
  void operator()(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(library_.find(name));
    if (*function == nullptr && missing_.empty()) missing_ = name;
  }
  const std::string& missing() const { return missing_; }

 private:
  const SharedLibrary& library_;
  std::string missing_;
};

}  // namespace multiring
