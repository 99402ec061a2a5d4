// Copies between host memories, for the sizes that tensors have.
#pragma once

#include <cstddef>

namespace shoal::memory {

// memcpy for small sizes. From some MiB on it writes around the cache: the destination's lines are
// not read first, and the speed does not depend on how the two addresses lie to each other (glibc's
// own path for such sizes is four times slower where the destination lies shortly behind the source
// within a page, as a heap block does to a page-aligned segment).
void copyBytes(void* to, const void* from, size_t bytes) noexcept;

}  // namespace shoal::memory
