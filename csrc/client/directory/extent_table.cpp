#include "client/directory/extent_table.h"

namespace shoal::client {

using wire::Address;

Address ExtentTable::join(Extents extents, int pinned) {
  const Address base = segments_.add(extents.back().start + extents.back().bytes, pinned);
  if (base == 0) return 0;
  for (const Extent& extent : extents) segments_.at(extent.base).extent_of = base;
  extents_[wire::slotOf(base)] = std::make_unique<Extents>(std::move(extents));
  return base;
}

Extents ExtentTable::split(Address base) {
  const auto found = extents_.find(wire::slotOf(base));
  Extents extents = std::move(*found->second);
  for (const Extent& extent : extents) segments_.at(extent.base).extent_of = 0;
  extents_.erase(found);
  segments_.remove(base);
  return extents;
}

std::string ExtentTable::violation() const {
  for (const auto& [slot, extents] : extents_) {
    const std::string name = "the sharded segment in slot " + std::to_string(slot);
    const Address base = segments_.addressOf(slot);
    if (segments_.at(base).live) return name + " counts as an ordinary one";
    uint64_t start = 0;
    for (const Extent& extent : *extents) {
      const Segment& segment = segments_.at(extent.base);
      if (extent.start != start || segment.bytes != extent.bytes) return name + " has gaps";
      if (!segment.live) return name + " has an extent that was freed";
      if (segment.extent_of != base) return name + " has an extent that does not name it";
      start += extent.bytes;
    }
    if (start != segments_.at(base).bytes) return name + " is not covered by its extents";
  }
  return "";
}

}  // namespace shoal::client
