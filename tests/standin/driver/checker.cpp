#include "checker.h"

#include <unistd.h>

#include <cstdio>

namespace standin {
namespace {

constexpr size_t kToldMax = 20;  // of each process

}  // namespace

Checker& checker() {
  static auto* const made = new Checker;  // streams may run until the process has ended
  return *made;
}

// Makes `at` a boundary. Returns the first block that starts there or behind.
Checker::Blocks::iterator Checker::split(uint64_t at) {
  auto next = blocks_.lower_bound(at);
  if (next != blocks_.end() && next->first == at) return next;
  if (next == blocks_.begin()) return next;
  auto before = std::prev(next);
  if (before->second.end <= at) return next;
  Block rest = before->second;
  before->second.end = at;
  return blocks_.emplace_hint(next, at, std::move(rest));
}

void Checker::compare(const Use& before, const Use& now, const Clock& clock, const char* what,
                      const Access& access, uint64_t& races) {
  if (before.count == 0 || clock.of(before.stream) >= before.count) return;
  ++races;
  const std::string text = *now.by + what + *before.by;
  if (told_.size() >= kToldMax || !told_.insert(text).second) return;
  std::fprintf(stderr,
               "standin: unordered access (process %d, address %#llx, %llu bytes): %s. No event, "
               "stream or wait of the host orders the two.\n",
               static_cast<int>(getpid()), static_cast<unsigned long long>(access.address),
               static_cast<unsigned long long>(access.bytes), text.c_str());
}

uint64_t Checker::access(const std::string& task, uint32_t stream, const std::string& lane,
                         const Clock& clock, const std::vector<Access>& accesses) {
  uint64_t races = 0;
  const std::lock_guard guard(lock_);
  const Use now{stream, clock.of(stream),
                std::make_shared<const std::string>(task + " on " + lane)};
  for (const Access& access : accesses) {
    if (access.bytes == 0) continue;
    const uint64_t end = access.address + access.bytes;
    uint64_t at = access.address;
    for (auto block = split(at); at < end; ++block) {
      if (block == blocks_.end() || block->first > at) {  // a gap: nobody used it yet
        const uint64_t until = block == blocks_.end() ? end : std::min(end, block->first);
        block = blocks_.emplace_hint(block, at, Block{until, {}, {}});
      } else if (block->second.end > end) {
        split(end);
      }
      Block& found = block->second;
      at = found.end;
      compare(found.written, now, clock,
              access.writes ? " writes what is written by " : " reads what is written by ", access,
              races);
      if (access.writes) {
        for (const Use& read : found.reads) {
          compare(read, now, clock, " writes what is read by ", access, races);
        }
        found.written = now;
        found.reads.clear();
        continue;
      }
      bool known = false;
      for (Use& read : found.reads) {
        if (read.stream == stream) known = (read = now, true);
      }
      if (!known) found.reads.push_back(now);
    }
  }
  return races;
}

void Checker::forget(uint64_t address, uint64_t bytes) {
  const std::lock_guard guard(lock_);
  const auto last = split(address + bytes);
  blocks_.erase(split(address), last);
}

}  // namespace standin
