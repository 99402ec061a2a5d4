// What must be true of a directory at any moment. Sanitized builds check it after every step, and
// the property tests state it.
#include "client/directory/directory.h"

namespace shoal::client {

using wire::Address;

std::string Directory::violationOf(Address base) const {
  const Segment& segment = at(base);
  const auto home_bit = segment.home < 0 ? 0 : bitOf(static_cast<uint32_t>(segment.home));
  if ((segment.valid & ~segment.bound) != 0) return "has bytes where it has no memory";
  if (segment.bound >> members_.size() != 0) return "is bound to a member that does not exist";
  if (segment.bound != 0 && (segment.bound & home_bit) == 0) return "has no memory at its home";
  if (segment.awaitsCopy() ? segment.valid != 0 : (segment.valid & home_bit) != home_bit) {
    return "has no present bytes at its home";
  }
  if (segment.shared && segment.bound != home_bit) return "is shared and has replicas";
  if (segment.host_block != 0 && (segment.bound & bitOf(segment.host_member)) == 0) {
    return "keeps a host block that nobody reads";
  }
  return copies_.violation(base);
}

std::string Directory::violation() const {
  std::string wrong;
  segments_.each([&](Address base, const Segment&) {
    if (!wrong.empty()) return;
    wrong = violationOf(base);
    if (wrong.empty()) return;
    wrong = "the segment in slot " + std::to_string(wire::slotOf(base)) + " " + wrong;
  });
  if (wrong.empty()) wrong = memory_.violation(segments_);
  if (wrong.empty()) wrong = extents_.violation();
  return wrong;
}

}  // namespace shoal::client
