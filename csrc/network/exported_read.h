// How one worker reads a segment of another from the memory that the other shows. The reader does
// so itself on one machine; between machines a thread of the other worker does it for the reader.
#pragma once

#include <atomic>

#include "memory/shared_memory.h"
#include "network/frames.h"
#include "transport/location_table.h"
#include "transport/progress.h"

namespace shoal::network {

// What a worker shows its peers: how far it is, and where its segments are.
struct ShownMemory {
  transport::Progress* progress;
  const transport::LocationTable* locations;
  std::span<const std::byte> arena;  // empty: the device's memory cannot be read
  std::span<const std::byte> host;

  bool isPast(uint64_t sequence) const { return transport::isDone(*progress, sequence); }
};

// Waits with `await(sequence)` until the worker is far enough, as early as possible, and calls
// `copy(from)`. The segment is valid from message `written` on, and kept from `exported` on. A
// second call of `copy` replaces the first. Returns false if there is no such segment.
template <typename Await, typename Copy>
bool readExported(const ShownMemory& shown, const ReadRequest& request, const Await& await,
                  const Copy& copy) {
  const uint32_t slot = wire::slotOf(request.base);
  const auto copyFrom = [&](uint64_t word) {
    const std::byte* from = transport::LocationTable::find(word, request.offset, request.bytes,
                                                           shown.arena, shown.host);
    if (from != nullptr) copy(from);
    return from != nullptr;
  };
  await(request.written);
  // Until the export, the slot's word is about this segment. The worker may move it meanwhile.
  const uint64_t word = shown.locations->word(slot);
  if (!shown.isPast(request.exported) && copyFrom(word)) {
    std::atomic_thread_fence(std::memory_order_acquire);
    if (shown.locations->word(slot) == word) return true;
  }
  await(request.exported);
  return copyFrom(shown.locations->noted(request.exported));
}

}  // namespace shoal::network
