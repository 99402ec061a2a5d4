#include "client/stream.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "client/devices.h"
#include "client/errors.h"
#include "client/host_memory.h"
#include "memory/copy_bytes.h"
#include "wire/limits.h"
#include "wire/reader.h"

namespace shoal::client {

using wire::Address;
using wire::Kind;

namespace {

constexpr int64_t kSpinUs = 200;  // an answer is usually this near; a sleeping core wakes in 25 µs
constexpr int64_t kSliceMs = 50;
constexpr uint64_t kPromptFreeBytes = uint64_t{1} << 20;
constexpr size_t kUnsentFreesMax = 64;
constexpr uint64_t kStagedBytesMax = uint64_t{256} << 20;  // sent, but not yet taken by the worker

thread_local uint64_t t_line = 0;  // token of the line that this thread noted last

}  // namespace

Stream::Stream(StreamOptions options) : options_(std::move(options)) {
  using memory::SharedMemory;
  requests_region_ =
      SharedMemory::attach(options_.requests_fd, transport::ringRegionBytes(wire::kRingBytes));
  replies_region_ =
      SharedMemory::attach(options_.replies_fd, transport::ringRegionBytes(wire::kReplyRingBytes));
  progress_region_ = SharedMemory::attach(options_.progress_fd, transport::kProgressBytes);
  if (options_.arena_bytes > 0) {
    arena_ = SharedMemory::attach(options_.arena_fd, options_.arena_bytes);
  }
  progress_ = reinterpret_cast<transport::Progress*>(progress_region_.data());
  const auto liveness = [this] { checkAlive(); };
  requests_ = std::make_unique<transport::RingProducer>(requests_region_.data(), wire::kRingBytes,
                                                        liveness);
  replies_ = std::make_unique<transport::RingConsumer>(
      replies_region_.data(), wire::kReplyRingBytes, wire::kMessageBytesMax, liveness);
  memory_.limit_bytes = options_.memory_bytes;
  slots_.resize(1024);
}

Stream::~Stream() {
  if (options_.socket >= 0) ::close(options_.socket);
}

void Stream::close() noexcept {
  closed_ = true;
  if (options_.socket >= 0) shutdown(options_.socket, SHUT_RDWR);
}

void Stream::abandon() noexcept {
  markLost(
      "this process was forked from the one that leases it, and cannot use it too; start it with "
      "the 'spawn' method instead");
  closed_ = true;
  if (options_.socket >= 0) ::close(options_.socket);
  options_.socket = -1;
}

void Stream::checkUsable() const {
  if (lost_.load(std::memory_order_relaxed)) {
    raiseDeviceLost("shoal device " + options_.name + " was lost: " + lost_reason_ +
                    (closed_ ? ""
                             : ". Call shoal.connect() for a new lease; tensors of the old one "
                               "are gone."));
  }
  if (closed_.load(std::memory_order_relaxed)) {
    raiseDeviceLost("the lease of shoal device " + options_.name + " has ended");
  }
}

void Stream::markLost(const std::string& reason) {
  if (!lost_.exchange(true)) lost_reason_ = reason;
}

void Stream::raiseLost(const std::string& reason) {
  markLost(reason);
  checkUsable();
  __builtin_unreachable();
}

// Runs at least every 50 ms of any wait.
void Stream::checkAlive() {
  if (closed_) raiseLost("it was closed");
  pollfd peer{options_.socket, POLLRDHUP, 0};
  if (poll(&peer, 1, 0) > 0 && (peer.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
    raiseLost("its worker process ended");
  }
  // Silence counts only while we watch: a suspended machine, or a program that did not wait for a
  // while, starts anew.
  const int64_t now = transport::nowNs();
  const bool watching = now - checked_ns_.exchange(now) < 1000000000;
  const uint64_t beat = progress_->heartbeat.load(std::memory_order_relaxed);
  if (heartbeat_seen_.exchange(beat) != beat || !watching) silent_since_ns_ = now;
  if (now - silent_since_ns_ > int64_t{transport::kHeartbeatLostMs} * 1000000) {
    raiseLost("its worker process gave no sign of life for " +
              std::to_string(transport::kHeartbeatLostMs / 1000) + " s");
  }
}

// --- addresses
// ------------------------------------------------------------------------------------

Address Stream::mint(uint64_t bytes) {
  const Lock held = lock();
  return mint(bytes, held);
}

Address Stream::mint(uint64_t bytes, const Lock& held) {
  checkUsable();
  checkRoom(bytes, held);
  const uint32_t slot = takeSlots(wire::slotsFor(bytes));
  slots_[slot] = {bytes, 0, nullptr, false, true};
  memory_.allocated_bytes += bytes;
  memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.allocated_bytes);
  ++memory_.allocations;
  live_segments_.fetch_add(1, std::memory_order_relaxed);
  return wire::makeAddress(options_.session, slot);
}

void Stream::raiseOutOfMemory(uint64_t bytes) const {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "shoal device ", options_.name,
                   " (shoal:", static_cast<int>(options_.index), ") is out of memory: ", bytes,
                   " bytes were asked for, ", memory_.allocated_bytes, " of ", memory_.limit_bytes,
                   " bytes are in use. Free tensors, use a smaller batch, or lease a device with "
                   "more memory.");
  __builtin_unreachable();
}

uint32_t Stream::takeSlots(uint64_t count) {
  auto& free = count == 1 ? free_slots_ : free_runs_[count];
  if (!free.empty()) {
    const uint32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  TORCH_CHECK(next_slot_ + count <= wire::kSlotsMax, "shoal: more than ", wire::kSlotsMax,
              " tensors are alive on one device");
  const uint32_t slot = next_slot_;
  next_slot_ += static_cast<uint32_t>(count);
  if (slots_.size() < next_slot_) slots_.resize(std::max<size_t>(next_slot_, slots_.size() * 2));
  return slot;
}

void Stream::release(Address address) noexcept {
  bool last = false;
  try {
    const Lock held = lock();
    Slot& slot = slots_[wire::slotOf(address)];
    memory_.allocated_bytes -= slot.bytes;
    ++memory_.frees;
    const uint64_t count = wire::slotsFor(slot.bytes);
    if (usable() && slot.bound) {
      unsent_frees_.push_back(address);
      // Large memory is given back at once; a host block only when the worker is past the free.
      const bool now = slot.bytes >= kPromptFreeBytes || slot.host_block != 0;
      if (now || unsent_frees_.size() >= kUnsentFreesMax) sendFrees();
      if (slot.host_block != 0) host_releases_.push_back({slot.host_block - 1, sequence_});
    } else if (slot.host_block != 0) {
      HostMemory::get().release(slot.host_block - 1);
    }
    slot = Slot();
    (count == 1 ? free_slots_ : free_runs_[count]).push_back(wire::slotOf(address));
    last = live_segments_.fetch_sub(1) == 1 && !usable();
  } catch (...) {
    // The worker is gone, and its memory with it. The next call says so.
    last = live_segments_.fetch_sub(1) == 1 && !usable();
  }
  if (last) Devices::get().sweep();
}

void Stream::bind(Address base, const Lock& held) {
  Slot& slot = slots_[wire::slotOf(base)];
  slot.bound = true;
  post(Kind::kAllocate, {base, slot.bytes}, held);
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

void Stream::sendFrees() {
  if (unsent_frees_.empty()) return;
  uint64_t* out = reserve(Kind::kFree, unsent_frees_.size(), 0);
  std::copy(unsent_frees_.begin(), unsent_frees_.end(), out);
  requests_->commit(pending_bytes_);
  ++sequence_;
  ++traffic_.messages;
  traffic_.stream_bytes += pending_bytes_;
  unsent_frees_.clear();
}

uint64_t* Stream::begin(Kind kind, size_t words, uint16_t flags, const Lock&) {
  checkUsable();
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

uint64_t Stream::post(Kind kind, std::initializer_list<uint64_t> words, const Lock& held) {
  uint64_t* out = begin(kind, words.size(), 0, held);
  std::copy(words.begin(), words.end(), out);
  return commit(held);
}

uint64_t Stream::post(Kind kind, std::initializer_list<uint64_t> words) {
  const Lock held = lock();
  return post(kind, words, held);
}

std::string Stream::placeOf(uint64_t sequence) {
  uint64_t token = 0;
  {
    const Lock held = lock();
    if (sequence <= sequence_ && sequence + kLines > sequence_) token = lines_[sequence % kLines];
  }
  const auto hook = lineHooks().describe;
  return token != 0 && hook != nullptr ? hook(token) : "";
}

// --- replies
// --------------------------------------------------------------------------------------

Stream::Payload Stream::await(uint64_t sequence) {
  while (true) {
    std::unique_lock held(reply_mutex_);
    const auto stashed = stash_.find(sequence);
    if (stashed != stash_.end()) {
      reply_ = std::move(stashed->second);
      stash_.erase(stashed);
    } else if (!replies_->poll(reply_)) {
      checkUsable();
      replies_->wait(kSpinUs, kSliceMs);
      continue;
    }
    if (reply_.size() < 2) raiseLost("it sent a malformed reply");
    if (reply_[1] != sequence) {
      // Another thread waits for this one.
      stash_.emplace(reply_[1], reply_);
      held.unlock();
      std::this_thread::yield();
      continue;
    }
    const auto error = static_cast<wire::ErrorKind>(wire::headerFlags(reply_[0]));
    Payload payload(reply_.begin() + 2, reply_.end());
    held.unlock();
    if (error != wire::ErrorKind::kNone) raise(error, payload);
    return payload;
  }
}

Stream::Payload Stream::request(Kind kind, std::initializer_list<uint64_t> words) {
  noteLine();
  uint64_t sequence;
  {
    const Lock held = lock();
    sequence = post(kind, words, held);
    countRoundTrip(held);
  }
  return await(sequence);
}

void Stream::raise(wire::ErrorKind kind, const Payload& payload) {
  wire::Reader reader(payload.data(), payload.size());
  const uint64_t sequence = reader.word("failed call");
  const uint64_t text_bytes = reader.word("text");
  const uint64_t name_bytes = reader.word("name");
  const auto both = reader.bytes(text_bytes + name_bytes,
                                 wire::kErrorTextBytesMax + wire::kOperatorNameBytesMax, "error");
  std::string text(both.substr(0, text_bytes));
  const std::string name(both.substr(text_bytes));
  const std::string place = placeOf(sequence);
  if (!name.empty() || !place.empty()) {
    text += "\n[shoal] raised by " + (name.empty() ? std::string("a transfer") : name) +
            (place.empty() ? "" : ", called at " + place) + ", on device " + options_.name;
  }
  raiseError(kind, text);
}

void Stream::waitCompleted(uint64_t sequence) {
  if (!completed(sequence)) synchronize();
}

// --- transfers
// ------------------------------------------------------------------------------------

void Stream::releaseHostAfter(uint64_t host_offset, uint64_t sequence) {
  const Lock held = lock();
  host_releases_.push_back({host_offset, sequence});
}

void Stream::reclaimHost(const Lock&) {
  const uint64_t done = progress_->completed.load(std::memory_order_acquire);
  while (!host_releases_.empty() && host_releases_.front().sequence <= done) {
    HostMemory::get().release(host_releases_.front().offset);
    host_releases_.pop_front();
  }
}

// Copies pageable memory into a host block: the only copy that the client makes.
uint64_t Stream::stage(const void* from, uint64_t bytes) {
  {
    const Lock held = lock();
    reclaimHost(held);
  }
  HostMemory& host = HostMemory::get();
  const uint64_t offset = host.allocate(bytes);
  memory::copyBytes(host.at(offset), from, bytes);
  return offset;
}

void Stream::upload(Address base, uint64_t offset, const void* from, uint64_t bytes,
                    bool non_blocking) {
  if (bytes == 0) return;
  checkUsable();
  noteLine();
  if (bytes <= wire::kInlineBytesMax) {
    const Lock held = lock();
    ensureBound(base, held);
    uint64_t* out = begin(Kind::kWrite, 2 + (bytes + 7) / 8, 0, held);
    out[0] = base + offset;
    out[1] = bytes;
    out[1 + (bytes + 7) / 8] = 0;
    std::memcpy(out + 2, from, bytes);
    commit(held);
    traffic_.bytes_in += bytes;
    traffic_.bytes_copied += bytes;
    return;
  }
  if (HostMemory::exists() && HostMemory::get().contains(from)) {
    uint64_t sequence;
    {
      const Lock held = lock();
      ensureBound(base, held);
      sequence =
          post(Kind::kCopyIn, {base + offset, bytes, HostMemory::get().offsetOf(from)}, held);
      traffic_.bytes_in += bytes;
    }
    HostMemory::get().usedBy(from, options_.session, sequence);
    if (!non_blocking) waitCompleted(sequence);
    return;
  }
  const uint64_t block = stage(from, bytes);
  uint64_t wait_for = 0;
  {
    const Lock held = lock();
    Slot& slot = slots_[wire::slotOf(base)];
    traffic_.bytes_in += bytes;
    traffic_.bytes_copied += bytes;
    if (options_.is_cpu && offset == 0 && bytes == slot.bytes) {
      // The whole segment is new: the staged block itself becomes its memory.
      const uint64_t sequence = post(Kind::kAdopt, {base, bytes, block}, held);
      if (slot.host_block != 0) host_releases_.push_back({slot.host_block - 1, sequence});
      slot.host_block = block + 1;
      slot.memory = HostMemory::get().at(block);
      slot.bound = true;
      return;
    }
    ensureBound(base, held);
    const uint64_t sequence = post(Kind::kCopyIn, {base + offset, bytes, block}, held);
    host_releases_.push_back({block, sequence});
    if (bytes > kStagedBytesMax || host_releases_.size() > 64) {
      wait_for = host_releases_[host_releases_.size() / 2].sequence;
    }
  }
  if (wait_for != 0) waitCompleted(wait_for);
}

// The segment's bytes if we see them and nothing that was sent can still change them: then a read
// needs no message at all.
const std::byte* Stream::settledMemory(Address base, const Lock&) const {
  const std::byte* memory = slots_[wire::slotOf(base)].memory;
  if (memory == nullptr || !usable() || !completed(sequence_)) return nullptr;
  return progress_->failed.load(std::memory_order_relaxed) == 0 ? memory : nullptr;
}

// Waits for everything so far and asks the worker where [base + offset, + bytes) is.
const std::byte* Stream::locate(Address base, uint64_t offset, uint64_t bytes) {
  const Payload place = request(Kind::kLocate, {base + offset, bytes});
  const bool in_host = place.size() == 2 && place[0] == 1 && HostMemory::exists();
  const uint64_t limit = in_host ? HostMemory::get().bytes() : arena_.bytes();
  if (place.size() != 2 || place[0] > 1 || place[1] < offset || place[1] > limit ||
      bytes > limit - place[1]) {
    raiseLost("it named memory that does not exist");
  }
  const std::byte* memory = (in_host ? HostMemory::get().at(0) : arena_.data()) + place[1] - offset;
  const Lock held = lock();
  slots_[wire::slotOf(base)].memory = memory;
  return memory;
}

void Stream::download(Address base, uint64_t offset, void* to, uint64_t bytes, bool non_blocking) {
  if (bytes == 0) return;
  const std::byte* memory;
  {
    const Lock held = lock();
    ensureBound(base, held);
    memory = settledMemory(base, held);
  }
  const bool pinned = HostMemory::exists() && HostMemory::get().contains(to);
  if (memory == nullptr && bytes <= wire::kInlineBytesMax) {
    const Payload payload = request(Kind::kRead, {base + offset, bytes});
    if (payload.size() * 8 < bytes) raiseLost("it sent too few bytes");
    std::memcpy(to, payload.data(), bytes);
    return countTransfer(0, bytes, bytes);
  }
  if (pinned) {
    const uint64_t sequence =
        post(Kind::kCopyOut, {base + offset, bytes, HostMemory::get().offsetOf(to)});
    countTransfer(0, bytes, 0);
    HostMemory::get().usedBy(to, options_.session, sequence);
    if (!non_blocking) synchronize();
    return;
  }
  if (memory == nullptr && arena_.data() == nullptr)
    return downloadStaged(base + offset, to, bytes);
  if (memory == nullptr) memory = locate(base, offset, bytes);
  shoal::memory::copyBytes(to, memory + offset, bytes);
  countTransfer(0, bytes, bytes);
}

// From a device whose memory we do not see: through a block of host memory.
void Stream::downloadStaged(Address from, void* to, uint64_t bytes) {
  HostMemory& host = HostMemory::get();
  const uint64_t block = host.allocate(bytes);
  post(Kind::kCopyOut, {from, bytes, block});
  synchronize();
  memory::copyBytes(to, host.at(block), bytes);
  host.release(block);
  countTransfer(0, bytes, bytes);
}

void Stream::countTransfer(uint64_t in, uint64_t out, uint64_t copied) {
  const Lock held = lock();
  traffic_.bytes_in += in;
  traffic_.bytes_out += out;
  traffic_.bytes_copied += copied;
}

// --- state
// ----------------------------------------------------------------------------------------

MemoryUse Stream::memoryUse() {
  const Lock held = lock();
  return memory_;
}

void Stream::resetPeak() {
  const Lock held = lock();
  memory_.peak_bytes = memory_.allocated_bytes;
}

Traffic Stream::traffic() {
  const Lock held = lock();
  return traffic_;
}

}  // namespace shoal::client
