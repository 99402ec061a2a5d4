// Finds two accesses to the same bytes of which at least one writes and that no event, wait of the
// host or order of a stream puts one behind the other. It looks at what is issued, not at when it
// runs, so it finds the same in every mode but `now`.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace standin {

struct Access {
  uint64_t address;
  uint64_t bytes;
  bool writes;
};

// What is known to be done, as a count of tasks by stream.
class Clock {
 public:
  uint64_t of(uint32_t stream) const { return stream < counts_.size() ? counts_[stream] : 0; }
  void set(uint32_t stream, uint64_t count) {
    if (stream >= counts_.size()) counts_.resize(stream + 1);
    counts_[stream] = count;
  }
  void join(const Clock& other) {
    for (uint32_t i = 0; i < other.counts_.size(); ++i) {
      if (other.counts_[i] > of(i)) set(i, other.counts_[i]);
    }
  }

 private:
  std::vector<uint64_t> counts_;
};

class Checker {
 public:
  // A task that is number `clock.of(stream)` of its stream. Returns the races found.
  uint64_t access(const std::string& task, uint32_t stream, const std::string& lane,
                  const Clock& clock, const std::vector<Access>& accesses);
  void forget(uint64_t address, uint64_t bytes);

 private:
  struct Use {
    uint32_t stream = 0;
    uint64_t count = 0;  // 0: none
    std::shared_ptr<const std::string> by;
  };
  struct Block {
    uint64_t end;
    Use written;
    std::vector<Use> reads;  // since then, the last of each stream
  };
  using Blocks = std::map<uint64_t, Block>;

  Blocks::iterator split(uint64_t at);
  void compare(const Use& before, const Use& now, const Clock& clock, const char* what,
               const Access& access, uint64_t& races);

  std::mutex lock_;
  Blocks blocks_;
  std::set<std::string> told_;
};

Checker& checker();

}  // namespace standin
