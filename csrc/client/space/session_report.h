// What a session can say of itself: its memory, its traffic, and where everything is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/space/session.h"

namespace shoal::client {

MemoryUse memoryUse(Session& session, c10::DeviceIndex index);
Traffic traffic(Session& session, c10::DeviceIndex index);
// How far the device's members are, in messages.
Member::Reached reached(Session& session, c10::DeviceIndex index);

// One live segment, for the map of the address space.
struct MapEntry {
  wire::Address address;
  Segment segment;
  uint32_t resident;  // members that have it in device memory now, and not in swap space
  int64_t frame;      // its offset in its home's memory; -1: not there, or unknown
};
std::vector<MapEntry> mapOf(Session& session);

// What the directory says of itself.
struct DirectoryReport {
  std::string violation;           // what is wrong with it; empty: nothing
  std::vector<std::string> steps;  // the latest, oldest first
};
DirectoryReport reportOf(Session& session);

}  // namespace shoal::client
