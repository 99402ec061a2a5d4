// TLS 1.3 connections between a client and a worker, or between two workers: both sides show a
// certificate of the pool's own authority. The library is the libssl that Python's `ssl` uses too,
// found at run time: a machine that runs Shoal has it, though seldom its headers.
//
// A connection carries tensors one way only, and one thread uses it: OpenSSL allows no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace shoal::network {

// The other side is gone, or is not who it must be. `what()` says how that was noticed.
class ConnectionLost : public std::runtime_error {
 public:
  enum class Cause { kOther, kClosed, kSilent };
  explicit ConnectionLost(const std::string& text, Cause cause = Cause::kOther)
      : std::runtime_error(text), cause_(cause) {}
  Cause cause() const { return cause_; }

 private:
  Cause cause_;
};

// PEM texts.
struct Identity {
  std::string key, certificate, authority;
};

// What the certificate of the other side says.
struct PeerName {
  std::string name, role;
};

class Tls {
 public:
  explicit Tls(const Identity& identity);
  ~Tls();
  Tls(const Tls&) = delete;

 private:
  friend class Connection;
  void* context_;
};

class Connection {
 public:
  // Both own `fd` and finish the handshake before `deadline_ns` (of transport::nowNs()).
  // `server_name` is what the server's certificate must say.
  static std::unique_ptr<Connection> connect(const Tls& tls, int fd, const std::string& server_name,
                                             int64_t deadline_ns);
  static std::unique_ptr<Connection> accept(const Tls& tls, int fd, int64_t deadline_ns);
  ~Connection();
  Connection(const Connection&) = delete;

  int fd() const { return fd_; }
  PeerName peer() const;

  // Greetings: what is not done by `deadline_ns` never is.
  void readBy(void* to, size_t bytes, int64_t deadline_ns);
  void writeBy(const void* from, size_t bytes, int64_t deadline_ns);

  // All of them throw ConnectionLost, and wait for as long as the other side lives.
  // A read throws too if nothing comes for `silence_ms`.
  void setSilence(int silence_ms) { silence_ms_ = silence_ms; }
  // How long a read looks again and again before it sleeps.
  void setSpin(int64_t spin_ns) { spin_ns_ = spin_ns; }
  size_t readSome(void* to, size_t bytes_max);
  // What is written leaves when the buffer is full, or with flush().
  void write(const void* from, size_t bytes);
  void flush();

  // Ends it, also under a thread that waits in it. Any thread may call this.
  void shutdown() noexcept;
  // In a forked child: lets go without a word to the other side.
  void abandon() noexcept;

 private:
  Connection(const Tls& tls, int fd);
  void handshake(int64_t deadline_ns);
  // Waits until the operation that returned `result` can go on; throws if it never can, or not in
  // time (-1: there is no deadline).
  void await(int result, const char* what, int64_t deadline_ns);
  void awaitSocket(bool to_read, const char* what, int64_t deadline_ns);
  [[noreturn]] void fail(int result, const char* what);

  int fd_;
  void* ssl_ = nullptr;
  void* out_ = nullptr;         // the buffer before the socket; belongs to ssl_
  uint64_t written_bytes_ = 0;  // under the present key
  int silence_ms_ = 0;          // 0: for ever
  int64_t spin_ns_ = 30000;
};

}  // namespace shoal::network
