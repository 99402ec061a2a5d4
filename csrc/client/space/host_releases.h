// Host blocks that workers may still read: a block is free once the members are past a message.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "client/member/member.h"

namespace shoal::client {

class HostReleases {
 public:
  explicit HostReleases(const std::vector<std::unique_ptr<Member>>& members) : members_(members) {}

  // Frees the block once every member is past what was sent so far.
  void add(uint64_t offset);
  // Frees the block once `member` is past `sequence`.
  void add(uint64_t offset, const Member& member, uint64_t sequence);
  // Frees the blocks that nobody reads any more.
  void reclaim();
  size_t size() const { return releases_.size(); }
  // The message of `member` after which half of the blocks are free.
  uint64_t half(const Member& member) const {
    return releases_[releases_.size() / 2].after[member.number()];
  }
  // The session ends: what its workers may still use is freed when they have ended.
  void leave();

 private:
  struct Release {
    uint64_t offset;
    c10::SmallVector<uint64_t, 2> after;  // by member: its sequence number
  };
  bool passed(const Release& release) const;  // every member is past its message

  const std::vector<std::unique_ptr<Member>>& members_;
  std::deque<Release> releases_;
};

}  // namespace shoal::client
