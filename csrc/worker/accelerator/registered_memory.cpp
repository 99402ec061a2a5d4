#include "worker/accelerator/registered_memory.h"

namespace shoal::worker {

RegisteredMemory::~RegisteredMemory() {
  for (const auto& [data, piece] : pieces_) device_.unregisterHost(data);
}

// Returns how many bytes from `data` on lie in one piece, or in none.
uint64_t RegisteredMemory::touch(const std::byte* data, uint64_t now, uint64_t done) {
  auto region = regions_.upper_bound(const_cast<std::byte*>(data));
  if (region == regions_.begin()) return UINT64_MAX;
  --region;
  const auto offset = static_cast<uint64_t>(data - region->first);
  if (offset >= region->second) return UINT64_MAX;
  const uint64_t start = offset / kPieceBytes * kPieceBytes;
  const uint64_t piece_bytes = std::min(kPieceBytes, region->second - start);
  std::byte* const at = region->first + start;
  const auto found = pieces_.find(at);
  if (found != pieces_.end()) {
    found->second.used = now;
  } else if (makeRoom(piece_bytes, done) && device_.registerHost(at, piece_bytes)) {
    pieces_[at] = {piece_bytes, now};
    bytes_ += piece_bytes;
  }
  return start + piece_bytes - offset;
}

bool RegisteredMemory::makeRoom(uint64_t bytes, uint64_t done) {
  while (bytes_ + bytes > limit_bytes_) {
    const auto oldest = std::min_element(
        pieces_.begin(), pieces_.end(),
        [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
    if (oldest == pieces_.end() || oldest->second.used > done) return false;
    device_.unregisterHost(oldest->first);
    bytes_ -= oldest->second.bytes;
    pieces_.erase(oldest);
  }
  return true;
}

}  // namespace shoal::worker
