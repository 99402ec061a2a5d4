#include "worker/execute/replies.h"

#include <cstring>
#include <utility>

#include "wire/limits.h"
#include "wire/messages.h"

namespace shoal::worker {

void Replies::reply(const std::vector<uint64_t>& payload) {
  if (replyPending()) return;
  owed_ = false;
  sink_.send(kind_, wire::ErrorKind::kNone, sequence_, payload);
}

void Replies::replyBytes(std::span<const std::byte> bytes) {
  if (replyPending()) return;
  owed_ = false;
  sink_.sendBytes(kind_, sequence_, bytes);
}

void Replies::fail(std::shared_ptr<const Failure> failure) {
  if (!owed_) {
    if (pending_.failure == nullptr) pending_ = {std::move(failure), sequence_};
    return;
  }
  if (!replyPending()) replyFailure(*failure, /*shown_in=*/0);  // the older one first
}

bool Replies::replyPending() {
  if (pending_.failure == nullptr) return false;
  const Pending pending = std::exchange(pending_, {});
  replyFailure(*pending.failure, pending.at);
  return true;
}

// `shown_in`: the message in which the failure showed; 0: the one that is replied to.
void Replies::replyFailure(const Failure& failure, uint64_t shown_in) {
  owed_ = false;
  std::string both = failure.text.substr(0, wire::kErrorTextBytesMax);
  wire::ErrorReply error{failure.sequence, shown_in, both.size(), 0, {}};
  both.append(failure.operator_name, 0, wire::kOperatorNameBytesMax);
  error.name_bytes = both.size() - error.text_bytes;
  error.both = both;
  sink_.send(kind_, failure.kind, sequence_, wire::body(error));
}

std::vector<uint64_t> dataPayload(std::span<const std::byte> bytes) {
  std::vector<uint64_t> words((bytes.size() + 7) / 8);
  if (!bytes.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
  return wire::body(wire::DataReply{words});
}

}  // namespace shoal::worker
