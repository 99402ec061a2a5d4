#include "worker/execute/executor.h"

#include <ATen/Functions.h>

#include <cstring>

#include "base/clock.h"
#include "transport/ending.h"
#include "transport/ring.h"
#include "worker/calls/settings.h"
#include "worker/failure/failure.h"
#include "worker/failure/lost_context.h"

namespace shoal::worker {

using wire::Kind;
using wire::ProtocolError;

namespace {

void setState(at::Generator& generator, const void* data, uint64_t bytes) {
  at::Tensor state = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  if (bytes > 0) std::memcpy(state.data_ptr(), data, bytes);
  generator.set_state(state);
}

}  // namespace

Executor::Executor(ExecutorOptions options, const memory::SharedMemory& host, Arena* arena,
                   ReplySink& replies)
    : device_(openDevice(options.device)),
      late_(device_->runsLate() ? std::make_unique<Late>(*device_, *options.progress) : nullptr),
      arena_(arena),
      peers_(options.peers),
      replies_(replies),
      events_(options.device, options.progress),
      generators_(options.device),
      segments_({options.session,
                 late_.get(),
                 arena,
                 options.shown,
                 &host,
                 options.peers,
                 options.locations,
                 options.swap,
                 {options.memory_bytes, options.least_recent}}),
      memory_(*device_, late_.get(), host, segments_, options.memory_bytes),
      transfers_(memory_, options.reader),
      peer_copies_(memory_, options.peers, options.requests),
      sharing_(memory_, options.shared),
      calls_(options.device, options.speed, segments_, generators_, options.run_operator,
             options.grant == nullptr ? nullptr : &options.grant->block()),
      orders_(options.grant, arena, segments_, options.peers) {
  if (options.requests != nullptr) {
    segments_.lookAhead(*options.requests, [this](uint32_t id) { return calls_.addressWords(id); });
  }
}

void Executor::handle(const std::vector<uint64_t>& message, uint64_t sequence) {
  const uint16_t number = wire::headerKind(message[0]);
  const auto kind = static_cast<Kind>(number);
  replies_.begin(
      kind, sequence,
      number < wire::kKindsEnd && wire::expectsReply(kind, wire::headerFlags(message[0])));
  segments_.begin(sequence);
  try {
    run(message, sequence);
    replies_.finish();
  } catch (const transport::PeerLost&) {
    throw;
  } catch (...) {
    fail(std::current_exception(), sequence);
  }
  peer_copies_.after(sequence);
}

void Executor::fail(std::exception_ptr error, uint64_t sequence) {
  const bool in_call = replies_.kind() == Kind::kCall || replies_.kind() == Kind::kBackward;
  const std::string lost = lostContext(error, memory_.device().device(), in_call);
  if (!lost.empty()) {
    const size_t kind = static_cast<size_t>(replies_.kind());
    transport::endProcess(transport::Ending::kDeviceFailed,
                          lost + ". It showed in " +
                              (in_call ? calls_.operatorName() : wire::kKindNames[kind]) +
                              ". An earlier call may be the cause; SHOAL_BLOCKING=1 finds it");
  }
  replies_.fail(describe(std::move(error), sequence, in_call ? calls_.operatorName() : ""));
}

void Executor::run(wire::Words message, uint64_t sequence) {
  using namespace wire;  // the messages' names
  const Overloaded handlers{
      [&](const Prepare& m) { calls_.prepare(m, sequence); },
      [&](const Call& m) {
        if (const auto learned = calls_.call(m, sequence)) replies_.reply(*learned);
      },
      [&](const Bind& m) { calls_.bindLearned(m); },
      [&](const Allocate& m) { memory_.allocate(m.address, m.bytes, sequence, "empty"); },
      [&](const Free& m) {
        for (const Address address : m.segments) segments_.release(address);
      },
      [&](const Adopt& m) { transfers_.adopt(m); },
      [&](const Write& m) { transfers_.write(m); },
      [&](const CopyIn& m) { transfers_.copyIn(m); },
      [&](const CopyOut& m) { transfers_.copyOut(m); },
      [&](const CopyWithin& m) { transfers_.copyWithin(m, sequence); },
      [&](const Load& m) { transfers_.load(m, sequence); },
      [&](const Read& m) { replies_.replyBytes(transfers_.read(m)); },
      [&](const Locate& m) {
        transfers_.locate(m, arena_ == nullptr ? nullptr : &arena_->region());
      },
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
      [&](const EventDrop& m) { events_.drop(m.event); },
      [](const Sync&) {},  // its reply comes when it is done
      [&](const Stats&) { answer(stats()); },
      [&](const Forget&) { calls_.forget(); },
      [&](const Backward& m) { calls_.backward(m, sequence); },
      [&](const GraphDrop& m) { calls_.dropGraph(m.graph); },
      [&](const Export& m) { peer_copies_.exportTo(m, sequence); },
      [&](const Fetch& m) { peer_copies_.fetch(m, sequence); },
      [&](const FetchAdd& m) { peer_copies_.fetchAdd(m, sequence); },
      [&](const Share& m) { sharing_.share(m); },
      [&](const Open& m) { sharing_.open(m, sequence); },
      [&](const Unshare& m) { sharing_.unshare(m); },
      [&](const wire::Settings& m) { applySettings(m); },
      [&](const Trim&) { trim(); },
  };
  if (!Messages::decode(message, handlers)) {
    throw ProtocolError("message kind " + std::to_string(headerKind(message[0])) +
                        " does not exist");
  }
}

void Executor::trim() {
  if (arena_ != nullptr) arena_->trim();
  segments_.trim();
  device_->emptyCache();
}

void Executor::generatorSave(const wire::GeneratorSave& message) {
  const at::Tensor state = generators_.get(message.generator).get_state();
  wire::SavedGenerator saved{state.nbytes(), {}};
  TORCH_CHECK(saved.bytes <= saved.state.size(), "a generator's state is too large");
  std::memcpy(saved.state.data(), state.data_ptr(), saved.bytes);
  segments_.bind(message.address, device_->allocate(sizeof saved), sizeof saved);
  memory_.put(message.address, &saved, sizeof saved);
}

void Executor::generatorLoad(const wire::GeneratorLoad& message) {
  auto& generator = generators_.get(message.generator);
  wire::SavedGenerator saved;
  // Waits for the device: the next draw starts from these bytes. Only a change of device sends
  // this.
  device_->copyOut(Lane::kCompute, &saved, memory_.range(message.address, sizeof saved, false).data,
                   sizeof saved);
  if (saved.bytes == 0 || saved.bytes > saved.state.size()) {
    throw ProtocolError("the segment does not hold a generator's state");
  }
  TORCH_CHECK(
      generator.get_state().nbytes() == saved.bytes,
      "the random numbers of this lease cannot go on here: the device that drew the last "
      "ones is of another kind (a CPU, or another accelerator). Draw on one kind of device: "
      "name it with device=\"shoal:1\", or lease devices of one kind.");
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
  const Accelerator::Held held =
      arena_ != nullptr ? Accelerator::Held{arena_->usedBytes(), arena_->reservedBytes()}
                        : device_->held();
  return {.used_bytes = held.used,
          .reserved_bytes = held.reserved,
          .segment_bytes = segments_.boundBytes(),
          .segments = segments_.count(),
          .calls = calls_.count(),
          .busy_ns = static_cast<uint64_t>(calls_.busyNs()),
          .bytes_in = transfers_.inBytes(),
          .bytes_out = transfers_.outBytes(),
          .bytes_peer = peer_copies_.bytes(),
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
