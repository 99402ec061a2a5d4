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
#include <span>

#include "wire/address.h"
#include "wire/cursor.h"

namespace shoal::transport {

struct ExportNote {
  std::atomic<uint64_t> sequence;  // of the export; published after `location`
  std::atomic<uint64_t> location;  // a word as above
};

inline constexpr size_t kExportNotes = 1 << 14;
inline constexpr size_t kLocationTableBytes =
    size_t{wire::kSlotsMax} * 8 + kExportNotes * sizeof(ExportNote);
inline constexpr uint64_t kLocationInHost = uint64_t{1} << 63;
inline constexpr int kLocationVersionShift = 48;
inline constexpr uint64_t kLocationOffsetMask = (uint64_t{1} << kLocationVersionShift) - 1;
inline constexpr uint64_t kLocationVersionMask = ~(kLocationOffsetMask | kLocationInHost);

class LocationTable {
 public:
  explicit LocationTable(std::byte* region)
      : words_(reinterpret_cast<std::atomic<uint64_t>*>(region)),
        notes_(reinterpret_cast<ExportNote*>(region + size_t{wire::kSlotsMax} * 8)) {}

  void note(uint64_t sequence, uint32_t slot) {
    ExportNote& note = notes_[sequence % kExportNotes];
    note.location.store(word(slot), std::memory_order_relaxed);
    note.sequence.store(sequence, std::memory_order_release);
  }
  // Notes a copy in the arena that exists for this export alone.
  void noteAt(uint64_t sequence, uint64_t offset) {
    ExportNote& note = notes_[sequence % kExportNotes];
    note.location.store(offset + 1, std::memory_order_relaxed);
    note.sequence.store(sequence, std::memory_order_release);
  }
  // Where the segment of an export was; 0 if there is no such note.
  uint64_t noted(uint64_t sequence) const {
    const ExportNote& note = notes_[sequence % kExportNotes];
    if (note.sequence.load(std::memory_order_acquire) != sequence) return 0;
    return note.location.load(std::memory_order_relaxed);
  }

  void set(uint32_t slot, bool in_host, uint64_t offset) {
    store(slot, (in_host ? kLocationInHost : 0) | (offset + 1));
  }
  void clear(uint32_t slot) { store(slot, 0); }
  uint64_t word(uint32_t slot) const { return words_[slot].load(std::memory_order_acquire); }

  static bool present(uint64_t word) { return (word & kLocationOffsetMask) != 0; }
  static bool inHost(uint64_t word) { return (word & kLocationInHost) != 0; }
  static uint64_t offset(uint64_t word) { return (word & kLocationOffsetMask) - 1; }
  // Where [offset, + bytes) is of the segment that `word` locates. Null if the segment is not in
  // memory that this process has mapped. Throws wire::ProtocolError if no memory is there.
  using Region = std::span<const std::byte>;  // empty: not mapped
  static const std::byte* find(uint64_t word, uint64_t offset, uint64_t bytes, Region arena,
                               Region host) {
    const Region region = inHost(word) ? host : arena;
    if (!present(word) || region.empty()) return nullptr;
    const uint64_t start = LocationTable::offset(word);
    if (start > region.size() || offset > region.size() - start ||
        bytes > region.size() - start - offset) {
      throw wire::ProtocolError("the location table names memory that does not exist");
    }
    return region.data() + start + offset;
  }

 private:
  void store(uint32_t slot, uint64_t location) {
    const uint64_t before = words_[slot].load(std::memory_order_relaxed);
    const uint64_t version =
        (before + (uint64_t{1} << kLocationVersionShift)) & kLocationVersionMask;
    words_[slot].store(version | location, std::memory_order_release);
  }

  std::atomic<uint64_t>* words_;
  ExportNote* notes_;
};

}  // namespace shoal::transport
