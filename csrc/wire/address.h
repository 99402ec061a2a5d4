// A Shoal address: 64 bits, unique in the pool, minted by the client. `tensor.data_ptr()` is one.
//
//   63      62..52          51..30            29..0
//   0   |   session   |      slot      |     offset
//
// A segment (a torch storage) starts at offset 0 of a slot and owns as many consecutive slots as
// its size needs, so that any address resolves to its segment by one array look-up.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal::wire {

using Address = uint64_t;

inline constexpr int kOffsetBits = 30;
inline constexpr int kSlotBits = 22;
inline constexpr int kSessionBits = 11;
inline constexpr uint64_t kSlotBytes = uint64_t{1} << kOffsetBits;
inline constexpr uint32_t kSlotsMax = uint32_t{1} << kSlotBits;
inline constexpr uint32_t kSessionsMax = uint32_t{1} << kSessionBits;

// Session 0 and slot 0 are never used, so that no valid address is null.
inline constexpr Address makeAddress(uint32_t session, uint32_t slot) {
  return (Address{session} << (kSlotBits + kOffsetBits)) | (Address{slot} << kOffsetBits);
}
inline constexpr uint32_t sessionOf(Address address) {
  return static_cast<uint32_t>(address >> (kSlotBits + kOffsetBits));
}
inline constexpr uint32_t slotOf(Address address) {
  return static_cast<uint32_t>(address >> kOffsetBits) & (kSlotsMax - 1);
}
inline constexpr uint64_t slotsFor(uint64_t bytes) {
  return bytes == 0 ? 1 : (bytes - 1) / kSlotBytes + 1;
}

}  // namespace shoal::wire
