#include "worker/execute/executor.h"

#include <ATen/Functions.h>

#include <cstring>

#include "base/byte_units.h"
#include "base/clock.h"
#include "transport/ring.h"
#include "wire/limits.h"
#include "worker/failure/failure.h"

namespace shoal::worker {

using wire::Kind;
using wire::ProtocolError;

namespace {

constexpr uint64_t kAddBytes = uint64_t{128} << 10;

void setState(at::Generator& generator, const void* data, uint64_t bytes) {
  at::Tensor state = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  if (bytes > 0) std::memcpy(state.data_ptr(), data, bytes);
  generator.set_state(state);
}

}  // namespace

Executor::Executor(ExecutorOptions options, const memory::SharedMemory& host, Arena* arena,
                   ReplySink& replies)
    : host_(host),
      arena_(arena),
      memory_bytes_(options.memory_bytes),
      peers_(options.peers),
      shared_(options.shared),
      reader_(options.reader),
      replies_(replies),
      memory_(options.device),
      events_(options.device, options.progress),
      generators_(options.device),
      segments_({options.session,
                 arena,
                 &host,
                 options.peers,
                 options.places,
                 options.swap,
                 {options.memory_bytes, options.least_recent}}),
      calls_(options.device, options.speed, segments_, generators_, options.run_operator) {
  if (options.requests != nullptr) {
    segments_.lookAhead(*options.requests, [this](uint32_t id) { return calls_.addressWords(id); });
  }
  if (peers_ != nullptr && peers_->countHere() < peers_->count() && options.requests != nullptr) {
    fetch_ahead_ = std::make_unique<FetchAhead>(*options.requests, *peers_);
  }
}

void Executor::handle(const std::vector<uint64_t>& message, uint64_t sequence) {
  const uint16_t kind = wire::headerKind(message[0]);
  kind_ = static_cast<Kind>(kind);
  const bool expected =
      kind < wire::kKindsEnd && wire::expectsReply(kind_, wire::headerFlags(message[0]));
  sequence_ = sequence;
  replied_ = false;
  segments_.begin(sequence);
  try {
    run(message);
    if (expected && !replied_) reply({});
  } catch (const transport::PeerLost&) {
    throw;
  } catch (...) {
    fail(std::current_exception(), expected && !replied_);
  }
  if (fetch_ahead_ != nullptr) fetch_ahead_->after(sequence);
}

void Executor::fail(std::exception_ptr error, bool reply_now) {
  std::shared_ptr<const Failure> failure;
  try {
    std::rethrow_exception(error);
  } catch (const PoisonedError& poisoned) {
    // A consequence: it has the text and the call of its cause.
    Failure consequence = *poisoned.cause();
    failure = std::make_shared<const Failure>(std::move(consequence));
  } catch (...) {
    const bool in_call = kind_ == Kind::kCall || kind_ == Kind::kBackward;
    failure = describe(std::current_exception(), sequence_, in_call ? calls_.operatorName() : "");
  }
  if (!reply_now) {
    if (pending_.failure == nullptr) pending_ = {std::move(failure), sequence_};
    return;
  }
  if (!replyPending()) replyFailure(*failure, /*shown_in=*/0);  // the older one first
}

bool Executor::replyPending() {
  if (pending_.failure == nullptr) return false;
  const Pending pending = std::exchange(pending_, {});
  replyFailure(*pending.failure, pending.at);
  return true;
}

void Executor::reply(const std::vector<uint64_t>& payload) {
  if (replyPending()) return;
  replied_ = true;
  replies_.send(kind_, wire::ErrorKind::kNone, sequence_, payload);
}

// `shown_in`: the message in which the failure showed; 0: the one that is replied to.
void Executor::replyFailure(const Failure& failure, uint64_t shown_in) {
  replied_ = true;
  std::string both = failure.text.substr(0, wire::kErrorTextBytesMax);
  wire::ErrorReply error{failure.sequence, shown_in, both.size(), 0, {}};
  both.append(failure.operator_name, 0, wire::kOperatorNameBytesMax);
  error.name_bytes = both.size() - error.text_bytes;
  error.both = both;
  replies_.send(kind_, failure.kind, sequence_, wire::body(error));
}

void Executor::run(wire::Words message) {
  using namespace wire;  // the messages' names
  const Overloaded handlers{
      [&](const Prepare& m) { calls_.prepare(m, sequence_); },
      [&](const Call& m) {
        if (const auto learned = calls_.call(m, sequence_)) reply(*learned);
      },
      [&](const Bind& m) { calls_.bindLearned(m); },
      [&](const Allocate& m) { allocate(m, "empty"); },
      [&](const Free& m) {
        for (const Address address : m.segments) segments_.release(address);
      },
      [&](const Adopt& m) { adopt(m); },
      [&](const Write& m) { write(m); },
      [&](const CopyIn& m) { copyIn(m); },
      [&](const CopyOut& m) { copyOut(m); },
      [&](const CopyWithin& m) { copyWithin(m); },
      [&](const Load& m) { load(m); },
      [&](const Read& m) { read(m); },
      [&](const Locate& m) { locate(m); },
      [&](const Seed& m) { generators_.get(m.generator).set_current_seed(m.seed); },
      [&](const GeneratorGet& m) { generatorGet(m); },
      [&](const GeneratorSet& m) { generatorSet(m); },
      [&](const GeneratorDrop& m) { generators_.drop(m.generator); },
      [&](const GeneratorSave& m) { generatorSave(m); },
      [&](const GeneratorLoad& m) { generatorLoad(m); },
      [&](const EventRecord& m) { recordEvent(m.event); },
      [&](const EventElapsed& m) {
        const auto elapsed = events_.elapsed(m.start, m.end);
        answer(ElapsedReply{elapsed.all_ms, elapsed.waited_ms});
      },
      [&](const EventQuery& m) { answer(EventQueryReply{events_.isPast(m.event)}); },
      [&](const EventDrop& m) { events_.drop(m.event); },
      [&](const Sync&) { memory_.synchronize(); },
      [&](const Stats&) { answer(stats()); },
      [&](const Forget&) { calls_.forget(); },
      [&](const Backward& m) { calls_.backward(m, sequence_); },
      [&](const GraphDrop& m) { calls_.dropGraph(m.graph); },
      [&](const Export& m) { exportTo(m); },
      [&](const Fetch& m) { fetch(m); },
      [&](const FetchAdd& m) { fetchAdd(m); },
      [&](const Share& m) { share(m); },
      [&](const Open& m) { open(m); },
      [&](const Unshare& m) { unshare(m); },
      [&](const Trim&) {
        if (arena_ != nullptr) arena_->trim();
        segments_.trim();
        memory_.emptyCache();
      },
  };
  if (!Messages::decode(message, handlers)) {
    throw ProtocolError("message kind " + std::to_string(headerKind(message[0])) +
                        " does not exist");
  }
}

std::byte* Executor::hostRange(uint64_t offset, uint64_t bytes) const {
  if (offset > host_.bytes() || bytes > host_.bytes() - offset) {
    throw ProtocolError("a host range lies outside of the shared region");
  }
  return host_.data() + offset;
}

Executor::Range Executor::deviceRange(wire::Address address, uint64_t bytes, bool writes) {
  const Place place = segments_.use(address, bytes, writes);
  if (place.segment->poison != nullptr) throw PoisonedError(place.segment->poison);
  const c10::Storage& storage = place.segment->storage;
  return {static_cast<std::byte*>(storage.mutable_data()) + place.offset, storage};
}

void Executor::allocate(const wire::Allocate& message, const char* what) {
  const auto [address, bytes] = message;
  try {
    segments_.bind(address, memory_.allocate(bytes), bytes);
  } catch (const transport::PeerLost&) {
    throw;  // the client is gone
  } catch (...) {
    segments_.poison(address, describe(std::current_exception(), sequence_, what));
    throw;
  }
}

void Executor::adopt(const wire::Adopt& message) {
  const uint64_t bytes = message.bytes;
  std::byte* host = hostRange(message.host, bytes);
  if (!memory_.isHost()) throw ProtocolError("only a CPU device can adopt host memory");
  const uint64_t limit = memory_bytes_ + segments_.swapBytes();
  TORCH_CHECK_WITH(OutOfMemoryError, bytes <= limit && segments_.boundBytes() <= limit - bytes,
                   "the lease is out of memory. Tried to allocate ", memory::readable(bytes), "; ",
                   memory::readable(segments_.boundBytes()), " of ", memory::readable(limit),
                   " are in use.");
  segments_.adopt(message.address, host, bytes);
  bytes_in_ += bytes;
}

void Executor::write(const wire::Write& message) {
  const uint64_t bytes = message.data.size();
  memory_.copyIn(deviceRange(message.address, bytes, true).data, message.data.data(), bytes);
  bytes_in_ += bytes;
}

void Executor::copyIn(const wire::CopyIn& message) {
  const std::byte* host = hostRange(message.host, message.bytes);
  memory_.copyIn(deviceRange(message.address, message.bytes, true).data, host, message.bytes);
  bytes_in_ += message.bytes;
}

void Executor::copyOut(const wire::CopyOut& message) {
  std::byte* host = hostRange(message.host, message.bytes);
  memory_.copyOut(host, deviceRange(message.address, message.bytes, false).data, message.bytes);
  bytes_out_ += message.bytes;
}

// Poisons the target if the copy fails: some of its bytes may be there, and the stream does not
// want the old ones.
template <typename Copy>
void Executor::copyInto(wire::Address to, uint64_t bytes, const Copy& copy) {
  segments_.resolve(to, bytes);  // an invalid message changes nothing
  try {
    copy();
  } catch (const transport::PeerLost&) {
    throw;  // the client is gone
  } catch (const PoisonedError& poisoned) {
    segments_.poisonAt(to, poisoned.cause());
    throw;
  } catch (...) {
    segments_.poisonAt(to, describe(std::current_exception(), sequence_, "a copy"));
    throw;
  }
}

void Executor::copyWithin(const wire::CopyWithin& message) {
  const auto [to, from, bytes] = message;
  segments_.resolve(from, bytes);
  copyInto(to, bytes, [&, to = to, from = from, bytes = bytes] {
    const Range target = deviceRange(to, bytes, true);
    memory_.copyWithin(target.data, deviceRange(from, bytes, false).data, bytes);
  });
}

void Executor::load(const wire::Load& message) {
  if (reader_ == nullptr) throw ProtocolError("this session has no reader");
  const uint64_t bytes = message.bytes;
  copyInto(message.address, bytes, [&] {
    const auto memory = reader_->get(message.reader);
    if (message.offset > memory->bytes() || bytes > memory->bytes() - message.offset) {
      throw ProtocolError("a range lies outside of the reader's memory");
    }
    memory_.copyIn(deviceRange(message.address, bytes, true).data, memory->data() + message.offset,
                   bytes);
  });
  bytes_in_ += bytes;
}

void Executor::read(const wire::Read& message) {
  std::vector<uint64_t> data((message.bytes + 7) / 8);
  memory_.copyOut(data.data(), deviceRange(message.address, message.bytes, false).data,
                  message.bytes);
  bytes_out_ += message.bytes;
  answer(wire::DataReply{data});
}

void Executor::locate(const wire::Locate& message) {
  const std::byte* data = deviceRange(message.address, message.bytes, false).data;
  bytes_out_ += message.bytes;
  // The location table says where the segment is. It does not hold shared memory, of which the
  // client asks for a copy.
  if (segments_.resolve(message.address, message.bytes).segment->shared != nullptr) return;
  if ((arena_ == nullptr || !arena_->region().contains(data)) && !host_.contains(data)) {
    throw ProtocolError("the segment is not in shared memory");
  }
}

void Executor::exportTo(const wire::Export& message) {
  checkPeer(message.peer);
  segments_.addReader(message.address, {message.peer, message.reading}, sequence_);
}

void Executor::checkPeer(uint32_t peer) const {
  if (peers_ == nullptr || peer >= peers_->count()) throw ProtocolError("no such peer");
}

void Executor::fetch(const wire::Fetch& message) {
  checkPeer(message.peer);
  const bool replica = message.to == message.from && baseOf(message) == message.from;
  if (replica) allocate({message.to, message.bytes}, "a copy");
  copyInto(message.to, message.bytes, [&] {
    const Range target = deviceRange(message.to, message.bytes, true);
    fetchFrom(message.peer, requestOf(message, sequence_), target.data);
  });
  bytes_peer_ += message.bytes;
}

void Executor::fetchAdd(const wire::FetchAdd& message) {
  const wire::Fetch& fetch = message.fetch;
  checkPeer(fetch.peer);
  const auto type = static_cast<at::ScalarType>(message.dtype);
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16) {
    throw ProtocolError("only floating point numbers are added");
  }
  const uint64_t item_bytes = at::elementSize(type);
  if (arena_ == nullptr || fetch.bytes % item_bytes != 0 || fetch.to % item_bytes != 0) {
    throw ProtocolError("no numbers that can be added here");
  }
  copyInto(fetch.to, fetch.bytes, [&] { addFrom(fetch, type); });
  bytes_peer_ += fetch.bytes;
}

void Executor::addFrom(const wire::Fetch& fetch, at::ScalarType type) {
  const Range target = deviceRange(fetch.to, fetch.bytes, true);
  const bool elsewhere = peers_->toldBy(fetch.peer) != nullptr;
  // Add a chunk only when it is complete: a read may repeat it. Chunks stay in the cache. From
  // another machine everything comes at once.
  const uint64_t piece_bytes = elsewhere ? fetch.bytes : std::min(fetch.bytes, kAddBytes);
  const c10::Storage piece = memory_.allocate(piece_bytes);
  auto* const buffer = static_cast<std::byte*>(piece.mutable_data());
  const auto numbers = [type](void* data, uint64_t count_bytes) {
    return at::from_blob(data, {static_cast<int64_t>(count_bytes / at::elementSize(type))}, type);
  };
  for (uint64_t at = 0; at < fetch.bytes; at += piece_bytes) {
    const uint64_t now_bytes = std::min(piece_bytes, fetch.bytes - at);
    fetchFrom(fetch.peer, requestOf(fetch, sequence_, at, now_bytes), buffer);
    numbers(target.data + at, now_bytes).add_(numbers(buffer, now_bytes));
  }
}

void Executor::fetchFrom(uint32_t peer, const network::ReadRequest& request, std::byte* to) {
  const auto copy = [&](const std::byte* from, uint64_t at, uint64_t piece_bytes) {
    memory_.copyIn(to + at, from, piece_bytes);
  };
  if (peers_->read(peer, request, copy)) return;
  throw PeerFailed("the value was to come from device " + peers_->name(peer) +
                   " of this lease, where it could not be made");
}

void Executor::generatorSave(const wire::GeneratorSave& message) {
  const at::Tensor state = generators_.get(message.generator).get_state();
  wire::SavedGenerator saved{state.nbytes(), {}};
  TORCH_CHECK(saved.bytes <= saved.state.size(), "a generator's state is too large");
  std::memcpy(saved.state.data(), state.data_ptr(), saved.bytes);
  segments_.bind(message.address, memory_.allocate(sizeof saved), sizeof saved);
  memory_.copyIn(deviceRange(message.address, sizeof saved, true).data, &saved, sizeof saved);
}

void Executor::generatorLoad(const wire::GeneratorLoad& message) {
  auto& generator = generators_.get(message.generator);
  wire::SavedGenerator saved;
  memory_.copyOut(&saved, deviceRange(message.address, sizeof saved, false).data, sizeof saved);
  if (saved.bytes == 0 || saved.bytes > saved.state.size()) {
    throw ProtocolError("the segment does not hold a generator's state");
  }
  setState(generator, saved.state.data(), saved.bytes);
}

void Executor::generatorGet(const wire::GeneratorGet& message) {
  const at::Tensor state = generators_.get(message.generator).get_state();
  answer(wire::GeneratorReply{{static_cast<const char*>(state.const_data_ptr()), state.nbytes()}});
}

void Executor::generatorSet(const wire::GeneratorSet& message) {
  const std::string_view state = message.state.state;
  setState(generators_.get(message.generator), state.data(), state.size());
}

void Executor::recordEvent(uint64_t event) {
  const transport::Passed now{nowNs(), peers_ == nullptr ? 0 : peers_->waitedNs()};
  events_.record(event, now);
}

wire::StatsReply Executor::stats() const {
  const SwapCounters paged = segments_.counters();
  return {.used_bytes = arena_ != nullptr ? arena_->usedBytes() : 0,
          .reserved_bytes = arena_ != nullptr ? arena_->reservedBytes() : 0,
          .segment_bytes = segments_.boundBytes(),
          .segments = segments_.count(),
          .calls = calls_.count(),
          .busy_ns = static_cast<uint64_t>(calls_.busyNs()),
          .bytes_in = bytes_in_,
          .bytes_out = bytes_out_,
          .bytes_peer = bytes_peer_,
          .paged_in = paged.in_bytes,
          .paged_out = paged.out_bytes,
          .paged_disk = paged.disk_bytes,
          .dropped = paged.dropped_bytes,
          .prefetched = paged.prefetched_bytes,
          .stall_ns = static_cast<uint64_t>(paged.stall_ns),
          .swapped_bytes = segments_.swappedBytes(),
          .peer_ahead = peers_ != nullptr ? peers_->aheadBytes() : 0};
}

}  // namespace shoal::worker
