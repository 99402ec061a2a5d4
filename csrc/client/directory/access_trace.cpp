#include "client/directory/access_trace.h"

namespace shoal::client {

void AccessTrace::noteCall(std::span<const SegmentUse> uses, std::span<const wire::Address> made,
                           uint32_t member, const Directory& directory) {
  beginCall();
  for (const SegmentUse& use : uses) {
    note(use.writes ? Access::kWrite : Access::kRead, use.base, member, directory);
  }
  for (const wire::Address address : made) {
    if (address != 0) note(Access::kMake, address, member, directory);
  }
}

}  // namespace shoal::client
