#include "worker/executor.h"

#include <ATen/Functions.h>

#include <cstring>

#include "transport/ring.h"
#include "wire/limits.h"
#include "worker/failure.h"

namespace shoal::worker {

using wire::Kind;
using wire::ProtocolError;
using wire::Reader;

namespace {

bool expectsReply(Kind kind, uint16_t flags) {
  switch (kind) {
    case Kind::kRead:
    case Kind::kLocate:
    case Kind::kGeneratorGet:
    case Kind::kEventElapsed:
    case Kind::kSync:
    case Kind::kStats:
      return true;
    case Kind::kCall:
      return (flags & wire::kFlagLearn) != 0;
    default:
      return false;
  }
}

}  // namespace

Executor::Executor(ExecutorOptions options, const memory::SharedMemory& host, Arena* arena,
                   ReplySink& replies)
    : host_(host),
      arena_(arena),
      memory_bytes_(options.memory_bytes),
      replies_(replies),
      memory_(options.device),
      events_(options.device),
      generators_(options.device),
      segments_(options.session),
      calls_(options.device, options.speed, segments_, generators_, options.run_operator) {}

void Executor::handle(const std::vector<uint64_t>& message, uint64_t sequence) {
  Reader reader(message.data() + 1, message.size() - 1);
  const uint16_t kind = wire::headerKind(message[0]);
  const uint16_t flags = wire::headerFlags(message[0]);
  kind_ = static_cast<Kind>(kind);
  sequence_ = sequence;
  replied_ = false;
  try {
    if (kind == 0 || kind > static_cast<uint16_t>(Kind::kLast)) {
      throw ProtocolError("message kind " + std::to_string(kind) + " does not exist");
    }
    dispatch(kind_, flags, reader);
    if (expectsReply(kind_, flags) && !replied_) reply({});
  } catch (const transport::PeerLost&) {
    throw;
  } catch (...) {
    fail(std::current_exception(), expectsReply(kind_, flags) && !replied_);
  }
}

void Executor::fail(std::exception_ptr error, bool reply_now) {
  std::shared_ptr<const Failure> failure;
  try {
    std::rethrow_exception(error);
  } catch (const PoisonedError& poisoned) {
    // Told as what it is: a consequence. The text and the call are those of the cause.
    Failure consequence = *poisoned.cause();
    failure = std::make_shared<const Failure>(std::move(consequence));
  } catch (...) {
    const bool in_call = kind_ == Kind::kCall || kind_ == Kind::kBackward;
    failure = describe(std::current_exception(), sequence_, in_call ? calls_.operatorName() : "");
  }
  if (!reply_now) {
    if (pending_ == nullptr) pending_ = std::move(failure);
    return;
  }
  if (pending_ != nullptr) failure = std::exchange(pending_, nullptr);  // the older one first
  replyFailure(*failure);
}

void Executor::reply(const std::vector<uint64_t>& payload) {
  if (pending_ != nullptr) {
    const auto failure = std::exchange(pending_, nullptr);
    replyFailure(*failure);
    return;
  }
  replied_ = true;
  replies_.send(kind_, wire::ErrorKind::kNone, sequence_, payload);
}

void Executor::replyFailure(const Failure& failure) {
  replied_ = true;
  std::string text = failure.text.substr(0, wire::kErrorTextBytesMax);
  const std::string name = failure.operator_name.substr(0, wire::kOperatorNameBytesMax);
  std::vector<uint64_t> payload{failure.sequence, text.size(), name.size()};
  text.append(name);
  payload.resize(3 + (text.size() + 7) / 8);
  if (!text.empty()) std::memcpy(payload.data() + 3, text.data(), text.size());
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
    case Kind::kAllocate:
      return allocate(reader);
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
      return events_.record(reader.word("event"));
    case Kind::kEventElapsed: {
      const uint64_t start = reader.word("event");
      return reply({wire::asWord(events_.elapsedMs(start, reader.word("event")))});
    }
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
    case Kind::kTrim:
      if (arena_ != nullptr) arena_->trim();
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

std::byte* Executor::deviceRange(wire::Address address, uint64_t bytes) {
  const Place place = segments_.resolve(address, bytes);
  if (place.segment->poison != nullptr) throw PoisonedError(place.segment->poison);
  return static_cast<std::byte*>(place.segment->storage.mutable_data()) + place.offset;
}

void Executor::allocate(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  try {
    segments_.bind(address, memory_.allocate(bytes), bytes);
  } catch (const c10::Error&) {
    segments_.poison(address, describe(std::current_exception(), sequence_, "empty"));
    throw;
  }
}

void Executor::adopt(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  std::byte* host = hostRange(reader.word("host offset"), bytes);
  if (!memory_.isHost()) throw ProtocolError("only a CPU device can adopt host memory");
  TORCH_CHECK_WITH(OutOfMemoryError,
                   bytes <= memory_bytes_ && segments_.boundBytes() <= memory_bytes_ - bytes,
                   "the lease of ", memory_bytes_, " bytes has no room for ", bytes, " more");
  // The client keeps the block until it has freed the segment, so nothing is released here.
  c10::DataPtr data(host, c10::Device(c10::DeviceType::CPU));
  segments_.bind(address,
                 c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                              c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true),
                 bytes);
  bytes_in_ += bytes;
}

void Executor::write(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  const auto data = reader.bytes(bytes, wire::kInlineBytesMax, "data");
  memory_.copyIn(deviceRange(address, bytes), data.data(), bytes);
  bytes_in_ += bytes;
}

void Executor::copyHost(Reader& reader, bool into_device) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  std::byte* host = hostRange(reader.word("host offset"), bytes);
  std::byte* device = deviceRange(address, bytes);
  if (into_device) {
    memory_.copyIn(device, host, bytes);
    bytes_in_ += bytes;
  } else {
    memory_.copyOut(host, device, bytes);
    bytes_out_ += bytes;
  }
}

void Executor::copyWithin(Reader& reader) {
  const wire::Address to = reader.word("destination");
  const wire::Address from = reader.word("source");
  const uint64_t bytes = reader.word("bytes");
  memory_.copyWithin(deviceRange(to, bytes), deviceRange(from, bytes), bytes);
}

void Executor::read(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  if (bytes > wire::kInlineBytesMax) throw ProtocolError("too many bytes for an inline read");
  std::vector<uint64_t> payload((bytes + 7) / 8);
  memory_.copyOut(payload.data(), deviceRange(address, bytes), bytes);
  bytes_out_ += bytes;
  reply(payload);
}

void Executor::locate(Reader& reader) {
  const wire::Address address = reader.word("address");
  const uint64_t bytes = reader.word("bytes");
  const std::byte* data = deviceRange(address, bytes);
  bytes_out_ += bytes;
  if (arena_ != nullptr && arena_->region().contains(data)) {
    return reply({0, static_cast<uint64_t>(data - arena_->region().data())});
  }
  if (host_.contains(data)) return reply({1, static_cast<uint64_t>(data - host_.data())});
  throw ProtocolError("the segment is not in shared memory");
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

void Executor::stats() {
  reply({arena_ != nullptr ? arena_->usedBytes() : 0,
         arena_ != nullptr ? arena_->reservedBytes() : 0, segments_.boundBytes(), segments_.count(),
         calls_.count(), static_cast<uint64_t>(calls_.busyNs()), bytes_in_, bytes_out_});
}

}  // namespace shoal::worker
