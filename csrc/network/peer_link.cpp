#include "network/peer_link.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "network/data_connections.h"
#include "network/tls/socket_reader.h"
#include "transport/ring.h"

namespace shoal::network {
namespace {

constexpr int kSilenceMs = transport::kHeartbeatLostMs;
constexpr int64_t kTellNs = 20000000;  // between two checks whether there is progress to report
constexpr int64_t kSpinUs = 30;        // requests come ahead, so what they need is seldom just done

bool connectBy(int fd, const addrinfo& address, int64_t deadline_ns) {
  if (::connect(fd, address.ai_addr, address.ai_addrlen) == 0) return true;
  if (errno != EINPROGRESS) return false;
  pollfd waited{fd, POLLOUT, 0};
  const int64_t left_ms = (deadline_ns - nowNs()) / 1000000;
  if (left_ms <= 0 || poll(&waited, 1, static_cast<int>(left_ms)) <= 0) {
    errno = ETIMEDOUT;
    return false;
  }
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  errno = error;
  return error == 0;
}

int dial(const PeerEndpoint& peer, int64_t deadline_ns) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(peer.port);
  if (const int error = getaddrinfo(peer.host.c_str(), port.c_str(), &hints, &found)) {
    throw ConnectionLost(peer.host + ": " + gai_strerror(error));
  }
  int fd = -1;
  for (const addrinfo* at = found; at != nullptr && fd < 0; at = at->ai_next) {
    fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && !connectBy(fd, *at, deadline_ns)) {
      const int error = errno;
      close(fd);
      fd = -1;
      errno = error;
    }
  }
  freeaddrinfo(found);
  if (fd < 0) {
    throw ConnectionLost(peer.host + ":" + port + " cannot be reached: " + std::strerror(errno));
  }
  return fd;
}

void raise(std::atomic<uint64_t>& word, uint64_t value) {
  uint64_t before = word.load(std::memory_order_relaxed);
  while (before < value && !word.compare_exchange_weak(before, value, std::memory_order_release)) {
  }
}

}  // namespace

std::unique_ptr<Connection> openPeer(const Tls& tls, const PeerEndpoint& peer, Purpose purpose,
                                     uint32_t member) {
  const int64_t deadline = nowNs() + kSilenceMs * int64_t{1000000};
  const int fd = dial(peer, deadline);
  char prefix[sizeof kDataMagic - 1 + sizeof peer.data_id];
  std::memcpy(prefix, kDataMagic, sizeof kDataMagic - 1);
  std::memcpy(prefix + sizeof kDataMagic - 1, peer.data_id.data(), peer.data_id.size());
  if (send(fd, prefix, sizeof prefix, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof prefix)) {
    close(fd);
    throw ConnectionLost(peer.host + " closed the connection");
  }
  return greet(tls, fd, peer.server_name, {peer.secret, purpose, member}, deadline);
}

PeerReader::~PeerReader() {
  {
    const std::lock_guard held(mutex_);
    ending_ = true;
    if (connection_ != nullptr) connection_->shutdown();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// --- the connection

void PeerReader::connect() {
  if (connection_ != nullptr) return;
  auto made = openPeer(tls_, peer_, Purpose::kRead, member_);
  made->setSilence(kSilenceMs);
  buffer_.resize(kChunkBytes);
  const std::lock_guard held(mutex_);
  connection_ = std::move(made);
  reader_ = std::make_unique<Reader>(*connection_);
}

void PeerReader::send(const ReadRequest& request) {
  connection_->write(&request, sizeof request);
  connection_->flush();
}

bool PeerReader::receive(const ReadRequest& request, const Take& take) {
  std::vector<uint64_t> frame;
  std::optional<bool> there;
  const wire::Overloaded handlers{
      [](const WaitFrame&) {},
      [&](const EndFrame& end) { there = end.there; },
      [&](const ChunkFrame& chunk) {
        if (chunk.bytes != request.bytes) {
          throw ConnectionLost("it sent another number of bytes");
        }
        take(*reader_);
      },
  };
  while (!there) {
    try {
      reader_->message(frame, "a frame", 16);
      if (!ReadFrames::decode(frame, handlers)) {
        throw ConnectionLost("it sent a frame of unknown kind");
      }
    } catch (const wire::ProtocolError& error) {
      throw ConnectionLost(std::string("it sent a malformed frame: ") + error.what());
    }
  }
  return *there;
}

void PeerReader::setLost(std::string why) {
  const std::lock_guard held(mutex_);
  lost_ = std::move(why);
}

// --- reading

bool PeerReader::read(const ReadRequest& request, const Chunk& chunk) {
  std::unique_lock held(mutex_);
  const bool asked = !asked_.empty() && asked_.front()->request == request;
  if (!asked) {
    while (!asked_.empty()) dropFirst();
    changed_.wait(held, [&] { return coming_.empty(); });
    if (!lost_.empty()) throw ConnectionLost(lost_);
    held.unlock();
    return readNow(request, chunk);
  }
  const std::shared_ptr<Answer> answer = asked_.front();
  if (answer->done) ahead_bytes_ += request.bytes;
  changed_.wait(held, [&] { return answer->done || !lost_.empty(); });
  dropFirst();
  if (!answer->done) throw ConnectionLost(lost_);
  held.unlock();
  if (answer->there) chunk(answer->block.data.get(), 0, request.bytes);
  giveBack(std::move(answer->block));
  return answer->there;
}

// An interrupted read leaves its answer in the connection, where the next read would take it for
// its own, so there is no next read. It also does not wait twice for a peer that was silent for
// seconds.
bool PeerReader::readNow(const ReadRequest& request, const Chunk& chunk) {
  setLost("a read from it was broken off");
  try {
    connect();
    send(request);
    const bool there = receive(request, [&](Reader& reader) {
      for (uint64_t at = 0; at < request.bytes; at += kChunkBytes) {
        const uint64_t bytes = std::min(kChunkBytes, request.bytes - at);
        reader.read(buffer_.data(), bytes);
        chunk(buffer_.data(), at, bytes);
      }
    });
    setLost("");
    return there;
  } catch (const ConnectionLost& error) {
    setLost(error.what());
    throw;
  }
}

// --- asking ahead

bool PeerReader::ask(const ReadRequest& request) {
  const std::lock_guard held(mutex_);
  if (!lost_.empty()) return true;  // read() reports it
  if (request.bytes > kAheadBytesMax - asked_bytes_) return false;
  asked_.push_back(std::make_shared<Answer>(Answer{request}));
  coming_.push_back(asked_.back());
  asked_bytes_ += request.bytes;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
  return true;
}

void PeerReader::forget(uint64_t reading) {
  const std::lock_guard held(mutex_);
  while (!asked_.empty() && asked_.front()->request.reading <= reading) dropFirst();
}

void PeerReader::dropFirst() {
  asked_bytes_ -= asked_.front()->request.bytes;
  asked_.front()->wanted = false;
  asked_.pop_front();
}

void PeerReader::run() {
  prctl(PR_SET_NAME, "shoal-ahead");
  std::unique_lock held(mutex_);
  while (true) {
    changed_.wait(held, [&] { return ending_ || !coming_.empty(); });
    if (ending_) return;
    const std::vector<ReadRequest> unsent = toSend();
    if (!coming_.empty()) {
      const std::shared_ptr<Answer> answer = coming_.front();
      held.unlock();
      std::string why;
      try {
        take(*answer, unsent);
      } catch (const std::exception& error) {
        why = error.what();
      }
      held.lock();
      answer->done = why.empty();
      coming_.pop_front();
      if (!why.empty()) {
        lost_ = why;
        coming_.clear();
      }
    }
    changed_.notify_all();
  }
}

// Sends the requests that the peer does not have yet, without those that nobody wants any more.
std::vector<ReadRequest> PeerReader::toSend() {
  std::erase_if(coming_, [](const auto& answer) { return !answer->sent && !answer->wanted; });
  std::vector<ReadRequest> unsent;
  for (const auto& answer : coming_) {
    if (!std::exchange(answer->sent, true)) unsent.push_back(answer->request);
  }
  return unsent;
}

void PeerReader::take(Answer& answer, const std::vector<ReadRequest>& unsent) {
  connect();
  for (const ReadRequest& request : unsent) send(request);
  answer.block = blockOf(answer.request.bytes);
  answer.there = receive(answer.request, [&](Reader& reader) {
    reader.read(answer.block.data.get(), answer.request.bytes);
  });
}

// A training step asks for the sizes that the step before it asked for: a spare block fits.
PeerReader::Block PeerReader::blockOf(uint64_t bytes) {
  {
    const std::lock_guard held(mutex_);
    auto best = spare_.end();
    for (auto block = spare_.begin(); block != spare_.end(); ++block) {
      const bool fits = block->bytes >= bytes && block->bytes / 2 <= bytes;
      if (fits && (best == spare_.end() || block->bytes < best->bytes)) best = block;
    }
    if (best != spare_.end()) {
      Block found = std::move(*best);
      spare_bytes_ -= found.bytes;
      spare_.erase(best);
      return found;
    }
  }
  return {std::make_unique_for_overwrite<std::byte[]>(bytes), bytes};
}

void PeerReader::giveBack(Block block) {
  const std::lock_guard held(mutex_);
  if (block.data == nullptr) return;
  spare_bytes_ += block.bytes;
  spare_.push_back(std::move(block));
  while (spare_bytes_ > kAheadBytesMax) {  // the oldest have sizes that do not come again
    spare_bytes_ -= spare_.front().bytes;
    spare_.erase(spare_.begin());
  }
}

namespace {

// Answers the requests of one peer.
class ReadServer {
 public:
  ReadServer(Connection& connection, const ShownMemory& own) : connection_(connection), own_(own) {}

  void answer(const ReadRequest& request) {
    const auto await = [this](uint64_t sequence) { this->await(sequence); };
    try {
      const bool there = readExported(own_, request, await, [&](const std::byte* from) {
        write(ChunkFrame{request.bytes});
        connection_.write(from, request.bytes);
      });
      frame(EndFrame{there});
    } catch (const wire::ProtocolError& error) {
      throw ConnectionLost(std::string("it asked for bytes that cannot be: ") + error.what());
    }
  }

 private:
  // Sends a sign of life from time to time while this worker is not far enough.
  void await(uint64_t sequence) {
    int64_t spin_us = kSpinUs;
    while (!transport::awaitDone(*own_.progress, sequence, spin_us, transport::kHeartbeatMs)) {
      spin_us = 0;
      frame(WaitFrame{});
    }
  }

  void write(const auto& frame) {
    words_.clear();
    wire::append(words_, frame);
    connection_.write(words_.data(), words_.size() * 8);
  }
  void frame(const auto& frame) {
    write(frame);
    connection_.flush();
  }

  Connection& connection_;
  const ShownMemory& own_;
  std::vector<uint64_t> words_;  // of the frame that is sent
};

}  // namespace

void serveReads(Connection& connection, const ShownMemory& own, transport::Progress& seen) {
  Reader reader(connection);
  ReadServer server(connection, own);
  while (true) {
    ReadRequest request;
    reader.read(&request, sizeof request);
    server.answer(request);
    // The reader has read this worker's memory, so it counts as past its message.
    raise(seen.done, request.reading);
    transport::ringBell(seen);
  }
}

void followProgress(Connection& connection, transport::Progress& seen) {
  Reader reader(connection);
  while (true) {
    PeerProgress told;
    reader.read(&told, sizeof told);
    raise(seen.done, told.done);
    seen.heartbeat.store(told.heartbeat, std::memory_order_relaxed);
    transport::ringBell(seen);
  }
}

void tellProgress(const Tls& tls, const PeerEndpoint& peer, uint32_t member,
                  const transport::Progress& own) {
  const auto connection = openPeer(tls, peer, Purpose::kProgress, member);
  PeerProgress told{0, UINT64_MAX};
  while (true) {
    const PeerProgress now{own.done.load(std::memory_order_acquire),
                           own.heartbeat.load(std::memory_order_relaxed)};
    if (now != told) {
      connection->write(&now, sizeof now);
      connection->flush();
      told = now;
    }
    const timespec moment{0, kTellNs};
    nanosleep(&moment, nullptr);
  }
}

}  // namespace shoal::network
