#include "client/member/member.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "client/member/errors.h"
#include "client/member/interrupts.h"
#include "client/member/members.h"
#include "transport/shared_passing.h"
#include "wire/limits.h"

namespace shoal::client {

using wire::Address;
using wire::Kind;

namespace {

constexpr int64_t kSpinUs = 200;  // an answer is usually this near; a sleeping core wakes in 25 µs
constexpr int64_t kFarUs =
    1000;  // after so long a wait the next is not spun for: it will be as long
constexpr int64_t kSliceMs = 50;
constexpr size_t kStashMax = 1024;  // replies for other threads: as many as may wait at once
constexpr size_t kUnsentFreesMax = 64;
constexpr size_t kToldMax = 16;  // failures that are kept for threads that wait for older events

thread_local uint64_t t_line = 0;  // token of the line that this thread noted last
thread_local bool t_far = false;   // whether this thread's last wait for an event was long

// Any two numbers, for the worker wrote them.
double millisecondsBetween(int64_t start_ns, int64_t end_ns) {
  const uint64_t between = static_cast<uint64_t>(end_ns) - static_cast<uint64_t>(start_ns);
  return static_cast<double>(static_cast<int64_t>(between)) / 1e6;
}

Seen seenBy(network::ConnectionLost::Cause cause) {
  using Cause = network::ConnectionLost::Cause;
  if (cause == Cause::kClosed) return Seen::kClosed;
  return cause == Cause::kSilent ? Seen::kSilent : Seen::kBroken;
}

}  // namespace

Stream::Stream(StreamOptions options, Members& members, uint32_t member)
    : options_(std::move(options)), members_(members), member_(member) {
  using memory::SharedMemory;
  requests_region_ =
      SharedMemory::attach(options_.requests_fd, transport::ringRegionBytes(wire::kRingBytes));
  replies_region_ =
      SharedMemory::attach(options_.replies_fd, transport::ringRegionBytes(wire::kReplyRingBytes));
  progress_region_ = SharedMemory::attach(options_.progress_fd, transport::kProgressBytes);
  if (options_.arena_bytes > 0) {
    arena_ = SharedMemory::attach(options_.arena_fd, options_.arena_bytes);
  }
  places_region_ = SharedMemory::attach(options_.places_fd, transport::kPlacesBytes);
  places_ = std::make_unique<transport::Places>(places_region_.data());
  progress_ = reinterpret_cast<transport::Progress*>(progress_region_.data());
  const auto liveness = [this] { checkAlive(); };
  requests_ = std::make_unique<transport::RingProducer>(requests_region_.data(), wire::kRingBytes,
                                                        liveness);
  replies_ = std::make_unique<transport::RingConsumer>(
      replies_region_.data(), wire::kReplyRingBytes, wire::kMessageBytesMax, liveness);
}

Stream::~Stream() {
  delete lost_.load();
  delete told_reason_.load();
  if (options_.socket >= 0) ::close(options_.socket);
}

void Stream::close() noexcept {
  closed_ = true;
  if (options_.socket >= 0) shutdown(options_.socket, SHUT_RDWR);
  if (options_.link != nullptr) options_.link->stop();
}

void Stream::abandon() noexcept {
  markLost(
      "this process was forked from the one that leases it, and cannot use it too; start it with "
      "the 'spawn' method instead",
      Seen::kBroken);
  closed_ = true;
  if (options_.socket >= 0) ::close(options_.socket);
  options_.socket = -1;
  if (options_.link != nullptr) options_.link->abandon();
}

void Stream::checkUsable() const {
  if (const Loss* loss = lost_.load(std::memory_order_acquire)) {
    const std::string* told = told_reason_.load(std::memory_order_acquire);
    const std::string& reason = told != nullptr ? *told : loss->reason;
    if (closed_) {
      raiseDeviceLost("shoal device " + options_.name + " was lost: " + reason, options_.name);
    }
    const LostDevice lost{members_.number(), member_, loss->seen, options_.name, reason};
    if (told != nullptr) raiseDeviceLost(lost.text(reason), options_.name);
    raiseDeviceLost(lost);
  }
  if (closed_.load(std::memory_order_relaxed)) {
    raiseDeviceLost("the lease of shoal device " + options_.name + " has ended", options_.name);
  }
}

void Stream::markLost(const std::string& reason, Seen seen) {
  const Loss* none = nullptr;
  auto loss = std::make_unique<const Loss>(Loss{reason, seen});
  if (lost_.compare_exchange_strong(none, loss.get())) loss.release();
}

void Stream::tellLost(const std::string& reason) {
  const std::string* none = nullptr;
  auto told = std::make_unique<const std::string>(reason);
  if (told_reason_.compare_exchange_strong(none, told.get())) told.release();
  markLost(reason, Seen::kClosed);  // its worker may answer for another moment
}

void Stream::raiseLost(const std::string& reason, Seen seen) {
  markLost(reason, seen);
  checkUsable();
  __builtin_unreachable();
}

// Runs at least every 50 ms of any wait.
void Stream::checkAlive() {
  if (closed_) raiseLost("it was closed");
  if (options_.link != nullptr) {
    const std::string reason = options_.link->failure();
    if (!reason.empty()) raiseLost(reason, seenBy(options_.link->failureCause()));
  }
  pollfd peer{options_.socket, POLLRDHUP, 0};
  if (poll(&peer, 1, 0) > 0 && (peer.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
    raiseLost("its worker process ended", Seen::kClosed);
  }
  // Silence counts only while we watch: a suspended machine, or a program that did not wait for a
  // while, starts anew.
  const int64_t now = transport::nowNs();
  const bool watching = now - checked_ns_.exchange(now) < 1000000000;
  const uint64_t beat = progress_->heartbeat.load(std::memory_order_relaxed);
  if (heartbeat_seen_.exchange(beat) != beat || !watching) silent_since_ns_ = now;
  if (now - silent_since_ns_ > int64_t{transport::kHeartbeatLostMs} * 1000000) {
    raiseLost("its worker process gave no sign of life for " +
                  std::to_string(transport::kHeartbeatLostMs / 1000) + " s",
              Seen::kHung);
  }
}

// --- messages
// -------------------------------------------------------------------------------------

uint64_t* Stream::reserve(Kind kind, size_t words, uint16_t flags) {
  const size_t bytes = (1 + words) * 8;
  TORCH_CHECK(bytes <= wire::kMessageBytesMax, "shoal: a call with ", words,
              " words of arguments is too large for one message");
  uint64_t* message = requests_->reserve(bytes);
  message[0] = wire::headerWord(kind, static_cast<uint32_t>(bytes), flags);
  pending_bytes_ = bytes;
  return message + 1;
}

void Stream::free(Address address, bool now, const Lock&) {
  unsent_frees_.push_back(address);
  if (now || unsent_frees_.size() >= kUnsentFreesMax) sendFrees();
}

uint64_t Stream::nextSequence(const Lock&) {
  sendFrees();
  return sequence_ + 1;
}

void Stream::waitForRoom() {
  Wait wait;
  while (!requests_->awaitRoom(kSliceMs)) wait.look();
}

void Stream::sendFrees() {
  if (unsent_frees_.empty()) return;
  const wire::Free message{unsent_frees_};
  wire::write(message, reserve(Kind::kFree, wire::wordsOf(message), 0));
  requests_->commit(pending_bytes_);
  ++sequence_;
  ++traffic_.messages;
  traffic_.stream_bytes += pending_bytes_;
  unsent_frees_.clear();
}

uint64_t* Stream::begin(Kind kind, size_t words, uint16_t flags) {
  checkUsable();
  if (Observer* observer = Observer::current()) observer->posted(kind);
  sendFrees();
  // What prepares a call, or names its memory, fails with the call and needs no line of its own.
  pending_traced_ = kind != Kind::kPrepare && kind != Kind::kAllocate && kind != Kind::kBind;
  return reserve(kind, words, flags);
}

uint64_t Stream::commit(const Lock&) {
  requests_->commit(pending_bytes_);
  ++traffic_.messages;
  traffic_.stream_bytes += pending_bytes_;
  ++sequence_;
  lines_[sequence_ % kLines] = pending_traced_ ? t_line : 0;
  return sequence_;
}

void Stream::noteLine() {
  const auto hook = lineHooks().current;
  if (hook != nullptr) t_line = hook();
}

uint64_t Stream::line() {
  return t_line;
}

void Stream::setLine(uint64_t token) {
  t_line = token;
}

Lock Stream::lockMembers() const {
  return members_.lock();
}

std::string Stream::placeOf(uint64_t sequence) {
  uint64_t token = 0;
  {
    const Lock held = members_.lock();
    if (sequence <= sequence_ && sequence + kLines > sequence_) token = lines_[sequence % kLines];
  }
  const auto hook = lineHooks().describe;
  return token != 0 && hook != nullptr ? hook(token) : "";
}

uint32_t Stream::session() const {
  return members_.number();
}

uint64_t Stream::passShared(int memory, int control, int line) {
  transport::SharedPassing passing;
  passing.number = ++passed_shared_;
  if (!transport::sendShared(options_.socket, passing, {memory, control, line})) {
    raiseShareError("the memory cannot be passed to device " + options_.name + ": " +
                    std::strerror(errno));
  }
  return passed_shared_;
}

// --- replies
// --------------------------------------------------------------------------------------

bool Stream::awaitSlice(uint64_t sequence, Payload& payload, wire::ErrorKind& error) {
  std::unique_lock held(reply_mutex_, std::try_to_lock);
  if (!held && !held.try_lock_for(std::chrono::milliseconds(kSliceMs))) return false;
  const auto take = [&](const wire::Reply& reply) {
    error = reply.error();
    payload.assign(reply.payload.begin(), reply.payload.end());
    return true;
  };
  const auto stashed = stash_.find(sequence);
  if (stashed != stash_.end()) {
    const auto reply = std::move(stashed->second);
    stash_.erase(stashed);
    return take(wire::read<wire::Reply>(reply));
  }
  if (!replies_->poll(reply_)) {
    checkUsable();
    replies_->wait(kSpinUs, kSliceMs);
    if (!replies_->poll(reply_)) return false;
  }
  if (reply_.size() < 2) raiseLost("it sent a malformed reply");
  const auto reply = wire::read<wire::Reply>(reply_);
  if (reply.sequence == sequence) return take(reply);
  if (unwanted_.erase(reply.sequence) == 0) {  // another thread waits for it
    if (stash_.size() >= kStashMax) raiseLost("it sent replies that nobody asked for");
    stash_.emplace(reply.sequence, reply_);
  }
  held.unlock();
  std::this_thread::yield();
  return false;
}

void Stream::dropReply(uint64_t sequence) {
  const std::lock_guard held(reply_mutex_);
  if (stash_.erase(sequence) == 0) unwanted_.insert(sequence);
}

Stream::Payload Stream::await(uint64_t sequence) {
  Payload payload;
  wire::ErrorKind error;
  Wait wait;
  int64_t looked_ns = transport::nowNs();
  while (!awaitSlice(sequence, payload, error)) {
    const int64_t now = transport::nowNs();
    if (now - looked_ns < kSliceMs * 1000000) continue;
    looked_ns = now;
    try {
      wait.look();
    } catch (const Interrupted&) {
      dropReply(sequence);
      throw;
    }
  }
  if (error != wire::ErrorKind::kNone) {
    const auto reply = wire::readBody<wire::ErrorReply>(payload);
    if (reply.shown_in != 0) remember(reply.shown_in, {error, payload});
    raise(error, reply);
  }
  return payload;
}

void Stream::remember(uint64_t shown_in, Told told) {
  const std::lock_guard held(told_mutex_);
  told_.emplace(shown_in, std::move(told));
  if (told_.size() > kToldMax) told_.erase(told_.begin());
  last_told_.store(told_.rbegin()->first, std::memory_order_release);
}

void Stream::raiseTold(uint64_t after, uint64_t until) {
  if (lastTold() <= after) return;
  std::optional<Told> found;
  {
    const std::lock_guard held(told_mutex_);
    const auto first = told_.upper_bound(after);
    if (first != told_.end() && first->first <= until) found = first->second;
  }
  if (found) raise(found->kind, wire::readBody<wire::ErrorReply>(found->payload));
}

void Stream::raise(wire::ErrorKind kind, const wire::ErrorReply& reply) {
  std::string text(reply.text());
  // The cause lies on another member, which reports it better.
  if (kind == wire::ErrorKind::kPeerFailed) members_.raiseFailureOfOthers(*this);
  ErrorData data{options_.name, "", placeOf(reply.sequence), ""};
  (kind == wire::ErrorKind::kPeerLost ? data.peer : data.operator_name) = reply.name();
  if (!data.operator_name.empty() || !data.line.empty()) {
    text += "\n[shoal] raised by " +
            (data.operator_name.empty() ? std::string("a transfer") : data.operator_name) +
            (data.line.empty() ? "" : ", called at " + data.line) + ", on device " + options_.name;
  }
  raiseError(kind, text, data);
}

void Stream::waitCompleted(uint64_t sequence, bool hears_signals) {
  // Another machine tells of its progress now and then; at the stream's end a reply is sooner.
  if (options_.link != nullptr && sequence >= lastSequence() && !completed(sequence)) {
    synchronize();
    return;
  }
  const int64_t start = transport::nowNs();
  int64_t spin_us = t_far ? 0 : kSpinUs;
  Wait wait;
  while (!transport::awaitCompleted(*progress_, sequence, spin_us, kSliceMs)) {
    checkUsable();
    checkAlive();
    if (hears_signals) wait.look();
    spin_us = 0;  // not near after all
  }
  t_far = transport::nowNs() - start > kFarUs * 1000;
  if (hasFailed()) synchronize();  // raises what went wrong
}

bool Stream::devicePast(uint64_t event) {
  if (options_.is_cpu) return true;  // done is done: no message
  return ask(wire::EventQuery{event}).past;
}

Elapsed Stream::elapsed(uint64_t start_event, uint64_t end_event) {
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
