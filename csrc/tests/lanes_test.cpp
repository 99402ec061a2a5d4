#include "worker/accelerator/lanes.h"

#include <doctest/doctest.h>

#include <map>
#include <random>
#include <utility>
#include <vector>

using shoal::worker::Accelerator;
using shoal::worker::HostRange;
using shoal::worker::kLanes;
using shoal::worker::Lane;
using shoal::worker::Lanes;
using shoal::worker::Ticket;
using shoal::worker::Uses;

namespace {

using Clock = std::array<uint64_t, kLanes>;  // by lane: how many of its tasks are before

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < kLanes; ++i) clock[i] = std::max(clock[i], other[i]);
}

// Knows what orders what, and counts accesses to a block that nothing orders.
class Device final : public Accelerator {
 public:
  c10::Device device() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  bool runsLate() const override { return true; }
  c10::Storage allocate(uint64_t) override { return {}; }
  void emptyCache() override {}
  void copyIn(Lane, void*, const void*, uint64_t) override {}
  void copyOut(Lane, void*, const void*, uint64_t) override {}
  void copyWithin(void*, const void*, uint64_t) override {}
  bool isPast(Ticket) override { return false; }
  void wait(Ticket) override {}
  bool registerHost(std::byte*, uint64_t) override { return true; }
  void unregisterHost(std::byte*) override {}
  Held held() const override { return {0, 0}; }

  Ticket mark(Lane lane) override {
    auto& marks = marks_[static_cast<size_t>(lane)];
    marks.push_back(at(lane));
    ++marked;
    return {lane, marks.size()};
  }
  void after(Lane waits, Ticket ticket) override {
    join(at(waits), marks_[static_cast<size_t>(ticket.lane)].at(ticket.number - 1));
    ++waited;
  }
  void access(Lane lane, int block, bool writes) {
    const uint64_t number = ++at(lane)[static_cast<size_t>(lane)];
    auto& accesses = accesses_[block];
    for (const Access& before : accesses) {
      const bool ordered = at(lane)[static_cast<size_t>(before.lane)] >= before.number;
      if ((writes || before.writes) && !ordered) ++races;
    }
    accesses.push_back({lane, number, writes});
  }
  Clock all() const {
    Clock clock{};
    for (const Clock& lane : clocks_) join(clock, lane);
    return clock;
  }
  // The host has seen that so much is done: what it issues from now on comes later.
  void seen(const Clock& clock) {
    for (Clock& lane : clocks_) join(lane, clock);
  }
  Clock reaches(const Lanes::Points& points) const {
    Clock clock{};
    for (const Ticket point : points) {
      if (point.number > 0) join(clock, marks_[static_cast<size_t>(point.lane)][point.number - 1]);
    }
    return clock;
  }

  int races = 0, marked = 0, waited = 0;

 private:
  struct Access {
    Lane lane;
    uint64_t number;
    bool writes;
  };
  Clock& at(Lane lane) { return clocks_[static_cast<size_t>(lane)]; }
  std::array<Clock, kLanes> clocks_{};
  std::array<std::vector<Clock>, kLanes> marks_;
  std::map<int, std::vector<Access>> accesses_;
};

constexpr int kHost = 100;  // host memory, among the blocks

// A program of a few segments over fewer blocks of memory.
class Program {
 public:
  explicit Program(uint64_t seed) : random_(seed) {
    for (int block = 0; block < 6; ++block) free_.push_back(block);
  }

  void step() {
    lanes_.begin(++message_, done_);
    std::erase_if(kept_, [&](const auto& kept) {
      if (kept.second > done_) return false;
      free_.push_back(kept.first);
      return true;
    });
    act();
    if (below(3) == 0) {  // the worker tells of its messages now and then
      const Lanes::Points points = lanes_.points();
      join(told_clock_, device.reaches(points));
      CHECK(told_clock_ == device.all());  // all that was issued, and nothing was forgotten
      told_ = message_;
      if (below(3) == 0) {  // and they are done, at some time
        done_ = told_;
        device.seen(told_clock_);
      }
    }
  }

  Device device;

 private:
  struct Segment {
    int block;
    Uses uses;
  };

  uint64_t below(uint64_t limit) { return random_() % limit; }
  void act() {
    if (segments_.empty() || (!free_.empty() && below(4) == 0)) return make();
    Segment& segment = segments_[below(segments_.size())];
    const int at = static_cast<int>(below(4));  // of four pinned tensors
    const HostRange host{memory_.data() + at * 8, 8};
    switch (below(5)) {
      case 0:
        lanes_.copyIn(segment.uses, host, [&] {
          device.access(Lane::kIn, segment.block, true);
          device.access(Lane::kIn, kHost + at, false);
        });
        if (below(2) == 0) compute(segments_[below(segments_.size())]);  // in the same message
        return;
      case 1:
        return lanes_.copyOut(segment.uses, host, [&] {
          device.access(Lane::kOut, segment.block, false);
          device.access(Lane::kOut, kHost + at, true);
        });
      case 2:
        std::swap(segment, segments_.back());
        return release();
      case 3:
        if (below(4) != 0) break;
        lanes_.computeAnything();
        for (Segment& any : segments_) device.access(Lane::kCompute, any.block, false);
        // What it used is known to nobody, so later copies must not trust `used`.
        for (Segment& any : segments_) lanes_.compute(any.uses, false);
        return;
      default:
        break;
    }
    compute(segment);
  }
  void compute(Segment& segment) {
    const bool writes = below(2) == 0;
    lanes_.compute(segment.uses, writes);
    device.access(Lane::kCompute, segment.block, writes);
  }
  void make() {
    if (free_.empty()) return;
    Segment made{free_.back(), {}};
    free_.pop_back();
    lanes_.made(made.uses);
    if (below(2) == 0) device.access(Lane::kCompute, made.block, true);  // an operator's output
    segments_.push_back(made);
  }
  void release() {
    const Segment gone = segments_.back();
    segments_.pop_back();
    if (lanes_.copiesRun(gone.uses) && below(2) == 0) {
      kept_.push_back({gone.block, message_});
      return;
    }
    lanes_.drop(gone.uses);
    free_.push_back(gone.block);
  }

  std::mt19937_64 random_;
  std::array<std::byte, 32> memory_{};
  Lanes lanes_{device};
  uint64_t message_ = 0, done_ = 0, told_ = 0;
  Clock told_clock_{};
  std::vector<Segment> segments_;
  std::vector<int> free_;
  std::vector<std::pair<int, uint64_t>> kept_;  // block, and the message after which it is free
};

}  // namespace

TEST_CASE("lanes: in any program every two accesses to one block are ordered") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Program program(seed);
    for (int i = 0; i < 200; ++i) program.step();
    CAPTURE(seed);
    REQUIRE(program.device.races == 0);
  }
}

TEST_CASE("lanes: a copy waits for its own segment's operators, and not for later ones") {
  Device device;
  Lanes lanes(device);
  Uses batch, weights;
  lanes.begin(1, 0);
  lanes.made(batch);
  lanes.made(weights);
  lanes.points();
  for (uint64_t message = 2; message < 10; ++message) {
    lanes.begin(message, 0);
    lanes.compute(weights, true);
  }
  const int marked = device.marked;
  lanes.begin(10, 0);
  lanes.copyIn(batch, {nullptr, 0}, [] {});
  CHECK(device.marked == marked + 1);  // the copy's own: message 1 has a mark already
  CHECK(device.waited == 1);
  lanes.begin(11, 1);  // message 1 is done
  lanes.copyIn(batch, {nullptr, 0}, [] {});
  CHECK(device.waited == 1);
}

TEST_CASE("lanes: operators wait for a copy once, and not for copies that read what they read") {
  Device device;
  Lanes lanes(device);
  Uses batch;
  lanes.begin(1, 0);
  lanes.made(batch);
  lanes.copyIn(batch, {nullptr, 0}, [] {});
  const int waited = device.waited;
  lanes.begin(2, 0);
  lanes.compute(batch, false);
  lanes.compute(batch, false);
  CHECK(device.waited == waited + 1);
  lanes.copyOut(batch, {nullptr, 0}, [] {});
  const int before = device.waited;
  lanes.begin(3, 0);
  lanes.compute(batch, false);
  CHECK(device.waited == before);
  lanes.compute(batch, true);
  CHECK(device.waited == before + 1);
}
