#include "base/arithmetic/kernels/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>

#include "base/cache.h"
#endif

namespace multiring {

#if defined(__SSE2__)

namespace {

struct Line {
  __m128i a, b, c, d;
};

Line load_line(const std::byte* from) {
  const auto* source = reinterpret_cast<const __m128i*>(from);
  return {_mm_loadu_si128(source), _mm_loadu_si128(source + 1), _mm_loadu_si128(source + 2),
          _mm_loadu_si128(source + 3)};
}

void store_line(std::byte* to, const Line& line) {
  auto* target = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(target, line.a);
  _mm_storeu_si128(target + 1, line.b);
  _mm_storeu_si128(target + 2, line.c);
  _mm_storeu_si128(target + 3, line.d);
}

void stream_line(std::byte* to, const Line& line) {
  auto* target = reinterpret_cast<__m128i*>(to);
  _mm_stream_si128(target, line.a);
  _mm_stream_si128(target + 1, line.b);
  _mm_stream_si128(target + 2, line.c);
  _mm_stream_si128(target + 3, line.d);
}

/// Whether `rep movsb`, with which glibc copies more than about 2 KiB on processors that have fast string
/// operations, would be 15 times as slow as it is elsewhere: on AMD's Zen 3 it is where the target lies 1 to
/// 31 bytes behind the source, pages left aside, as a large array, 16 bytes behind a page's begin by malloc's
/// header, lies to staging memory (measured; similar reports: sourceware.org/bugzilla, 30994).
bool slow_for_string_operations(const void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kSmallest = 2048;
  constexpr std::uintptr_t kPage = 4096;
  constexpr std::uintptr_t kSlow = 32;
  const std::uintptr_t distance =
      (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % kPage;
  return bytes > kSmallest && distance > 0 && distance < kSlow;
}

}  // namespace

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  std::size_t done = 0;
  if (slow_for_string_operations(to, from, bytes)) {
    for (; done + kCacheLine <= bytes; done += kCacheLine)
      store_line(target + done, load_line(source + done));
  }
  if (done < bytes) std::memcpy(target + done, source + done, bytes - done);
}

void copy_streaming(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  // Streaming stores need aligned lines, written whole.
  std::size_t head = (kCacheLine - reinterpret_cast<std::uintptr_t>(target) % kCacheLine) % kCacheLine;
  if (head > bytes) head = bytes;
  if (head > 0) std::memcpy(target, source, head);
  std::size_t done = head;
  for (; done + kCacheLine <= bytes; done += kCacheLine) stream_line(target + done, load_line(source + done));
  _mm_sfence();  // streaming stores are not ordered with the stores that notify peers
  if (done < bytes) std::memcpy(target + done, source + done, bytes - done);
}

#else

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void copy_streaming(void* to, const void* from, std::size_t bytes) { copy_bytes(to, from, bytes); }

#endif

}  // namespace multiring
