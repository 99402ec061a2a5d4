#include "worker/paging/lookahead.h"

#include "wire/address.h"

namespace shoal::worker {
namespace {

constexpr size_t kEventsMax = 1 << 16;  // seen and not yet past

}  // namespace

void Lookahead::advance(uint64_t sequence) {
  while (!order_.empty() && order_.front().first < sequence) {
    const auto found = by_slot_.find(order_.front().second);
    if (found != by_slot_.end()) {
      found->second.pop_front();
      if (found->second.empty()) by_slot_.erase(found);
    }
    order_.pop_front();
  }
  if (next_sequence_ <= sequence) {
    // Messages ran before they were seen: the first look, or a client that is not ahead.
    cursor_ = requests_.position();
    next_sequence_ = sequence + 1;  // the one that runs now is past the ring's head
    last_blind_ = sequence;
  }
  while (order_.size() < kEventsMax && requests_.peek(cursor_, message_)) {
    see(message_);
    ++next_sequence_;
  }
}

void Lookahead::see(wire::Words message) {
  using wire::Access;
  try {
    wire::Messages::decode(message, [this]<typename M>(const M& m) {
      if constexpr (std::is_same_v<M, wire::Backward>) {
        last_blind_ = next_sequence_;  // the graph's own tensors are not in the message
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
    last_blind_ = next_sequence_;
    return;
  }
  for (const uint32_t position : *positions) {
    if (position < call.immediates.size()) add(call.immediates[position], false);
  }
}

void Lookahead::add(uint64_t address, bool frees) {
  const uint32_t slot = wire::slotOf(address);
  if (slot == 0) return;
  by_slot_[slot].push_back({next_sequence_, frees, last_blind_});
  order_.emplace_back(next_sequence_, slot);
}

const Lookahead::Event* Lookahead::next(uint32_t slot) const {
  const auto found = by_slot_.find(slot);
  return found == by_slot_.end() ? nullptr : &found->second.front();
}

}  // namespace shoal::worker
