#include "client/space/sharded_segments.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

namespace shoal::client {

using wire::Address;

namespace {

std::atomic<int64_t> g_sharded_segments{0};

constexpr uint64_t kRowsTogether = 16;  // torch's CPU generators draw in groups of 16
constexpr uint64_t kCutAlignment = 64;
constexpr uint64_t kPageBytes = uint64_t{2} << 20;

// Where a segment is cut: between rows, or, if a row is larger than an extent, within each row.
std::vector<uint64_t> cutSegment(uint64_t bytes, uint64_t row_bytes, uint64_t extent_bytes) {
  std::vector<uint64_t> cuts;
  if (row_bytes == 0) row_bytes = std::min(kPageBytes, extent_bytes);
  if (row_bytes <= extent_bytes) {
    uint64_t rows = extent_bytes / row_bytes;
    if (rows >= kRowsTogether) rows -= rows % kRowsTogether;
    for (uint64_t cut = rows * row_bytes; cut < bytes; cut += rows * row_bytes) cuts.push_back(cut);
    return cuts;
  }
  const uint64_t count = (row_bytes - 1) / extent_bytes + 1;
  const uint64_t step = ((row_bytes / count) / kCutAlignment + 1) * kCutAlignment;
  for (uint64_t row = 0; row < bytes; row += row_bytes) {
    for (uint64_t cut = row; cut < std::min(bytes, row + row_bytes); cut += step) {
      if (cut > 0) cuts.push_back(cut);
    }
  }
  return cuts;
}

Address join(Session& session, Extents extents, c10::DeviceIndex index, const Lock& held) {
  Observer::giveUp("a tensor is larger than any device");
  const Address base = session.directory(held).extents().join(std::move(extents), index - 1);
  TORCH_CHECK(base != 0, "shoal: more than ", wire::kSlotsMax, " tensors are alive in one lease");
  g_sharded_segments.fetch_add(1, std::memory_order_relaxed);
  return base;
}

}  // namespace

bool anySharded() {
  return g_sharded_segments.load(std::memory_order_relaxed) > 0;
}

Address mintSharded(Session& session, uint64_t bytes, uint64_t row_bytes, c10::DeviceIndex index) {
  const Lock held = session.lock();
  session.checkRoom(bytes, index, held);
  std::vector<uint64_t> cuts = cutSegment(bytes, row_bytes, extentBytesMax(session));
  cuts.push_back(bytes);
  Extents extents;
  uint64_t start = 0;
  for (const uint64_t cut : cuts) {
    extents.push_back({session.mint(cut - start, index, held), start, cut - start});
    start = cut;
  }
  return join(session, std::move(extents), index, held);
}

Address joinSharded(Session& session, const std::vector<Address>& bases, c10::DeviceIndex index) {
  const Lock held = session.lock();
  Extents extents;
  uint64_t start = 0;
  for (const Address base : bases) {
    const uint64_t bytes = session.directory(held).at(base).bytes;
    extents.push_back({base, start, bytes});
    start += bytes;
  }
  return join(session, std::move(extents), index, held);
}

Extents splitSharded(Session& session, Address base, const Lock& held) {
  g_sharded_segments.fetch_sub(1, std::memory_order_relaxed);
  return session.directory(held).extents().split(base);
}

const Extents* extentsOf(Session& session, Address base) {
  return anySharded() ? session.directory(session.lock()).extents().of(base) : nullptr;
}

}  // namespace shoal::client
