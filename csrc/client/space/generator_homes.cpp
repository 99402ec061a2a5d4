#include "client/space/generator_homes.h"

#include "client/space/session.h"

namespace shoal::client {

uint64_t defaultGeneratorNumber(const Session& session, c10::DeviceIndex index) {
  return !session.single() && index == 0 ? wire::kLeaseGenerator : 0;
}

Member& generatorHome(Session& session, uint64_t generator, const Lock& held) {
  return session.member(session.generatorHomes(held).of(generator));
}

void bringGenerator(Session& session, uint64_t generator, Member& member, const Lock& held) {
  Member& from = generatorHome(session, generator, held);
  if (&from == &member) return;
  const wire::Address state = session.mint(sizeof(wire::SavedGenerator), 0, held);
  const uint64_t saved = from.post(wire::GeneratorSave{generator, state}, held);
  session.made(state, from, saved, held);
  session.bring(state, member, held);
  member.post(wire::GeneratorLoad{generator, state}, held);
  session.release(state, held);
  session.generatorHomes(held).moved(generator, member.number());
}

}  // namespace shoal::client
