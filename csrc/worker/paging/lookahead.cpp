#include "worker/paging/lookahead.h"

#include "wire/address.h"
#include "wire/message.h"

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
    see(message_.data(), message_.size());
    ++next_sequence_;
  }
}

void Lookahead::see(const uint64_t* words, size_t count) {
  using wire::Kind;
  switch (static_cast<Kind>(wire::headerKind(words[0]))) {
    case Kind::kCall: {
      const auto* positions = count < 2 ? nullptr : address_words_(wire::low(words[1]));
      if (positions == nullptr) {  // it is prepared in the window, too
        last_blind_ = next_sequence_;
        return;
      }
      const bool recorded = (wire::headerFlags(words[0]) & wire::kFlagRecord) != 0;
      const size_t first = recorded ? 3 : 2;
      for (const uint32_t position : *positions) {
        if (first + position < count) add(words[first + position], false);
      }
      return;
    }
    case Kind::kFree:
      for (size_t i = 1; i < count; ++i) add(words[i], true);
      return;
    case Kind::kWrite:
    case Kind::kCopyIn:
    case Kind::kCopyOut:
    case Kind::kRead:
    case Kind::kLocate:
    case Kind::kExport:
    case Kind::kShare:
    case Kind::kUnshare:
    case Kind::kLoad:
      if (count > 1) add(words[1], false);
      return;
    case Kind::kCopyWithin:
      for (size_t i = 1; i < count && i < 3; ++i) add(words[i], false);
      return;
    case Kind::kBackward:
      last_blind_ = next_sequence_;
      return;
    case Kind::kFetch:
    case Kind::kFetchAdd:
      if (count > 1) add(words[1], false);
      return;
    case Kind::kGeneratorSave:
    case Kind::kGeneratorLoad:
      if (count > 2) add(words[2], false);
      return;
    default:
      return;  // uses no segment
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
