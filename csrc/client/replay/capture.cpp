#include "client/replay/capture.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "client/call/call_messages.h"
#include "client/space/devices.h"
#include "client/space/transfers.h"
#include "client/tensor/tensor.h"

namespace shoal::client {

using wire::Address;
using wire::Kind;

namespace {

constexpr uint64_t kUploadBytesMax = uint64_t{1} << 20;  // constants; batches come from outside
constexpr size_t kEventsMax = size_t{1} << 20;
// Messages that are posted in one go: others may want to post, and the ring must have room.
constexpr size_t kEventsAtOnce = 32;

template <typename T, typename Items>
uint32_t append(std::vector<T>& to, const Items& items) {
  const auto start = static_cast<uint32_t>(to.size());
  to.insert(to.end(), items.begin(), items.end());
  return start;
}

template <typename T, typename R>
c10::ArrayRef<T> slice(const std::vector<T>& from, const R& range) {
  return {from.data() + range.start, range.count};
}

bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type() && a.storage_offset() == b.storage_offset() &&
         a.storage().nbytes() == b.storage().nbytes();
}

}  // namespace

// --- capture

Capture::Capture(c10::DeviceIndex index) : index_(index) {
  Session& session = Devices::get().sessionWith(index);
  session_number_ = session.number();
  segments_.push_back({});  // symbol 0
  events_.reserve(2048);
  words_.reserve(size_t{1} << 14);
  const bool single = index > 0 && current_ == nullptr;
  capturing_ = single && session.observe(this, session.lock());
  if (capturing_) {
    current_ = this;
  } else {
    fail(single ? "another thread captures" : "it is not a single device of a lease");
  }
}

void Capture::stop() noexcept {
  if (!capturing_) return;
  capturing_ = false;
  if (current_ == this) current_ = nullptr;
  Session* session = Devices::get().byNumber(session_number_);
  if (session != nullptr) session->observe(nullptr, session->lock());
}

size_t Capture::mark() const {
  Session* session = capturing_ ? Devices::get().byNumber(session_number_) : nullptr;
  if (session == nullptr) return events_.size();
  const Lock held = session->lock();  // others may free what was captured
  return events_.size();
}

void Capture::fail(std::string why) {
  if (failure_.empty()) failure_ = std::move(why);
  failed_.store(true, std::memory_order_relaxed);
}

Capture::Symbol Capture::name(Address base, bool outside) {
  const uint32_t slot = wire::slotOf(base);
  if (slot >= by_slot_.size()) by_slot_.resize(std::max<size_t>(slot + 1, 2 * by_slot_.size()), 0);
  segments_.push_back({base, outside, !outside});
  return by_slot_[slot] = static_cast<Symbol>(segments_.size() - 1);
}

Capture::Symbol Capture::symbolOf(Address base) {
  const Symbol symbol = known(base);
  return symbol != 0 ? symbol : name(base, true);
}

void Capture::called(const OperatorInfo& info, const CallTemplate& call, uint64_t graph,
                     const std::vector<OutputMeta>& outputs, c10::ArrayRef<Address> made,
                     const Lock&) {
  if (!failure_.empty()) return;
  if (graph != 0) return fail(info.name + " keeps its graph at the device");
  if (call.hasGenerator()) return fail(info.name + " draws from a generator of its own");
  if (call.device().index() != index_) return fail(info.name + " runs on another device");
  if (events_.size() >= kEventsMax) return fail("it is too long");
  Call event{&info, call.hash(info), CallLines::current(), {}, {}, {}, {}, {}};
  const auto count = [](const auto& items) { return static_cast<uint32_t>(items.size()); };
  event.key = {append(words_, call.key()), count(call.key())};
  event.immediates = {append(words_, call.immediates()), count(call.immediates())};
  event.operands = {count(operands_), count(call.uses())};
  for (size_t i = 0; i < call.uses().size(); ++i) {
    const SegmentUse& use = call.uses()[i];
    const uint32_t position = call.addressPositions()[i];
    operands_.push_back(
        {symbolOf(use.base), position, call.immediates()[position] - use.base, use.writes});
  }
  event.outputs = {append(outputs_, outputs), count(outputs)};
  for (const OutputMeta& output : outputs) {
    if (output.kind == wire::OutputKind::kResized) return fail(info.name + " resizes a tensor");
  }
  event.made = {count(made_), count(made)};
  for (const Address address : made) made_.push_back(address == 0 ? 0 : known(address));
  events_.emplace_back(event);
}

void Capture::minted(Address address, uint64_t bytes, c10::DeviceIndex index) {
  if (!failure_.empty()) return;
  if (index != index_) return fail("a tensor is made on another device");
  events_.emplace_back(Mint{name(address, false), bytes});
}

// Of a segment from outside only the name is forgotten: its twin is not ours to free.
void Capture::released(Address address) noexcept {
  const Symbol symbol = known(address);
  if (symbol == 0) return;
  by_slot_[wire::slotOf(address)] = 0;
  segments_[symbol].kept = false;
  if (failed_.load(std::memory_order_relaxed) || segments_[symbol].outside) return;
  try {
    events_.emplace_back(Free{symbol});
  } catch (const std::bad_alloc&) {
    // Then it is freed when the replay ends.
  }
}

void Capture::uploaded(Address base, uint64_t offset, const void* from, uint64_t bytes,
                       const Lock&) {
  if (!failure_.empty()) return;
  if (bytes > kUploadBytesMax) return fail("a large tensor is sent to the device");
  Upload event{symbolOf(base), offset, {}};
  if (segments_[event.symbol].outside) return fail("a tensor from outside is changed by the host");
  event.bytes = {static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(bytes)};
  const auto* data = static_cast<const std::byte*>(from);
  bytes_.insert(bytes_.end(), data, data + bytes);
  events_.emplace_back(event);
}

void Capture::posted(Kind kind) {
  switch (kind) {
    case Kind::kCall:
    case Kind::kPrepare:
    case Kind::kForget:
    case Kind::kAllocate:
    case Kind::kBind:
    case Kind::kEventDrop:  // of whatever is collected meanwhile
    case Kind::kGeneratorDrop:
      return;
    default:
      fail(std::string("a message is sent beside the calls: ") +
           wire::kKindNames[static_cast<size_t>(kind)]);
  }
}

// --- replaying

Replay::Replay(std::shared_ptr<const Capture> capture, c10::DeviceIndex index,
               const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs,
               const std::vector<at::Tensor>& wanted)
    : capture_(std::move(capture)), index_(index) {
  if (!capture_->failure_.empty()) throw std::invalid_argument(capture_->failure_);
  session_ = &Devices::get().sessionWith(index);
  if (session_->number() != capture_->session_number_ || index == 0) {
    throw std::invalid_argument("the devices are not of one lease");
  }
  if (ours.size() != theirs.size()) throw std::invalid_argument("not as many tensors as captured");
  member_ = &session_->deviceMember(index);
  targets_.resize(capture_->segments_.size(), 0);
  for (size_t i = 0; i < ours.size(); ++i) pair(ours[i], theirs[i]);
  for (size_t symbol = 1; symbol < targets_.size(); ++symbol) {
    if (capture_->segments_[symbol].outside && targets_[symbol] == 0) {
      throw std::invalid_argument("it uses a tensor that is neither a weight nor of the batch");
    }
  }
  checkWanted(wanted);
}

void Replay::checkWanted(const std::vector<at::Tensor>& wanted) const {
  std::vector<bool> asked(capture_->segments_.size(), false);
  for (const at::Tensor& tensor : wanted) {
    const Address base = baseOf(tensor);
    const Symbol symbol = capture_->known(base);
    if (base != 0 && (symbol == 0 || capture_->segments_[symbol].outside)) {
      throw std::invalid_argument("a result was not made by it");
    }
    asked[symbol] = true;
  }
  for (size_t symbol = 1; symbol < asked.size(); ++symbol) {
    if (capture_->segments_[symbol].kept && !asked[symbol]) {
      throw std::invalid_argument("it keeps a tensor that is neither a gradient nor its loss");
    }
  }
}

void Replay::pair(const at::Tensor& ours, const at::Tensor& theirs) {
  const Address base = baseOf(ours);
  const Symbol symbol = base == 0 ? 0 : capture_->known(base);
  if (symbol == 0) return;  // it was not used
  if (theirs.device().index() != index_ || !alike(ours, theirs)) {
    throw std::invalid_argument("a tensor is not laid out as the captured one");
  }
  Address& target = targets_[symbol];
  if (target != 0 && target != baseOf(theirs)) {
    throw std::invalid_argument("tensors that share memory are apart on the other device");
  }
  target = baseOf(theirs);
}

Replay::~Replay() {
  // The lease may have ended meanwhile, and its session with it.
  Session* session = Devices::get().byNumber(capture_->session_number_);
  if (session == nullptr) return;
  for (Symbol symbol = 1; symbol < targets_.size(); ++symbol) {
    const bool ours = !capture_->segments_[symbol].outside && taken_.count(symbol) == 0;
    if (ours && targets_[symbol] != 0) session->release(targets_[symbol]);
  }
}

void Replay::until(size_t mark) {
  const Observer::Aside aside;
  const uint64_t line = CallLines::current();
  const size_t end = std::min(mark, capture_->events_.size());
  while (at_ < end) {
    member_->awaitRoom();
    if (const auto* sent = std::get_if<Capture::Upload>(&capture_->events_[at_])) {
      ++at_;
      upload(*session_, targets_[sent->symbol], sent->offset,
             capture_->bytes_.data() + sent->bytes.start, sent->bytes.count, false);
      continue;
    }
    const Lock held = session_->lock();
    for (size_t n = 0; n < kEventsAtOnce && at_ < end; ++n) {
      const Capture::Event& event = capture_->events_[at_];
      if (std::holds_alternative<Capture::Upload>(event)) break;
      ++at_;
      if (const auto* call = std::get_if<Capture::Call>(&event)) {
        replay(*call, held);
      } else if (const auto* mint = std::get_if<Capture::Mint>(&event)) {
        replay(*mint, held);
      } else {
        replay(std::get<Capture::Free>(event), held);
      }
    }
  }
  CallLines::set(line);
}

void Replay::replay(const Capture::Call& call, const Lock& held) {
  const Capture& from = *capture_;
  const auto key = slice(from.words_, call.key);
  member_->bringSettings(call.info->reads_precisions, held);
  CallCache& cache = member_->cache();
  CachedCall* cached = cache.find(call.hash, call.info, key.data(), key.size());
  if (cached == nullptr) {
    if (cache.full()) {
      cache.clear();
      member_->post(wire::Forget{}, held);
    }
    cached = cache.insert(call.hash, call.info, key.data(), key.size());
  }
  if (!cached->known) {  // new here, or a call whose result this device was asked for until now
    cached->known = true;
    cached->outputs = slice(from.outputs_, call.outputs).vec();
    postPrepare(*member_, *call.info, key, *cached, held);
  }
  immediates_ = slice(from.words_, call.immediates).vec();
  uses_.clear();
  for (const Capture::Operand& operand : slice(from.operands_, call.operands)) {
    const Address base = targets_[operand.symbol];
    immediates_[operand.position] = base + operand.offset;
    uses_.push_back({base, operand.writes});
  }
  made_.clear();
  for (const Symbol symbol : slice(from.made_, call.made)) {
    made_.push_back(symbol == 0 ? 0 : targets_[symbol]);
  }
  CallLines::set(call.line);
  session_->makeRoom(*member_, uses_, freshBytes(cached->outputs), held);
  postCall(*session_, *member_, cached->id, {immediates_, uses_, made_}, held);
}

void Replay::replay(const Capture::Mint& mint, const Lock& held) {
  targets_[mint.symbol] = session_->mint(mint.bytes, index_, held);
}

void Replay::replay(const Capture::Free& free, const Lock& held) {
  if (taken_.count(free.symbol) > 0) return;  // its new owner frees it
  const Address target = std::exchange(targets_[free.symbol], 0);
  if (target != 0) session_->release(target, held);
}

at::Tensor Replay::tensor(const at::Tensor& original) {
  const c10::Device device(c10::DeviceType::PrivateUse1, index_);
  const Address base = baseOf(original);
  c10::Storage storage;
  if (base == 0) {
    storage = makeStorage(0, 0, device);
  } else {
    const Symbol symbol = capture_->known(base);
    TORCH_CHECK(symbol != 0 && targets_[symbol] != 0, "shoal: this tensor was not replayed");
    const auto [found, fresh] = taken_.try_emplace(symbol);
    if (fresh) found->second = makeStorage(targets_[symbol], original.storage().nbytes(), device);
    storage = found->second;
  }
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), original.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(original.sizes(), original.strides(),
                                                    original.storage_offset());
  return made;
}

}  // namespace shoal::client
