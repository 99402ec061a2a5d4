#include "worker/accelerator/lanes.h"

#include <algorithm>

namespace shoal::worker {

void Lanes::begin(uint64_t message, uint64_t done) {
  now_ = message;
  done_ = done;
  while (!computed_.empty() && computed_.front().message <= done) computed_.pop_front();
  for (auto& copies : host_copies_) {
    while (!copies.empty() && copies.front().message <= done) copies.pop_front();
  }
}

void Lanes::compute(Uses& uses, bool writes) {
  if (uses.in.number != 0) {
    order(Lane::kCompute, uses.in);
    uses.in.number = 0;
    uses.written = now_;  // whoever comes after the compute lane comes after the copy
  }
  if (writes && uses.out.number != 0) {
    order(Lane::kCompute, uses.out);
    uses.out.number = 0;
  }
  uses.used = now_;
  if (writes) uses.written = now_;
}

void Lanes::computeAnything() {
  order(Lane::kCompute, last_[static_cast<size_t>(Lane::kIn)]);
  order(Lane::kCompute, last_[static_cast<size_t>(Lane::kOut)]);
}

void Lanes::drop(const Uses& uses) {
  order(Lane::kCompute, uses.in);
  order(Lane::kCompute, uses.out);
}

Ticket Lanes::mark(Lane lane) {
  return last_[static_cast<size_t>(lane)] = device_.mark(lane);
}

// A point of the compute lane behind all operators up to `message`.
Ticket Lanes::computed(uint64_t message) {
  if (message <= done_) return {};
  const auto found =
      std::lower_bound(computed_.begin(), computed_.end(), message,
                       [](const Computed& c, uint64_t wanted) { return c.message < wanted; });
  if (found != computed_.end()) return found->ticket;
  const Ticket ticket = mark(Lane::kCompute);
  // The message that runs may have issued but a part of its work.
  const uint64_t whole = now_ - 1;
  if (computed_.empty() || computed_.back().message < whole) computed_.push_back({whole, ticket});
  return ticket;
}

void Lanes::order(Lane waits, Ticket ticket) {
  uint64_t& seen = seen_[static_cast<size_t>(waits)][static_cast<size_t>(ticket.lane)];
  if (waits == ticket.lane || ticket.number <= seen) return;
  device_.after(waits, ticket);
  seen = ticket.number;
}

void Lanes::orderHost(Lane waits, Lane other, HostRange host) {
  const auto& copies = host_copies_[static_cast<size_t>(other)];
  // The last one is behind those before it.
  const auto last = std::find_if(copies.rbegin(), copies.rend(),
                                 [&](const HostCopy& copy) { return copy.host.overlaps(host); });
  if (last != copies.rend()) order(waits, last->ticket);
}

Ticket Lanes::copied(Lane lane, Uses& uses, HostRange host) {
  const Ticket ticket = mark(lane);
  uses.copied = now_;
  host_copies_[static_cast<size_t>(lane)].push_back({host, ticket, now_});
  return ticket;
}

Lanes::Points Lanes::points() {
  mark(Lane::kCompute);
  if (computed_.empty() || computed_.back().message < now_) {
    computed_.push_back({now_, last_[static_cast<size_t>(Lane::kCompute)]});
  }
  Points points{};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    points[lane] = {static_cast<Lane>(lane),
                    last_[lane].number > told_[lane] ? last_[lane].number : 0};
    told_[lane] = last_[lane].number;
  }
  return points;
}

}  // namespace shoal::worker
