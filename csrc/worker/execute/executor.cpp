#include "worker/execute/executor.h"

#include <ATen/Functions.h>

#include <cstring>

#include "base/byte_units.h"
#include "transport/ring.h"
#include "wire/limits.h"
#include "worker/failure/failure.h"

namespace shoal::worker {

using wire::Kind;
using wire::ProtocolError;
using wire::Reader;

namespace {

constexpr uint64_t kAddBytes = uint64_t{128} << 10;

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
  Reader reader(message.data() + 1, message.size() - 1);
  const uint16_t kind = wire::headerKind(message[0]);
  const uint16_t flags = wire::headerFlags(message[0]);
  kind_ = static_cast<Kind>(kind);
  sequence_ = sequence;
  replied_ = false;
  segments_.begin(sequence);
  try {
    if (kind == 0 || kind > static_cast<uint16_t>(Kind::kLast)) {
      throw ProtocolError("message kind " + std::to_string(kind) + " does not exist");
    }
    dispatch(kind_, flags, reader);
    if (wire::expectsReply(kind_, flags) && !replied_) reply({});
  } catch (const transport::PeerLost&) {
    throw;
  } catch (...) {
    fail(std::current_exception(), wire::expectsReply(kind_, flags) && !replied_);
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
  if (!replyPending()) replyFailure(*failure, /*at=*/0);  // the older one first
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

// `at` is the message in which it showed; 0: the one that this replies to.
void Executor::replyFailure(const Failure& failure, uint64_t at) {
  replied_ = true;
  std::string text = failure.text.substr(0, wire::kErrorTextBytesMax);
  const std::string name = failure.operator_name.substr(0, wire::kOperatorNameBytesMax);
  std::vector<uint64_t> payload{failure.sequence, at, text.size(), name.size()};
  text.append(name);
  const size_t head = payload.size();
  payload.resize(head + (text.size() + 7) / 8);
  if (!text.empty()) std::memcpy(payload.data() + head, text.data(), text.size());
  replies_.send(kind_, failure.kind, sequence_, payload);
}

void Executor::dispatch(Kind kind, uint16_t flags, Reader& reader) {
  switch (kind) {
    case Kind::kPrepare:
      return calls_.prepare(reader, sequence_);
    case Kind::kCall:
      if (const auto learned = calls_.call(flags, reader, sequence_)) reply(*learned);
      return;
    case Kind::kBind:
      return calls_.bindLearned(reader);
    case Kind::kAllocate: {
      const wire::Address address = reader.word("address");
      return allocate(address, reader.word("bytes"), "empty");
    }
    case Kind::kFree:
      while (reader.remaining() > 0) segments_.release(reader.word("address"));
      return;
    case Kind::kAdopt:
      return adopt(reader);
    case Kind::kWrite:
      return write(reader);
    case Kind::kCopyIn:
      return copyHost(reader, /*into_device=*/true);
    case Kind::kCopyOut:
      return copyHost(reader, /*into_device=*/false);
    case Kind::kCopyWithin:
      return copyWithin(reader);
    case Kind::kLoad:
      return load(reader);
    case Kind::kRead:
      return read(reader);
    case Kind::kLocate:
      return locate(reader);
    case Kind::kSeed: {
      auto& generator = generators_.get(reader.word("generator"));
      return generator.set_current_seed(reader.word("seed"));
    }
    case Kind::kGeneratorGet:
      return generatorGet(reader);
    case Kind::kGeneratorSet:
      return generatorSet(reader);
    case Kind::kGeneratorDrop:
      return generators_.drop(reader.word("generator"));
    case Kind::kEventRecord:
      return recordEvent(reader.word("event"));
    case Kind::kEventElapsed: {
      const uint64_t start = reader.word("event");
      const auto elapsed = events_.elapsed(start, reader.word("event"));
      return reply({wire::asWord(elapsed.all_ms), wire::asWord(elapsed.waited_ms)});
    }
    case Kind::kEventQuery:
      return reply({events_.isPast(reader.word("event")) ? 1u : 0u});
    case Kind::kEventDrop:
      return events_.drop(reader.word("event"));
    case Kind::kSync:
      return memory_.synchronize();
    case Kind::kStats:
      return stats();
    case Kind::kForget:
      return calls_.forget();
    case Kind::kBackward:
      return calls_.backward(reader, sequence_);
    case Kind::kGraphDrop:
      return calls_.dropGraph(reader.word("graph"));
    case Kind::kExport:
      return exportTo(reader);
    case Kind::kFetch:
      return fetch(reader);
    case Kind::kFetchAdd:
      return fetchAdd(reader);
    case Kind::kGeneratorSave:
      return generatorSave(reader);
    case Kind::kGeneratorLoad:
      return generatorLoad(reader);
    case Kind::kShare:
      return share(reader);
    case Kind::kOpen:
      return open(reader);
    case Kind::kUnshare:
      return unshare(reader);
    case Kind::kTrim:
      if (arena_ != nullptr) arena_->trim();
      segments_.trim();
      return memory_.emptyCache();
    case Kind::kPad:
      break;
  }
  throw ProtocolError("padding is no message");
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

void Executor::allocate(wire::Address address, uint64_t bytes, const char* what) {
  try {
    segments_.bind(address, memory_.allocate(bytes), bytes);
  } catch (const transport::PeerLost&) {
    throw;  // the client is gone
  } catch (...) {
    segments_.poison(address, describe(std::current_exception(), sequence_, what));
    throw;
  }
}

void Executor::adopt(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  std::byte* host = hostRange(reader.word("host offset"), bytes);
  if (!memory_.isHost()) throw ProtocolError("only a CPU device can adopt host memory");
  const uint64_t limit = memory_bytes_ + segments_.swapBytes();
  TORCH_CHECK_WITH(OutOfMemoryError, bytes <= limit && segments_.boundBytes() <= limit - bytes,
                   "the lease is out of memory. Tried to allocate ", memory::readable(bytes), "; ",
                   memory::readable(segments_.boundBytes()), " of ", memory::readable(limit),
                   " are in use.");
  segments_.adopt(address, host, bytes);
  bytes_in_ += bytes;
}

void Executor::write(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  const auto data = reader.bytes(bytes, wire::kInlineBytesMax, "data");
  memory_.copyIn(deviceRange(address, bytes, true).data, data.data(), bytes);
  bytes_in_ += bytes;
}

void Executor::copyHost(Reader& reader, bool into_device) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  std::byte* host = hostRange(reader.word("host offset"), bytes);
  const Range device = deviceRange(address, bytes, into_device);
  if (into_device) {
    memory_.copyIn(device.data, host, bytes);
    bytes_in_ += bytes;
  } else {
    memory_.copyOut(host, device.data, bytes);
    bytes_out_ += bytes;
  }
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

void Executor::copyWithin(Reader& reader) {
  const wire::Address to = reader.word("destination");
  const wire::Address from = reader.word("source");
  const uint64_t bytes = reader.word("bytes");
  segments_.resolve(from, bytes);
  copyInto(to, bytes, [&] {
    const Range target = deviceRange(to, bytes, true);
    memory_.copyWithin(target.data, deviceRange(from, bytes, false).data, bytes);
  });
}

void Executor::load(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  const uint64_t number = reader.word("reader");
  const uint64_t offset = reader.word("offset");
  if (reader_ == nullptr) throw ProtocolError("this session has no reader");
  copyInto(address, bytes, [&] {
    const auto memory = reader_->get(number);
    if (offset > memory->bytes() || bytes > memory->bytes() - offset) {
      throw ProtocolError("a range lies outside of the reader's memory");
    }
    memory_.copyIn(deviceRange(address, bytes, true).data, memory->data() + offset, bytes);
  });
  bytes_in_ += bytes;
}

void Executor::read(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  if (bytes > wire::kInlineBytesMax) throw ProtocolError("too many bytes for an inline read");
  std::vector<uint64_t> payload((bytes + 7) / 8);
  memory_.copyOut(payload.data(), deviceRange(address, bytes, false).data, bytes);
  bytes_out_ += bytes;
  reply(payload);
}

void Executor::locate(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  const std::byte* data = deviceRange(address, bytes, false).data;
  bytes_out_ += bytes;
  // The location table says where it is. Shared memory is not in the table: the client then asks
  // for a copy.
  if (segments_.resolve(address, bytes).segment->shared != nullptr) return;
  if ((arena_ == nullptr || !arena_->region().contains(data)) && !host_.contains(data)) {
    throw ProtocolError("the segment is not in shared memory");
  }
}

void Executor::exportTo(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t peer = reader.word("peer");
  const uint64_t sequence = reader.word("sequence");
  if (peers_ == nullptr || peer >= peers_->count()) throw ProtocolError("no such peer");
  segments_.addReader(address, {static_cast<uint32_t>(peer), sequence}, sequence_);
}

Fetch Executor::fetchOf(Reader& reader) const {
  const Fetch fetch = Fetch::of(reader);
  if (peers_ == nullptr || fetch.peer >= peers_->count()) throw ProtocolError("no such peer");
  return fetch;
}

void Executor::fetch(Reader& reader) {
  const Fetch fetch = fetchOf(reader);
  const bool replica = fetch.to == fetch.from && fetch.base() == fetch.from;
  if (replica) allocate(fetch.to, fetch.bytes, "a copy");
  copyInto(fetch.to, fetch.bytes, [&] {
    const Range target = deviceRange(fetch.to, fetch.bytes, true);
    fetchFrom(fetch.peer, fetch.request(sequence_), target.data);
  });
  bytes_peer_ += fetch.bytes;
}

void Executor::fetchAdd(Reader& reader) {
  const Fetch fetch = fetchOf(reader);
  const auto type = static_cast<at::ScalarType>(reader.word("type"));
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

void Executor::addFrom(const Fetch& fetch, at::ScalarType type) {
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
    fetchFrom(fetch.peer, fetch.piece(at, now_bytes, sequence_), buffer);
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

void Executor::generatorSave(Reader& reader) {
  const at::Tensor state = generators_.get(reader.word("generator")).get_state();
  const wire::Address address = reader.word("address");
  TORCH_CHECK(state.nbytes() + 8 <= wire::kGeneratorBytes, "a generator's state is too large");
  std::vector<std::byte> saved(wire::kGeneratorBytes);
  const uint64_t bytes = state.nbytes();
  std::memcpy(saved.data(), &bytes, 8);
  std::memcpy(saved.data() + 8, state.data_ptr(), bytes);
  segments_.bind(address, memory_.allocate(wire::kGeneratorBytes), wire::kGeneratorBytes);
  memory_.copyIn(deviceRange(address, wire::kGeneratorBytes, true).data, saved.data(),
                 saved.size());
}

void Executor::generatorLoad(Reader& reader) {
  auto& generator = generators_.get(reader.word("generator"));
  const wire::Address address = reader.word("address");
  std::vector<std::byte> saved(wire::kGeneratorBytes);
  memory_.copyOut(saved.data(), deviceRange(address, saved.size(), false).data, saved.size());
  uint64_t bytes = 0;
  std::memcpy(&bytes, saved.data(), 8);
  if (bytes == 0 || bytes > saved.size() - 8) throw ProtocolError("this is no generator's state");
  at::Tensor state = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  std::memcpy(state.data_ptr(), saved.data() + 8, bytes);
  generator.set_state(state);
}

void Executor::generatorGet(Reader& reader) {
  const at::Tensor state = generators_.get(reader.word("generator")).get_state();
  std::vector<uint64_t> payload{state.nbytes()};
  payload.resize(1 + (state.nbytes() + 7) / 8);
  std::memcpy(payload.data() + 1, state.data_ptr(), state.nbytes());
  reply(payload);
}

void Executor::generatorSet(Reader& reader) {
  auto& generator = generators_.get(reader.word("generator"));
  const auto data = reader.bytes(reader.word("bytes"), wire::kMessageBytesMax, "generator state");
  at::Tensor state = at::empty({static_cast<int64_t>(data.size())}, at::kByte);
  if (!data.empty()) std::memcpy(state.data_ptr(), data.data(), data.size());
  generator.set_state(state);
}

void Executor::recordEvent(uint64_t event) {
  const transport::Passed now{transport::nowNs(), peers_ == nullptr ? 0 : peers_->waitedNs()};
  events_.record(event, now);
}

void Executor::stats() {
  const SwapCounters paged = segments_.counters();
  reply({arena_ != nullptr ? arena_->usedBytes() : 0,
         arena_ != nullptr ? arena_->reservedBytes() : 0, segments_.boundBytes(), segments_.count(),
         calls_.count(), static_cast<uint64_t>(calls_.busyNs()), bytes_in_, bytes_out_, bytes_peer_,
         paged.in_bytes, paged.out_bytes, paged.disk_bytes, paged.dropped_bytes,
         paged.prefetched_bytes, static_cast<uint64_t>(paged.stall_ns), segments_.swappedBytes(),
         peers_ != nullptr ? peers_->aheadBytes() : 0});
}

}  // namespace shoal::worker
