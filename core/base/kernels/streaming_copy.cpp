#include "base/kernels/streaming_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace multiring {

#if defined(__SSE2__)

namespace {

constexpr std::size_t kLine = 64;

void stream_line(std::byte* to, const std::byte* from) {
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(source);
  const __m128i b = _mm_loadu_si128(source + 1);
  const __m128i c = _mm_loadu_si128(source + 2);
  const __m128i d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(target, a);
  _mm_stream_si128(target + 1, b);
  _mm_stream_si128(target + 2, c);
  _mm_stream_si128(target + 3, d);
}

}  // namespace

void copy_streaming(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  // Streaming stores need aligned lines, written whole.
  std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine;
  if (head > bytes) head = bytes;
  if (head > 0) std::memcpy(target, source, head);
  std::size_t done = head;
  for (; done + kLine <= bytes; done += kLine) stream_line(target + done, source + done);
  _mm_sfence();  // streaming stores are not ordered with the stores that notify peers
  if (done < bytes) std::memcpy(target + done, source + done, bytes - done);
}

#else

void copy_streaming(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#endif

}  // namespace multiring
