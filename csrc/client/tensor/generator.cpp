#include "client/tensor/generator.h"

#include <ATen/Functions.h>
#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "client/space/devices.h"
#include "client/space/generator_homes.h"
#include "wire/cursor.h"
#include "wire/limits.h"

namespace shoal::client {
namespace {

std::atomic<uint64_t> g_next_number{wire::kFirstUserGenerator};

struct DefaultGenerators {
  std::mutex mutex;
  std::array<at::Generator, kDevicesMax> made;
  std::optional<uint64_t> seed;  // of those that are not made yet
};

DefaultGenerators& defaults() {
  static auto* generators = new DefaultGenerators;  // never destroyed: torch may ask until the end
  return *generators;
}

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  GeneratorImpl(c10::DeviceIndex index, uint64_t number, uint64_t seed)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, index),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        number_(number),
        seed_(seed) {}
  ~GeneratorImpl() override {
    if (number_ == 0 || session_ == 0) return;
    try {
      Session* session = Devices::get().byNumber(session_);
      if (session == nullptr || !session->usable()) return;
      const Lock held = session->lock();
      generatorHome(*session, number_, held).post(wire::GeneratorDrop{number_}, held);
    } catch (...) {
    }
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    // A device of no lease yet gets its seed when its session starts.
    if (device().index() < Devices::get().count()) {
      Session& session = Devices::get().session();
      session_ = session.number();
      sendSeed(session);
    }
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    const uint64_t fresh = c10::detail::getNonDeterministicRandom();
    set_current_seed(fresh);
    return fresh;
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "shoal generators have no offset; use set_state()");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "shoal generators have no offset; use get_state()");
  }

  void set_state(const c10::TensorImpl& state) override {
    const uint64_t bytes = static_cast<uint64_t>(state.numel()) * state.itemsize();
    TORCH_CHECK(
        state.device().is_cpu() && state.is_contiguous() && bytes < wire::kMessageBytesMax / 2,
        "a generator's state must be a contiguous CPU tensor");
    Session& session = attachedSession();
    const Lock held = session.lock();
    Member& stream = home(session, held);
    const auto* data = static_cast<const char*>(state.data());
    stream.post(wire::GeneratorSet{number(session), {{data, bytes}}}, held);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Session& session = const_cast<GeneratorImpl*>(this)->attachedSession();
    Member* stream;
    {
      const Lock held = session.lock();
      stream = &home(session, held);
    }
    const auto payload = stream->request(wire::GeneratorGet{number(session)});
    const std::string_view data = wire::readBody<wire::GeneratorReply>(payload).state;
    at::Tensor state = at::empty({static_cast<int64_t>(data.size())}, at::kByte);
    std::memcpy(state.data_ptr(), data.data(), data.size());
    return state.getIntrusivePtr();
  }

  // The present lease; a new session first gets this generator's seed.
  Session& attachedSession() {
    Session& session = Devices::get().sessionWith(device().index());
    if (session_ != session.number()) {
      session_ = session.number();
      sendSeed(session);
    }
    return session;
  }
  uint64_t number(const Session& session) const {
    return number_ != 0 ? number_ : defaultGeneratorNumber(session, device().index());
  }
  void sendSeed(Session& session) {
    const Lock held = session.lock();
    Member& stream = home(session, held);
    // torch.manual_seed seeds every device; one that was lost must not keep it from the others.
    if (stream.usable()) stream.post(wire::Seed{number(session), seed_}, held);
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index(), g_next_number++, seed_);
    copy->set_state(*get_state());
    return copy;
  }

  // Where the state is: a member's own generators stay, the lease's go to where they are needed.
  Member& home(Session& session, const Lock& held) const {
    if (device().index() > 0 || session.single()) return session.deviceMember(device().index());
    return generatorHome(session, number(session), held);
  }

  uint64_t number_;  // 0: the device's default one
  uint64_t seed_;
  uint32_t session_ = 0;  // where the worker knows this generator
};

}  // namespace

const at::Generator& defaultGenerator(c10::DeviceIndex index) {
  if (index < 0) index = Devices::current();
  TORCH_CHECK(index < kDevicesMax, "shoal:", static_cast<int>(index), " does not exist");
  DefaultGenerators& all = defaults();
  const std::lock_guard lock(all.mutex);
  auto& generator = all.made[static_cast<size_t>(index)];
  if (!generator.defined()) {
    const uint64_t seed = all.seed ? *all.seed : c10::detail::getNonDeterministicRandom();
    generator = at::make_generator<GeneratorImpl>(index, uint64_t{0}, seed);
  }
  return generator;
}

void seedDefaultGenerators(uint64_t seed) {
  std::vector<at::Generator> made;
  {
    DefaultGenerators& all = defaults();
    const std::lock_guard lock(all.mutex);
    all.seed = seed;
    for (const auto& generator : all.made) {
      if (generator.defined()) made.push_back(generator);
    }
  }
  for (auto& generator : made) generator.set_current_seed(seed);
}

at::Generator newGenerator(c10::DeviceIndex index) {
  if (index < 0) index = Devices::current();
  return at::make_generator<GeneratorImpl>(index, uint64_t{g_next_number++},
                                           uint64_t{c10::default_rng_seed_val});
}

uint64_t generatorNumber(const at::Generator& generator, Session& session, c10::DeviceIndex index) {
  TORCH_CHECK(generator.device().is_privateuseone(),
              "Expected a 'shoal' device type for generator "
              "but found '",
              generator.device().type(), "'");
  auto* impl = static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(&impl->attachedSession() == &session && generator.device().index() == index,
              "the generator is on ", generator.device(),
              ", but the operator runs on shoal:", static_cast<int>(index));
  return impl->number(session);
}

void seedNewSession(Session& session) {
  for (size_t i = session.single() ? 1 : 0; i <= session.size(); ++i) {
    const auto index = static_cast<c10::DeviceIndex>(i);
    const uint64_t seed = defaultGenerator(session.single() ? 0 : index).current_seed();
    session.deviceMember(index).post(wire::Seed{defaultGeneratorNumber(session, index), seed});
  }
}

}  // namespace shoal::client
