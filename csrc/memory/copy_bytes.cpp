#include "memory/copy_bytes.h"

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace shoal::memory {
namespace {

constexpr size_t kStreamedBytesMin = size_t{8} << 20;  // about what a core's cache share holds
constexpr size_t kLine = 64;

#ifdef __SSE2__
// `to` is aligned to a line; `bytes` is a multiple of it.
void copyLinesAroundCache(std::byte* to, const std::byte* from, size_t bytes) noexcept {
  for (size_t at = 0; at < bytes; at += kLine) {
    const auto* in = reinterpret_cast<const __m128i*>(from + at);
    auto* out = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();
}
#endif

}  // namespace

void copyBytes(void* to, const void* from, size_t bytes) noexcept {
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
#ifdef __SSE2__
  if (bytes >= kStreamedBytesMin) {
    const size_t head = (kLine - reinterpret_cast<size_t>(out) % kLine) % kLine;
    const size_t lines = (bytes - head) / kLine * kLine;
    std::memcpy(out, in, head);
    copyLinesAroundCache(out + head, in + head, lines);
    out += head + lines;
    in += head + lines;
    bytes -= head + lines;
  }
#endif
  std::memcpy(out, in, bytes);
}

}  // namespace shoal::memory
