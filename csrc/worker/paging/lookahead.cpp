#include "worker/paging/lookahead.h"

#include "wire/address.h"

namespace shoal::worker {
namespace {

constexpr size_t kEventsMax = 1 << 16;  // read and not yet past

}  // namespace

void Lookahead::advance(uint64_t sequence) {
  uses_.forget(sequence);
  if (uses_.end() <= sequence) {
    // Messages ran before they were read: the first look, or a client that is not ahead.
    cursor_ = requests_.position();
    uses_.addBlind(sequence);
    uses_.setEnd(sequence + 1);  // the message that runs now has left the ring
  }
  while (uses_.order().size() < kEventsMax && requests_.peek(cursor_, message_)) {
    see(message_);
    uses_.setEnd(uses_.end() + 1);
  }
}

void Lookahead::see(wire::Words message) {
  using wire::Access;
  try {
    wire::Messages::decode(message, [this]<typename M>(const M& m) {
      if constexpr (std::is_same_v<M, wire::Backward>) {
        uses_.addBlind(uses_.end());  // the graph's own tensors are not in the message
      } else if constexpr (std::is_same_v<M, wire::Call>) {
        seeCall(m);
      } else {
        wire::eachAddress(m, [this](wire::Address address, Access access) {
          // A segment that is made has no memory yet.
          if (access != Access::kMake) add(address, access == Access::kFree);
        });
      }
    });
  } catch (const wire::ProtocolError&) {
    // The executor refuses the message when it runs.
  }
}

void Lookahead::seeCall(const wire::Call& call) {
  const auto* positions = address_words_(call.id);
  if (positions == nullptr) {  // the window also holds the message that prepares it
    uses_.addBlind(uses_.end());
    return;
  }
  for (const uint32_t position : *positions) {
    if (position < call.immediates.size()) add(call.immediates[position], false);
  }
}

void Lookahead::add(uint64_t address, bool frees) {
  const uint32_t slot = wire::slotOf(address);
  if (slot != 0) uses_.add(slot, frees);
}

}  // namespace shoal::worker
