// Random generators of the whole lease: their state goes to the member that draws next.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <unordered_map>

#include "client/member/member.h"

namespace shoal::client {

class Session;

// Which member has the state of a generator.
class GeneratorHomes {
 public:
  uint32_t of(uint64_t generator) const {
    const auto found = homes_.find(generator);
    return found == homes_.end() ? 0 : found->second;
  }
  void moved(uint64_t generator, uint32_t member) { homes_[generator] = member; }

 private:
  std::unordered_map<uint64_t, uint32_t> homes_;  // 0 where there is none
};

// Generator 0 of each device belongs to it; that of the whole lease has a number of its own.
uint64_t defaultGeneratorNumber(const Session& session, c10::DeviceIndex index);
Member& generatorHome(Session& session, uint64_t generator, const Lock&);
// The generator's state is on `member` for its next message.
void bringGenerator(Session& session, uint64_t generator, Member& member, const Lock&);

}  // namespace shoal::client
