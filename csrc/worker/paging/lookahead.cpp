#include "worker/paging/lookahead.h"

#include "wire/address.h"
#include "wire/message.h"

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
    see(message_.data(), message_.size());
    uses_.setEnd(uses_.end() + 1);
  }
}

void Lookahead::see(const uint64_t* words, size_t count) {
  using wire::Kind;
  switch (static_cast<Kind>(wire::headerKind(words[0]))) {
    case Kind::kCall: {
      const auto* positions = count < 2 ? nullptr : address_words_(wire::low(words[1]));
      if (positions == nullptr) {  // a message in the ring prepares it
        uses_.addBlind(uses_.end());
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
      uses_.addBlind(uses_.end());
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
  if (slot != 0) uses_.add(slot, frees);
}

}  // namespace shoal::worker
