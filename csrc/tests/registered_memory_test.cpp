#include "worker/accelerator/registered_memory.h"

#include <doctest/doctest.h>

#include <set>
#include <utility>
#include <vector>

#include "worker/accelerator/host_device.h"

using shoal::worker::Accelerator;
using shoal::worker::Lane;
using shoal::worker::RegisteredMemory;
using shoal::worker::Ticket;

namespace {

constexpr uint64_t kPiece = RegisteredMemory::kPieceBytes;

class Device final : public Accelerator {
 public:
  c10::Device device() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  bool runsLate() const override { return true; }
  c10::Storage allocate(uint64_t) override { return {}; }
  void emptyCache() override {}
  void copyIn(Lane, void*, const void*, uint64_t) override {}
  void copyOut(Lane, void*, const void*, uint64_t) override {}
  void copyWithin(void*, const void*, uint64_t) override {}
  Ticket mark(Lane lane) override { return {lane, 0}; }
  void after(Lane, Ticket) override {}
  bool isPast(Ticket) override { return true; }
  void wait(Ticket) override {}
  bool registerHost(std::byte* data, uint64_t) override { return registered.insert(data).second; }
  void unregisterHost(std::byte* data) override { CHECK(registered.erase(data) == 1); }
  Held held() const override { return {0, 0}; }

  std::set<std::byte*> registered;
};

using Parts = std::vector<std::pair<uint64_t, uint64_t>>;

Parts copied(RegisteredMemory& memory, std::byte* data, uint64_t bytes, uint64_t now,
             uint64_t done) {
  Parts parts;
  memory.each(data, bytes, now, done,
              [&](uint64_t at, uint64_t part) { parts.push_back({at, part}); });
  return parts;
}

// Addresses are enough: nothing here touches the memory.
std::byte* const kRegion = reinterpret_cast<std::byte*>(uint64_t{1} << 40);

}  // namespace

TEST_CASE("registered memory: pieces are registered when a copy touches them, and once") {
  Device device;
  {
    RegisteredMemory memory(device, 8 * kPiece);
    memory.add(kRegion, 4 * kPiece + 100);
    CHECK(copied(memory, kRegion + 5, 10, 1, 0) == Parts{{0, 10}});
    CHECK(copied(memory, kRegion + 50, 10, 2, 0) == Parts{{0, 10}});
    CHECK(device.registered.size() == 1);
    // A copy over a border is cut there.
    CHECK(copied(memory, kRegion + kPiece - 4, 10, 3, 0) == Parts{{0, 4}, {4, 6}});
    CHECK(copied(memory, kRegion + 4 * kPiece, 100, 4, 0) == Parts{{0, 100}});
    CHECK(memory.bytes() == 2 * kPiece + 100);
  }
  CHECK(device.registered.empty());
}

TEST_CASE("registered memory: unknown memory is copied whole, and never registered") {
  Device device;
  RegisteredMemory memory(device, 8 * kPiece);
  memory.add(kRegion, kPiece);
  CHECK(copied(memory, kRegion - 8, 8, 1, 0) == Parts{{0, 8}});
  CHECK(copied(memory, kRegion + kPiece, 8, 1, 0) == Parts{{0, 8}});
  CHECK(device.registered.empty());
}

TEST_CASE("registered memory: at the limit what was used longest ago makes room, if it is done") {
  Device device;
  RegisteredMemory memory(device, 2 * kPiece);
  memory.add(kRegion, 8 * kPiece);
  const auto touch = [&](uint64_t piece, uint64_t now, uint64_t done) {
    copied(memory, kRegion + piece * kPiece, 1, now, done);
  };
  touch(0, 1, 0);
  touch(1, 2, 0);
  touch(0, 3, 0);
  touch(2, 4, 1);  // piece 1 may still be copied
  CHECK(device.registered == std::set<std::byte*>{kRegion, kRegion + kPiece});
  touch(2, 5, 2);
  CHECK(device.registered == std::set<std::byte*>{kRegion, kRegion + 2 * kPiece});
  CHECK(memory.bytes() == 2 * kPiece);
}
