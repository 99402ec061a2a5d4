#include "client/space/session_report.h"

#include <sstream>

namespace shoal::client {

using transport::LocationTable;

namespace {

std::string textOf(const Step& step) {
  std::ostringstream out;
  out << std::hex << std::showbase;
  switch (step.kind) {
    case Step::Kind::kAllocate:
      out << "allocate " << step.target;
      break;
    case Step::Kind::kFetch:
      out << "fetch " << step.target;
      if (step.source != step.target) out << " as a copy of " << step.source;
      out << std::dec << " from member " << int{step.from};
      break;
    case Step::Kind::kFree:
      out << "free " << step.target;
      break;
    case Step::Kind::kNone:
    case Step::Kind::kRaise:
      return "";
  }
  out << std::dec << " on member " << int{step.to};
  return out.str();
}

}  // namespace

MemoryUse memoryUse(Session& session, c10::DeviceIndex index) {
  const Lock held = session.lock();
  const Directory& directory = session.directory(held);
  if (index == 0 || session.single()) return directory.memory().use();
  return directory.memory().use(static_cast<uint32_t>(index) - 1);
}

Traffic traffic(Session& session, c10::DeviceIndex index) {
  const Lock held = session.lock();
  Traffic sum;
  for (size_t i = 0; i < session.size(); ++i) {
    if (index > 0 && i + 1 != static_cast<size_t>(index)) continue;
    const Traffic& t = session.member(i).traffic(held);
    sum.messages += t.messages;
    sum.stream_bytes += t.stream_bytes;
    sum.bytes_in += t.bytes_in;
    sum.bytes_out += t.bytes_out;
    sum.bytes_copied += t.bytes_copied;
    sum.bytes_peer += t.bytes_peer;
    sum.bytes_node += t.bytes_node;
    sum.round_trips += t.round_trips;
  }
  return sum;
}

Member::Reached reached(Session& session, c10::DeviceIndex index) {
  Member::Reached sum{0, 0};
  for (size_t i = 0; i < session.size(); ++i) {
    if (index > 0 && i + 1 != static_cast<size_t>(index)) continue;
    const Member::Reached here = session.member(i).reached();
    sum.issued += here.issued;
    sum.done += here.done;
  }
  return sum;
}

std::vector<MapEntry> mapOf(Session& session) {
  const Lock held = session.lock();
  std::vector<MapEntry> entries;
  session.directory(held).segments().each([&](wire::Address address, const Segment& segment) {
    MapEntry entry{address, segment, 0, -1};
    for (size_t i = 0; i < session.size(); ++i) {
      const Member& member = session.member(i);
      // A member on another machine does not say what it swapped out.
      const bool near = member.link() == nullptr;
      const uint64_t word = near ? member.locations().word(wire::slotOf(address)) : 0;
      const bool here = near ? LocationTable::present(word) : (segment.bound & member.bit()) != 0;
      if (here) entry.resident |= member.bit();
      if (near && here && segment.home == static_cast<int>(i) && !LocationTable::inHost(word)) {
        entry.frame = static_cast<int64_t>(LocationTable::offset(word));
      }
    }
    if (segment.shared) entry.resident |= segment.bound;  // shared memory is never swapped out
    entries.push_back(entry);
  });
  return entries;
}

DirectoryReport reportOf(Session& session) {
  const Lock held = session.lock();
  const Directory& directory = session.directory(held);
  DirectoryReport report{directory.violation(), {}};
  for (const Step& step : directory.log().latest()) report.steps.push_back(textOf(step));
  return report;
}

}  // namespace shoal::client
