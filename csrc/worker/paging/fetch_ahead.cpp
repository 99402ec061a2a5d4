#include "worker/paging/fetch_ahead.h"

#include "wire/cursor.h"
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

bool FetchAhead::see(const std::vector<uint64_t>& message, uint64_t sequence) {
  const auto kind = static_cast<wire::Kind>(wire::headerKind(message[0]));
  if (kind != wire::Kind::kFetch && kind != wire::Kind::kFetchAdd) return true;
  try {
    wire::Reader reader(message.data() + 1, message.size() - 1);
    const Fetch fetch = Fetch::of(reader);
    if (peers_.toldBy(fetch.peer) == nullptr) return true;  // on this machine, or does not exist
    if (!peers_.ask(fetch.peer, fetch.request(sequence))) return false;
    asked_.emplace_back(sequence, fetch.peer);
  } catch (const wire::ProtocolError&) {
    // The executor rejects it when it runs.
  }
  return true;
}

}  // namespace shoal::worker
