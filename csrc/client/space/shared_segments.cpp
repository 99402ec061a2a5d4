#include "client/space/shared_segments.h"

#include "client/member/errors.h"

namespace shoal::client {

using wire::Address;
using wire::ShareMode;

void share(Session& session, Address base, size_t number, const SharedDescriptors& fds,
           ShareMode mode) {
  session.synchronize(0);  // an earlier failure is raised as what it is
  Member& member = session.member(number);
  uint64_t sequence = 0;
  {
    const Lock held = session.lock();
    member.checkUsable();
    Directory& directory = session.directory(held);
    if (directory.at(base).shared)
      raiseShareError("this tensor is shared already: use the same handle");
    if (directory.extents().of(base) != nullptr) {
      raiseShareError(
          "this tensor is larger than any device, so it is sharded and cannot be "
          "shared. Share slices of it: shoal.share(tensor[:n].clone())");
    }
    const SegmentUse use{base, true};
    session.makeRoom(member, use, 0, held);
    session.bringToWrite(base, member, held);
    session.invalidate(base, member, member.lastSequence(), held);
    const uint64_t passed = member.passShared(fds.memory, fds.control, fds.line);
    directory.setShared(base, true);
    sequence = member.post(
        wire::Share{base, directory.at(base).bytes, passed, mode, fds.participant}, held);
    directory.wrote(base, member.number(), sequence);
  }
  try {
    member.await(sequence);
  } catch (...) {
    session.directory(session.lock()).setShared(base, false);
    throw;
  }
  const Lock held = session.lock();
  const uint64_t block = session.directory(held).dropHostBlock(base);
  if (block != 0) session.hostReleases(held).add(block - 1);
}

Address openShared(Session& session, uint64_t bytes, size_t number, const SharedDescriptors& fds,
                   ShareMode mode) {
  session.synchronize(0);
  Member& member = session.member(number);
  Address base = 0;
  uint64_t sequence = 0;
  {
    const Lock held = session.lock();
    base = session.mint(bytes, 0, held);
    try {
      const SegmentUse use{base, true};
      session.makeRoom(member, use, 0, held);
      const uint64_t passed = member.passShared(fds.memory, fds.control, fds.line);
      sequence = member.post(wire::Open{base, bytes, passed, mode, fds.participant}, held);
    } catch (...) {
      session.release(base, held);
      throw;
    }
    session.made(base, member, sequence, held);
    session.directory(held).setShared(base, true);
  }
  try {
    member.await(sequence);
  } catch (...) {
    session.release(base);
    throw;
  }
  return base;
}

void unshare(Session& session, Address base) {
  Member* member = nullptr;
  uint64_t sequence = 0;
  {
    const Lock held = session.lock();
    Directory& directory = session.directory(held);
    if (!directory.at(base).shared) return;
    member = session.home(base, held);
    member->checkUsable();
    sequence = member->post(wire::Unshare{base}, held);
    directory.wrote(base, member->number(), sequence);
  }
  member->await(sequence);
  session.directory(session.lock()).setShared(base, false);
}

bool isShared(Session& session, Address base) {
  return session.directory(session.lock()).at(base).shared;
}

}  // namespace shoal::client
