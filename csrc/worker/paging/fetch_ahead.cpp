#include "worker/paging/fetch_ahead.h"

#include "worker/peers/fetch.h"

namespace shoal::worker {

void FetchAhead::after(uint64_t sequence) {
  for (; !asked_.empty() && asked_.front().first <= sequence; asked_.pop_front()) {
    peers_.forget(asked_.front().second, sequence);
  }
  if (next_sequence_ <= sequence) {
    cursor_ = requests_.position();
    next_sequence_ = sequence + 1;
  }
  uint64_t cursor = cursor_;
  while (requests_.peek(cursor, message_) && see(message_, next_sequence_)) {
    cursor_ = cursor;
    ++next_sequence_;
  }
}

bool FetchAhead::see(wire::Words message, uint64_t sequence) {
  bool room = true;
  const auto ask = [&](const wire::Fetch& fetch) {
    if (peers_.toldBy(fetch.peer) == nullptr) return;  // on this machine, or not there
    room = peers_.ask(fetch.peer, requestOf(fetch, sequence));
    if (room) asked_.emplace_back(sequence, fetch.peer);
  };
  try {
    wire::MessageList<wire::Fetch, wire::FetchAdd>::decode(
        message, wire::Overloaded{[&](const wire::Fetch& m) { ask(m); },
                                  [&](const wire::FetchAdd& m) { ask(m.fetch); }});
  } catch (const wire::ProtocolError&) {
    // The executor refuses the message when it runs.
  }
  return room;
}

}  // namespace shoal::worker
