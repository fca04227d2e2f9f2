#include "errors.h"

#include <cstring>
#include <deque>
#include <mutex>

#include "base/text.h"

namespace multiring::jax_collectives {
namespace {

constexpr std::size_t kTextBytes = 1024;  // MPI_MAX_ERROR_STRING of MPItrampoline
constexpr std::size_t kKept = 256;

struct Kept {
  std::mutex mutex;  // guards all below
  std::deque<std::string> texts;
  int first = 1;  // number of texts.front()
};

Kept& kept() {
  static auto* const only = new Kept;  // never destroyed: XLA's threads may outlive the statics
  return *only;
}

}  // namespace

int keep_error(const std::string& text) {
  Kept& all = kept();
  const std::lock_guard lock(all.mutex);
  all.texts.push_back(text);
  if (all.texts.size() > kKept) {
    all.texts.pop_front();
    ++all.first;
  }
  return all.first + static_cast<int>(all.texts.size()) - 1;
}

int keep_error(const mr_error& error) {
  char text[kTextBytes];
  mr_error_text(&error, text, sizeof text);
  return keep_error(std::string(text));
}

int error_text(int code, char* text, int* length) {
  Kept& all = kept();
  const std::lock_guard lock(all.mutex);
  const int index = code - all.first;
  const bool known = index >= 0 && index < static_cast<int>(all.texts.size());
  copy_cut(*reinterpret_cast<char (*)[kTextBytes]>(text),
           known ? all.texts[static_cast<std::size_t>(index)] : "multiring: unknown error");
  *length = static_cast<int>(std::strlen(text));
  return 0;
}

}  // namespace multiring::jax_collectives
