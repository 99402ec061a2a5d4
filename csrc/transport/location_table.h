// The segment location table: a worker publishes in shared memory where each segment is, so that
// the other devices of the lease read it without a message. It has one word per slot of the address
// space. Only the pages that are touched cost memory.
//
//   63       62..48        47..0
//   host  |  version  |  offset + 1        0: the segment is not in this device's memory
//
// The offset counts in the worker's arena, or, with the host bit, in the client's host region. The
// version changes with every change of the word: if a reader finds the same word before and after
// its copy, it has copied the segment.
//
// The stream may free a segment, and use its slot again, before a slow reader comes. So every
// export notes where the segment was, under its own sequence number. The worker keeps the memory
// and the note until the reader is past.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "wire/address.h"

namespace shoal::transport {

struct ExportNote {
  std::atomic<uint64_t> sequence;  // of the export; published after `place`
  std::atomic<uint64_t> place;     // a word as above
};

inline constexpr size_t kExportNotes = 1 << 14;
inline constexpr size_t kPlacesBytes =
    size_t{wire::kSlotsMax} * 8 + kExportNotes * sizeof(ExportNote);
inline constexpr uint64_t kPlaceInHost = uint64_t{1} << 63;
inline constexpr int kPlaceVersionShift = 48;
inline constexpr uint64_t kPlaceOffsetMask = (uint64_t{1} << kPlaceVersionShift) - 1;
inline constexpr uint64_t kPlaceVersionMask = ~(kPlaceOffsetMask | kPlaceInHost);

class Places {
 public:
  explicit Places(std::byte* region)
      : words_(reinterpret_cast<std::atomic<uint64_t>*>(region)),
        notes_(reinterpret_cast<ExportNote*>(region + size_t{wire::kSlotsMax} * 8)) {}

  void note(uint64_t sequence, uint32_t slot) {
    ExportNote& note = notes_[sequence % kExportNotes];
    note.place.store(word(slot), std::memory_order_relaxed);
    note.sequence.store(sequence, std::memory_order_release);
  }
  // Notes a copy in the arena that exists for this export alone.
  void noteAt(uint64_t sequence, uint64_t offset) {
    ExportNote& note = notes_[sequence % kExportNotes];
    note.place.store(offset + 1, std::memory_order_relaxed);
    note.sequence.store(sequence, std::memory_order_release);
  }
  // Where the segment of an export was; 0 if there is no such note.
  uint64_t noted(uint64_t sequence) const {
    const ExportNote& note = notes_[sequence % kExportNotes];
    if (note.sequence.load(std::memory_order_acquire) != sequence) return 0;
    return note.place.load(std::memory_order_relaxed);
  }

  void set(uint32_t slot, bool in_host, uint64_t offset) {
    store(slot, (in_host ? kPlaceInHost : 0) | (offset + 1));
  }
  void clear(uint32_t slot) { store(slot, 0); }
  uint64_t word(uint32_t slot) const { return words_[slot].load(std::memory_order_acquire); }

  static bool present(uint64_t word) { return (word & kPlaceOffsetMask) != 0; }
  static bool inHost(uint64_t word) { return (word & kPlaceInHost) != 0; }
  static uint64_t offset(uint64_t word) { return (word & kPlaceOffsetMask) - 1; }

 private:
  void store(uint32_t slot, uint64_t place) {
    const uint64_t before = words_[slot].load(std::memory_order_relaxed);
    const uint64_t version = (before + (uint64_t{1} << kPlaceVersionShift)) & kPlaceVersionMask;
    words_[slot].store(version | place, std::memory_order_release);
  }

  std::atomic<uint64_t>* words_;
  ExportNote* notes_;
};

}  // namespace shoal::transport
