// Ranges in whole pages of the system, which are 4, 16 or 64 KiB.
#pragma once

#include <unistd.h>

#include <cstddef>

namespace shoal::memory {

struct PageRange {
  size_t offset, bytes;
  constexpr bool operator==(const PageRange&) const = default;
};

inline size_t systemPageBytes() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// The pages that lie wholly in a range. madvise() rejects a range that starts inside a page, and
// extends one that ends inside a page: if pages are larger than blocks, into a neighbor's block.
constexpr PageRange pagesWithin(size_t offset, size_t bytes, size_t page_bytes) {
  const size_t first = (offset + page_bytes - 1) / page_bytes * page_bytes;
  const size_t end = (offset + bytes) / page_bytes * page_bytes;
  return {first, end > first ? end - first : 0};
}
static_assert(pagesWithin(4096, 8192, 4096) == PageRange{4096, 8192});
static_assert(pagesWithin(4096, 8192, 16384) == PageRange{16384, 0});
static_assert(pagesWithin(0, 4096, 65536) == PageRange{0, 0});
static_assert(pagesWithin(61440, 65536 + 8192, 65536) == PageRange{65536, 65536});

}  // namespace shoal::memory
