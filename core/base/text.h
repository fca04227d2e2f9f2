#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace multiring {

/// The length of the longest beginning of a text (UTF-8) that has at most `limit` bytes and ends between two
/// characters.
inline std::size_t cut_length(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return text.size();
  constexpr std::size_t kLongestCharacter = 4;
  for (std::size_t back = 0; back < kLongestCharacter && back <= limit; ++back)
    if ((static_cast<unsigned char>(text[limit - back]) & 0xC0U) != 0x80U) return limit - back;
  return limit;  // no UTF-8
}

/// Copies as much of `text` as fits, and a zero.
template <std::size_t Bytes>
void copy_cut(char (&to)[Bytes], std::string_view text) {
  const std::size_t length = cut_length(text, Bytes - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

inline std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

/// "1.5 s"
inline std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

/// The beginning of a message that says what has happened, without what to do.
inline std::string first_sentence(const std::string& text) {
  std::size_t end = text.size();
  for (const char* mark : {". ", "; ", "\n"}) end = std::min(end, text.find(mark));
  return text.substr(0, end);
}

/// How a warning of a long wait ends.
inline constexpr const char* kHowToSilence =
    "; set MULTIRING_STALL_WARNING to change or silence this warning";

/// "rank 3" or "ranks 0-2, 5". `ranks` in ascending order.
inline std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
    if (last > i) text += (last > i + 1 ? "-" : ", ") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace multiring
