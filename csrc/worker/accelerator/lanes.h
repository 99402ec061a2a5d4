// Orders the lanes of a device that runs late, by what each segment was used for: a copy waits for
// the operators that used its segment, and operators wait for the copies of theirs. The host never
// waits. Pure but for the device, which tests replace.
#pragma once

#include <array>
#include <cstdint>
#include <deque>

#include "worker/accelerator/accelerator.h"

namespace shoal::worker {

// Of a segment: what used it last, by lane.
struct Uses {
  // Messages whose operators used it, wrote it, or first had its memory.
  uint64_t used = 0, written = 0;
  Ticket in{Lane::kIn}, out{Lane::kOut};  // copies that write it, that read it
  uint64_t copied = 0;                    // the message of the last copy
};

// Host memory of a copy.
struct HostRange {
  const std::byte* data;
  uint64_t bytes;

  bool overlaps(const HostRange& other) const {
    return data < other.data + other.bytes && other.data < data + bytes;
  }
};

class Lanes {
 public:
  explicit Lanes(Accelerator& device) : device_(device) {}

  // Message `message` is issued next. All up to message `done` are done.
  void begin(uint64_t message, uint64_t done);
  uint64_t now() const { return now_; }
  uint64_t done() const { return done_; }

  // The segment has new memory, which operators may use at once.
  void made(Uses& uses) const { uses = Uses{now_, now_}; }
  // Operators use it, from here on.
  void compute(Uses& uses, bool writes);
  // Operators use segments that nobody can name.
  void computeAnything();
  // `copy` issues a copy from the host to the segment in lane kIn; from it to the host in lane
  // kOut. Copies that share host memory are in order.
  template <typename Copy>
  void copyIn(Uses& uses, HostRange host, const Copy& copy) {
    order(Lane::kIn, computed(uses.used));
    order(Lane::kIn, uses.out);
    orderHost(Lane::kIn, Lane::kOut, host);
    uses.out.number = 0;
    copy();
    uses.in = copied(Lane::kIn, uses, host);
  }
  template <typename Copy>
  void copyOut(Uses& uses, HostRange host, const Copy& copy) {
    order(Lane::kOut, uses.in.number != 0 ? uses.in : computed(uses.written));
    orderHost(Lane::kOut, Lane::kIn, host);
    copy();
    uses.out = copied(Lane::kOut, uses, host);
  }
  // Its memory goes. What the compute lane does next may use it.
  void drop(const Uses& uses);
  // Whether a copy may still run.
  bool copiesRun(const Uses& uses) const {
    return uses.copied > done_ && (uses.in.number != 0 || uses.out.number != 0);
  }

  // A point of the compute lane behind all that was issued so far.
  Ticket computed() { return mark(Lane::kCompute); }
  // When these are past, all that was issued so far is done.
  using Points = std::array<Ticket, kLanes>;
  Points points();

 private:
  Ticket mark(Lane lane);
  Ticket computed(uint64_t message);
  void order(Lane waits, Ticket ticket);
  void orderHost(Lane waits, Lane other, HostRange host);
  Ticket copied(Lane lane, Uses& uses, HostRange host);

  struct HostCopy {
    HostRange host;
    Ticket ticket;
    uint64_t message;
  };
  struct Computed {  // a mark of the compute lane, behind all operators up to a message
    uint64_t message;
    Ticket ticket;
  };
  Accelerator& device_;
  uint64_t now_ = 0, done_ = 0;
  std::deque<Computed> computed_;                         // not yet known to be done
  std::array<std::deque<HostCopy>, kLanes> host_copies_;  // the same
  std::array<Ticket, kLanes> last_{Ticket{Lane::kCompute}, Ticket{Lane::kIn}, Ticket{Lane::kOut}};
  std::array<uint64_t, kLanes> told_{};                      // by lane: what points() gave last
  std::array<std::array<uint64_t, kLanes>, kLanes> seen_{};  // by lane: what it waits for already
};

}  // namespace shoal::worker
