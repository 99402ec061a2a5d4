// Segments in memory that other sessions have too.
//
// A shared segment has one copy, on one member: its home. Calls that use it run there, so that
// every use is checked against what the sharing allows at that moment. Segments of the whole lease
// all share on the same member, so that no call needs two such places.
#include <cerrno>
#include <cstring>

#include "client/member/errors.h"
#include "client/space/session.h"
#include "transport/shared_passing.h"

namespace shoal::client {

using wire::Address;
using wire::ShareMode;

void Stream::passShared(uint64_t number, int memory, int control, int line) {
  transport::SharedPassing passing;
  passing.number = number;
  if (!transport::sendShared(options_.socket, passing, {memory, control, line})) {
    raiseShareError("the memory cannot be passed to device " + options_.name + ": " +
                    std::strerror(errno));
  }
}

void Session::share(Address base, size_t number, const SharedDescriptors& fds, ShareMode mode) {
  synchronize(0);  // what failed before is told as what it is
  Stream& member = *members_.at(number);
  uint64_t sequence = 0;
  {
    const Lock held = lock();
    member.checkUsable();
    Segment& segment = at(base);
    if (segment.shared) raiseShareError("this tensor is shared already: use the same handle");
    if (extents(base, held) != nullptr) {
      raiseShareError(
          "this tensor is larger than any device, so it is in pieces and cannot be "
          "shared. Share parts of it: shoal.share(tensor[:n].clone())");
    }
    const SegmentUse use{base, true};
    makeRoom(member, use, 0, held);
    bringToWrite(base, member, held);
    invalidate(base, member, member.lastSequence(), held);
    member.passShared(++shared_number_, fds.memory, fds.control, fds.line);
    segment.shared = true;
    sequence =
        member.post(wire::Share{base, segment.bytes, shared_number_, mode, fds.participant}, held);
    segment.written_at = sequence;
  }
  try {
    member.await(sequence);
  } catch (...) {
    const Lock held = lock();
    at(base).shared = false;
    throw;
  }
  const Lock held = lock();
  Segment& segment = at(base);
  if (segment.host_block != 0) releaseHostLater(segment.host_block - 1, held);
  segment.host_block = 0;
}

Address Session::openShared(uint64_t bytes, size_t number, const SharedDescriptors& fds,
                            ShareMode mode) {
  synchronize(0);
  Stream& member = *members_.at(number);
  Address base = 0;
  uint64_t sequence = 0;
  {
    const Lock held = lock();
    base = mint(bytes, 0, held);
    try {
      const SegmentUse use{base, true};
      makeRoom(member, use, 0, held);
      member.passShared(++shared_number_, fds.memory, fds.control, fds.line);
      sequence = member.post(wire::Open{base, bytes, shared_number_, mode, fds.participant}, held);
    } catch (...) {
      releaseLocked(base, held);
      throw;
    }
    made(base, member, sequence, held);
    at(base).shared = true;
  }
  try {
    member.await(sequence);
  } catch (...) {
    release(base);
    throw;
  }
  return base;
}

void Session::unshare(Address base) {
  Stream* member = nullptr;
  uint64_t sequence = 0;
  {
    const Lock held = lock();
    if (!at(base).shared) return;
    member = home(base, held);
    member->checkUsable();
    sequence = member->post(wire::Unshare{base}, held);
    at(base).written_at = sequence;
  }
  member->await(sequence);
  const Lock held = lock();
  at(base).shared = false;
}

bool Session::isShared(Address base) {
  const Lock held = lock();
  return at(base).shared;
}

}  // namespace shoal::client
