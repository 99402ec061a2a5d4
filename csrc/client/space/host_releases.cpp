#include "client/space/host_releases.h"

#include "client/space/host_memory.h"

namespace shoal::client {

void HostReleases::add(uint64_t offset) {
  Release release{offset, {}};
  for (const auto& member : members_) release.after.push_back(member->lastSequence());
  releases_.push_back(std::move(release));
}

void HostReleases::add(uint64_t offset, const Member& member, uint64_t sequence) {
  Release release{offset, {}};
  release.after.resize(members_.size(), 0);
  release.after[member.number()] = sequence;
  releases_.push_back(std::move(release));
}

void HostReleases::reclaim() {
  while (!releases_.empty()) {
    const auto& after = releases_.front().after;
    for (size_t i = 0; i < after.size(); ++i) {
      if (members_[i]->usable() && !members_[i]->isDone(after[i])) return;
    }
    HostMemory::get().release(releases_.front().offset);
    releases_.pop_front();
  }
}

bool HostReleases::passed(const Release& release) const {
  for (size_t i = 0; i < release.after.size(); ++i) {
    if (!members_[i]->isDone(release.after[i])) return false;
  }
  return true;
}

void HostReleases::leave() {
  std::vector<uint64_t> offsets;  // of blocks that a worker may still use
  for (const Release& release : releases_) {
    if (passed(release)) {
      HostMemory::get().release(release.offset);
    } else {
      offsets.push_back(release.offset);
    }
  }
  if (offsets.empty()) return;
  std::vector<memory::SharedMemory> workers;
  for (const auto& member : members_) {
    if (member->link() == nullptr) workers.push_back(member->takeProgress());
  }
  HostMemory::get().releaseAfter(std::move(offsets), std::move(workers));
}

}  // namespace shoal::client
