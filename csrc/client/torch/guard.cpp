// How torch asks for the current device, streams, events and synchronisation.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>

#include "client/member/events.h"
#include "client/space/devices.h"
#include "client/torch/kernels.h"
#include "wire/cursor.h"

namespace shoal::client {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

std::atomic<uint64_t> g_next_event{1};
thread_local c10::StreamId t_stream = 0;

// A point in an op stream. It is complete when the message that records it is done.
struct Event {
  uint64_t number;
  uint32_t session;
  c10::DeviceIndex index;
  c10::SmallVector<uint64_t, 2> sequences;  // by member of the device
  c10::SmallVector<uint64_t, 2> told;       // by member: the last failure that was told before it
};

Session* aliveSession(const Event& event) {
  Session* session = Devices::get().byNumber(event.session);
  return session != nullptr && session->usable() ? session : nullptr;
}

// The members of a device: all of the lease, or one.
c10::SmallVector<Member*, 2> membersOf(Session& session, c10::DeviceIndex index) {
  c10::SmallVector<Member*, 2> members;
  if (index > 0) {
    members.push_back(&session.deviceMember(index));
  } else {
    for (size_t i = 0; i < session.size(); ++i) members.push_back(&session.member(i));
  }
  return members;
}

// All torch streams of a device share its one op stream: order is program order, which every use of
// streams and events allows.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, Devices::current()}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_privateuseone(), "not a shoal device: ", device);
    Devices::get().want();
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < kDevicesMax, device, " does not exist");
    Devices::setCurrent(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) Devices::setCurrent(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), t_stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    // torch.Member() of a guest comes with the index that getDevice() gave. A program that names
    // the device gives none, or has come through setDevice().
    if (!Devices::get().wanted() && device.has_index()) {
      return c10::Stream(c10::Stream::DEFAULT, c10::kCPU);
    }
    Devices::get().want();
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before(c10::Stream::UNSAFE, {kType, stream.device_index()}, t_stream);
    t_stream = stream.id();
    return before;
  }
  // Autograd starts a thread for each of these at the program's first backward pass; attach()
  // starts those of a later lease. Users ask torch.shoal.device_count().
  c10::DeviceIndex deviceCount() const noexcept override { return Devices::get().namesEver(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  bool queryStream(const c10::Stream& stream) const override {
    const c10::DeviceIndex index = stream.device_index();
    return Devices::get().sessionWith(index).idle(index);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronizeDevice(stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    if (Devices::get().attached()) Devices::get().sessionWith(index).synchronize(index);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    // A guest's torch.Event() is ours in name only; this is what torch says without an accelerator.
    TORCH_CHECK(Devices::get().wanted(),
                "Cannot access accelerator device when none is available.");
    const c10::DeviceIndex index = stream.device_index();
    Session& session = Devices::get().sessionWith(index);
    if (*event == nullptr) *event = new Event{g_next_event++, 0, 0, {}, {}};
    auto* recorded = static_cast<Event*>(*event);
    recorded->session = session.number();
    recorded->index = index;
    recorded->sequences.clear();
    recorded->told.clear();
    for (Member* member : membersOf(session, index)) {
      recorded->told.push_back(member->lastReported());
      recorded->sequences.push_back(member->post(wire::EventRecord{recorded->number}));
    }
  }
  void block(void*, const c10::Stream&) const override {}  // one op stream: already in order
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto* recorded = static_cast<Event*>(event);
    Session* session = aliveSession(*recorded);
    if (session == nullptr) return true;
    const auto members = membersOf(*session, recorded->index);
    for (size_t i = 0; i < members.size(); ++i) {
      if (!members[i]->askDone(recorded->sequences[i])) return false;
    }
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto* recorded = static_cast<Event*>(event);
    Session* session = aliveSession(*recorded);
    if (session == nullptr) return;
    const auto members = membersOf(*session, recorded->index);
    for (size_t i = 0; i < members.size(); ++i) {
      members[i]->waitDone(recorded->sequences[i]);
      // Whoever waits for what failed learns of it, also if another thread asked first.
      members[i]->raiseReported(recorded->told[i], recorded->sequences[i]);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    auto* recorded = static_cast<Event*>(event);
    if (recorded == nullptr) return;
    try {
      if (Session* session = aliveSession(*recorded)) {
        for (Member* member : membersOf(*session, recorded->index)) {
          member->post(wire::EventDrop{recorded->number});
        }
      }
    } catch (...) {
    }
    delete recorded;
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return elapsedBetween(start, end).all_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static c10::Device indexed(c10::Device device) {
    return device.has_index() ? device : c10::Device(kType, Devices::current());
  }
};

}  // namespace

void registerGuard() {
  static const Guard guard;
  static const c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);
}

Elapsed elapsedBetween(const void* start, const void* end) {
  TORCH_CHECK(start != nullptr && end != nullptr,
              "Both events must be recorded before calculating elapsed time.");
  const auto* from = static_cast<const Event*>(start);
  const auto* to = static_cast<const Event*>(end);
  TORCH_CHECK(from->session == to->session && from->index == to->index,
              "the events are on different shoal devices");
  Session* session = aliveSession(*to);
  TORCH_CHECK(session != nullptr, "the lease that recorded the events has ended");
  Elapsed longest{0.0, 0.0};  // the whole is done when the last member is
  const auto members = membersOf(*session, to->index);
  for (size_t i = 0; i < members.size(); ++i) {
    members[i]->waitDone(to->sequences[i]);
    const Elapsed here = members[i]->elapsed(from->number, to->number);
    if (here.all_ms >= longest.all_ms) longest = here;
  }
  return longest;
}

}  // namespace shoal::client
