// TLS 1.3 connections between a client and a worker, or between two workers. Both sides show a
// certificate of the pool's own authority. The library is the libssl that Python's `ssl` uses,
// loaded at run time: a machine that runs Shoal has it, but seldom has its headers.
//
// A connection carries tensors one way, and one thread uses it: OpenSSL allows no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.h"

namespace shoal::network {

// The other side is gone, or has the wrong identity. `what()` says how this side noticed.
class ConnectionLost : public std::runtime_error {
 public:
  enum class Cause { kOther, kClosed, kSilent };
  explicit ConnectionLost(const std::string& text, Cause cause = Cause::kOther)
      : std::runtime_error(text), cause_(cause) {}
  Cause cause() const { return cause_; }

 private:
  Cause cause_;
};

// PEM texts. Without an authority, no certificate but those of trust() is accepted.
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
  // Accepts this very certificate, which nobody else has signed, from now on. Not while connections
  // are being made.
  void trust(const std::string& certificate);

 private:
  friend class Connection;
  void* context_;
  std::vector<void*> trusted_;  // by trust()
};

class Connection {
 public:
  // Both own `fd` and finish the handshake before `deadline_ns` (of nowNs()).
  // `server_name` is what the server's certificate must say.
  static std::unique_ptr<Connection> connect(const Tls& tls, int fd, const std::string& server_name,
                                             int64_t deadline_ns);
  static std::unique_ptr<Connection> accept(const Tls& tls, int fd, int64_t deadline_ns);
  ~Connection();
  Connection(const Connection&) = delete;

  int fd() const { return fd_; }
  // Whoever shows a certificate of trust() has the role "worker", and no name.
  PeerName peer(const Tls& tls) const;

  // For greetings. Both throw if they are not done by `deadline_ns`.
  void readBy(void* to, size_t bytes, int64_t deadline_ns);
  void writeBy(const void* from, size_t bytes, int64_t deadline_ns);

  // All of them throw ConnectionLost, and wait while the other side lives. A read also throws if
  // nothing arrives for `silence_ms`.
  void setSilence(int silence_ms) { silence_ms_ = silence_ms; }
  // How long a read spins before it sleeps.
  void setSpin(int64_t spin_ns) { spin_ns_ = spin_ns; }
  size_t readSome(void* to, size_t bytes_max);
  // Written bytes leave when the buffer is full, or with flush().
  void write(const void* from, size_t bytes);
  void flush();

  // Ends the connection, even while a thread waits in it. Any thread may call this.
  void shutdown() noexcept;
  // Call this in a forked child: closes without telling the other side.
  void abandon() noexcept;

 private:
  Connection(const Tls& tls, int fd);
  void handshake(int64_t deadline_ns);
  // Waits until the operation that returned `result` can go on. Throws if it cannot, or not by
  // `deadline_ns` (-1: there is no deadline).
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
