// Copies between host memories, for the sizes that tensors have.
#pragma once

#include <cstddef>

namespace shoal::memory {

// memcpy for small sizes. From some MiB on it writes around the cache, so it does not read the
// lines of the destination first, and its speed does not depend on the two addresses. (glibc is
// four times slower if the destination's offset in a page is just behind the source's, as with a
// heap block and a page-aligned segment.)
void copyBytes(void* to, const void* from, size_t bytes) noexcept;

}  // namespace shoal::memory
