#include "client/member/member.h"

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "client/member/errors.h"
#include "client/member/interrupts.h"
#include "client/member/members.h"
#include "transport/shared_passing.h"
#include "wire/limits.h"

namespace shoal::client {

namespace {

constexpr int64_t kSpinUs = 200;  // an answer is usually this near; a sleeping core wakes in 25 µs
constexpr int64_t kFarUs = 1000;  // after so long a wait the next one does not spin

thread_local bool t_far = false;  // whether this thread's last wait for an event was long

// The worker wrote both numbers, so they may be anything.
double millisecondsBetween(int64_t start_ns, int64_t end_ns) {
  const uint64_t between = static_cast<uint64_t>(end_ns) - static_cast<uint64_t>(start_ns);
  return static_cast<double>(static_cast<int64_t>(between)) / 1e6;
}

}  // namespace

Member::Regions::Regions(const MemberOptions& options) {
  using memory::SharedMemory;
  requests =
      SharedMemory::attach(options.requests_fd, transport::ringRegionBytes(wire::kRingBytes));
  replies =
      SharedMemory::attach(options.replies_fd, transport::ringRegionBytes(wire::kReplyRingBytes));
  progress = SharedMemory::attach(options.progress_fd, transport::kProgressBytes);
  if (options.arena_bytes > 0) {
    SharedMemory region = SharedMemory::attach(options.arena_fd, options.arena_bytes);
    if (options.is_cpu) arena = std::move(region);
  }
  locations = SharedMemory::attach(options.locations_fd, transport::kLocationTableBytes);
}

Member::Member(MemberOptions options, Members& members, uint32_t number)
    : options_(std::move(options)),
      members_(members),
      number_(number),
      liveness_(members.number(), number, options_.name, options_.socket, options_.link),
      regions_(options_),
      progress_(reinterpret_cast<transport::Progress*>(regions_.progress.data())),
      locations_(std::make_unique<transport::LocationTable>(regions_.locations.data())),
      requests_(regions_.requests, liveness_, traffic_),
      replies_(regions_.replies, liveness_),
      settings_(options_.is_cpu) {
  liveness_.watch(progress_);
}

// --- messages

void Member::bringSettings(bool precisions, const Lock& held) {
  const uint8_t dtype_before = settings_.told().default_dtype;
  if (!settings_.changed(precisions)) return;
  const wire::Settings& settings = settings_.told();
  if (settings.default_dtype != dtype_before) {  // it decides the dtypes of outputs
    cache_.clear();
    post(wire::Forget{}, held);
  }
  post(settings, held);
}

Lock Member::lockMembers() const {
  return members_.lock();
}

std::string Member::lineOf(uint64_t sequence) {
  uint64_t token = 0;
  {
    const Lock held = members_.lock();
    token = requests_.lineOf(sequence, held);
  }
  const auto hook = lineHooks().describe;
  return token != 0 && hook != nullptr ? hook(token) : "";
}

uint32_t Member::session() const {
  return members_.number();
}

uint64_t Member::passShared(int memory, int control, int line) {
  transport::SharedPassing passing;
  passing.number = ++passed_shared_;
  if (!transport::sendShared(liveness_.socket(), passing, {memory, control, line})) {
    raiseShareError("the memory cannot be passed to device " + options_.name + ": " +
                    std::strerror(errno));
  }
  return passed_shared_;
}

// --- replies

Member::Payload Member::await(uint64_t sequence) {
  Payload payload;
  wire::ErrorKind error;
  Wait wait;
  int64_t looked_ns = nowNs();
  while (!replies_.take(sequence, payload, error)) {
    const int64_t now = nowNs();
    if (now - looked_ns < kSliceMs * 1000000) continue;
    looked_ns = now;
    try {
      wait.look();
    } catch (const Interrupted&) {
      replies_.drop(sequence);
      throw;
    }
  }
  if (error != wire::ErrorKind::kNone) {
    wire::ErrorReply reply;
    try {
      reply = wire::readBody<wire::ErrorReply>(payload);
    } catch (const wire::ProtocolError& malformed) {
      raiseLost(std::string("it sent a malformed reply: ") + malformed.what());
    }
    if (reply.shown_in != 0) failures_.add(reply.shown_in, {error, payload});
    raise(error, reply);
  }
  return payload;
}

void Member::raiseReported(uint64_t after, uint64_t until) {
  if (const auto found = failures_.find(after, until)) {
    raise(found->kind, wire::readBody<wire::ErrorReply>(found->payload));
  }
}

void Member::raise(wire::ErrorKind kind, const wire::ErrorReply& reply) {
  std::string text(reply.text());
  // The cause lies on another member, which reports it better.
  if (kind == wire::ErrorKind::kPeerFailed) members_.raiseFailureOfOthers(*this);
  ErrorData data{options_.name, "", lineOf(reply.sequence), ""};
  (kind == wire::ErrorKind::kPeerLost ? data.peer : data.operator_name) = reply.name();
  if (!data.operator_name.empty() || !data.line.empty()) {
    text += "\n[shoal] raised by " +
            (data.operator_name.empty() ? std::string("a transfer") : data.operator_name) +
            (data.line.empty() ? "" : ", called at " + data.line) + ", on device " + options_.name;
  }
  raiseError(kind, text, data);
}

void Member::waitDone(uint64_t sequence, bool hears_signals) {
  // Another machine tells of its progress now and then; at the stream's end a reply is sooner.
  if (options_.link != nullptr && sequence >= lastSequence() && !isDone(sequence)) {
    synchronize();
    return;
  }
  const int64_t start = nowNs();
  int64_t spin_us = t_far ? 0 : kSpinUs;
  Wait wait;
  while (!transport::awaitDone(*progress_, sequence, spin_us, kSliceMs)) {
    liveness_.checkUsable();
    liveness_.checkAlive();
    if (hears_signals) wait.look();
    spin_us = 0;  // not near after all
  }
  t_far = nowNs() - start > kFarUs * 1000;
  if (hasFailed()) synchronize();  // raises what went wrong
}

bool Member::askDone(uint64_t sequence) {
  if (isDone(sequence)) return true;
  transport::ask(*progress_, sequence);
  liveness_.checkSometimes();  // a loop that asks must learn of a loss
  return false;
}

Elapsed Member::elapsed(uint64_t start_event, uint64_t end_event) {
  const auto start = transport::passed(*progress_, start_event);
  const auto end = transport::passed(*progress_, end_event);
  if (options_.is_cpu && start && end) {
    return {millisecondsBetween(start->ns, end->ns),
            millisecondsBetween(start->waited_ns, end->waited_ns)};
  }
  const auto elapsed = ask(wire::EventElapsed{start_event, end_event});
  return {elapsed.all_ms, elapsed.waited_ms};
}

}  // namespace shoal::client
