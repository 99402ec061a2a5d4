#include "network/tls/tls.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "network/tls/libssl.h"
#include "transport/ending.h"
#include "transport/ring.h"

namespace shoal::network {
namespace {

constexpr int kReadBufferBytes = 256 * 1024;
constexpr long kWriteBufferBytes = 256 * 1024;
constexpr size_t kChunkBytes = size_t{1} << 20;  // of one SSL_write
// A key of AES-GCM is safe for about 2^24 records. The connection changes it long before.
constexpr uint64_t kBytesPerKey = uint64_t{32} << 30;
// TCP probes a silent connection after a second. Four unanswered probes end it.
constexpr int kKeepIdleS = 1, kKeepIntervalS = 1, kKeepCount = 4;

std::string errorText(const char* what) {
  const LibSsl& s = LibSsl::get();
  char text[256] = "";
  const unsigned long code = s.ERR_get_error();
  if (code != 0) s.ERR_error_string_n(code, text, sizeof text);
  s.ERR_clear_error();
  return std::string(what) + (text[0] != 0 ? std::string(": ") + text : "");
}

[[noreturn]] void failWith(int error) {
  throw ConnectionLost(std::string("the connection broke: ") + std::strerror(error),
                       transport::isSilence(error) ? ConnectionLost::Cause::kSilent
                                                   : ConnectionLost::Cause::kClosed);
}

void require(bool good, const char* what) {
  if (!good) throw ConnectionLost(errorText(what));
}

Scoped readCertificate(const std::string& pem) {
  const LibSsl& s = LibSsl::get();
  const Scoped bio{s.BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), s.BIO_vfree};
  void* made = s.PEM_read_bio_X509(bio.object, nullptr, nullptr, nullptr);
  require(made != nullptr, "a certificate of the identity cannot be read");
  return {made, s.X509_free};
}

void set(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof value);  // best effort: errors are ignored
}

}  // namespace

Tls::Tls(const Identity& identity) {
  const LibSsl& s = LibSsl::get();
  s.ERR_clear_error();
  context_ = s.SSL_CTX_new(s.TLS_method());
  require(context_ != nullptr, "TLS cannot be set up");
  Scoped guard{context_, s.SSL_CTX_free};
  require(s.SSL_CTX_ctrl(context_, kSslCtrlMinProtocol, kTls13, nullptr) == 1,
          "TLS 1.3 is missing");
  s.SSL_CTX_ctrl(context_, kSslCtrlMode, kModeAutoRetry, nullptr);
  s.SSL_CTX_ctrl(context_, kSslCtrlReadAhead, 1, nullptr);
  s.SSL_CTX_set_default_read_buffer_len(context_, kReadBufferBytes);
  require(s.SSL_CTX_set_ciphersuites(
              context_,
              "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256") == 1,
          "the ciphers of TLS 1.3 are missing");
  require(s.SSL_CTX_set_num_tickets(context_, 0) == 1, "tickets cannot be turned off");
  const Scoped certificate = readCertificate(identity.certificate);
  require(s.SSL_CTX_use_certificate(context_, certificate.object) == 1,
          "OpenSSL rejected the certificate. Run: shoal join CODE@HOST");
  {
    const Scoped bio{s.BIO_new_mem_buf(identity.key.data(), static_cast<int>(identity.key.size())),
                     s.BIO_vfree};
    const Scoped key{s.PEM_read_bio_PrivateKey(bio.object, nullptr, nullptr, nullptr),
                     s.EVP_PKEY_free};
    require(key.object != nullptr, "the key of the identity cannot be read");
    require(s.SSL_CTX_use_PrivateKey(context_, key.object) == 1,
            "OpenSSL rejected the key. Run: shoal join CODE@HOST");
  }
  require(s.SSL_CTX_check_private_key(context_) == 1, "the key does not match the certificate");
  if (!identity.authority.empty()) {
    const Scoped authority = readCertificate(identity.authority);
    require(s.X509_STORE_add_cert(s.SSL_CTX_get_cert_store(context_), authority.object) == 1,
            "OpenSSL rejected the pool's authority. Run: shoal join CODE@HOST");
  }
  s.SSL_CTX_set_verify(context_, kVerifyPeer | kVerifyFailIfNone, nullptr);
  guard.object = nullptr;
}

void Tls::trust(const std::string& certificate) {
  const LibSsl& s = LibSsl::get();
  Scoped read = readCertificate(certificate);
  require(s.X509_STORE_add_cert(s.SSL_CTX_get_cert_store(context_), read.object) == 1,
          "OpenSSL rejected the certificate of another worker");
  trusted_.push_back(std::exchange(read.object, nullptr));
}

Tls::~Tls() {
  for (void* certificate : trusted_) LibSsl::get().X509_free(certificate);
  LibSsl::get().SSL_CTX_free(context_);
}

Connection::Connection(const Tls& tls, int fd) : fd_(fd) {
  const LibSsl& s = LibSsl::get();
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleS);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalS);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
  ssl_ = s.SSL_new(tls.context_);
  out_ = s.BIO_new(s.BIO_f_buffer());
  if (ssl_ == nullptr || out_ == nullptr) {
    close(fd);
    throw ConnectionLost("TLS cannot be set up");
  }
  s.BIO_int_ctrl(out_, kBioBufferSize, kWriteBufferBytes, 1);
  s.SSL_set_bio(ssl_, s.BIO_new_socket(fd, kBioNoClose),
                s.BIO_push(out_, s.BIO_new_socket(fd, kBioNoClose)));
}

Connection::~Connection() {
  if (ssl_ != nullptr) LibSsl::get().SSL_free(ssl_);
  if (fd_ >= 0) close(fd_);
}

std::unique_ptr<Connection> Connection::connect(const Tls& tls, int fd,
                                                const std::string& server_name,
                                                int64_t deadline_ns) {
  std::unique_ptr<Connection> made(new Connection(tls, fd));
  const LibSsl& s = LibSsl::get();
  require(s.SSL_set1_host(made->ssl_, server_name.c_str()) == 1, "the server's name is not valid");
  s.SSL_set_connect_state(made->ssl_);
  made->handshake(deadline_ns);
  return made;
}

std::unique_ptr<Connection> Connection::accept(const Tls& tls, int fd, int64_t deadline_ns) {
  std::unique_ptr<Connection> made(new Connection(tls, fd));
  LibSsl::get().SSL_set_accept_state(made->ssl_);
  made->handshake(deadline_ns);
  return made;
}

void Connection::handshake(int64_t deadline_ns) {
  const LibSsl& s = LibSsl::get();
  s.ERR_clear_error();
  int result;
  while ((result = s.SSL_do_handshake(ssl_)) != 1) await(result, "the handshake", deadline_ns);
}

void Connection::await(int result, const char* what, int64_t deadline_ns) {
  const int reason = LibSsl::get().SSL_get_error(ssl_, result);
  if (reason != kErrorWantRead && reason != kErrorWantWrite) fail(result, what);
  awaitSocket(reason == kErrorWantRead, what, deadline_ns);
}

void Connection::awaitSocket(bool to_read, const char* what, int64_t deadline_ns) {
  pollfd waited{fd_, static_cast<short>(to_read ? POLLIN : POLLOUT), 0};
  while (true) {
    int64_t left_ms = -1;
    if (deadline_ns >= 0) left_ms = (deadline_ns - nowNs() + 999999) / 1000000;
    if (deadline_ns >= 0 && left_ms <= 0) {
      throw ConnectionLost(std::string(what) + " was not finished in time");
    }
    if (poll(&waited, 1, static_cast<int>(std::min<int64_t>(left_ms, 60000))) > 0) return;
  }
}

void Connection::fail(int result, const char* what) {
  const LibSsl& s = LibSsl::get();
  const int system_error = errno;
  const int reason = s.SSL_get_error(ssl_, result);
  const long verified = s.SSL_get_verify_result(ssl_);
  if (verified != 0) {
    s.ERR_clear_error();
    throw ConnectionLost(std::string("the other side's certificate was refused: ") +
                         s.X509_verify_cert_error_string(verified));
  }
  // A killed process does not close its TLS session. OpenSSL 3 reports that as a protocol error.
  const bool ended = s.ERR_peek_error() == kErrorUnexpectedEof;
  if (reason == kErrorZeroReturn || (reason == kErrorSyscall && system_error == 0) || ended) {
    s.ERR_clear_error();
    throw ConnectionLost("the other side closed the connection", ConnectionLost::Cause::kClosed);
  }
  if (reason == kErrorSyscall) {
    s.ERR_clear_error();
    failWith(system_error);
  }
  throw ConnectionLost(errorText(what));
}

PeerName Connection::peer(const Tls& tls) const {
  const LibSsl& s = LibSsl::get();
  const Scoped certificate{s.SSL_get1_peer_certificate(ssl_), s.X509_free};
  if (certificate.object == nullptr) throw ConnectionLost("the other side has no certificate");
  for (const void* known : tls.trusted_) {
    if (s.X509_cmp(known, certificate.object) == 0) return {"", "worker"};
  }
  void* subject = s.X509_get_subject_name(certificate.object);
  const auto text = [&](int nid) {
    char found[256] = "";
    s.X509_NAME_get_text_by_NID(subject, nid, found, sizeof found);
    return std::string(found);
  };
  return {text(kNidCommonName), text(kNidUnit)};
}

void Connection::readBy(void* to, size_t bytes, int64_t deadline_ns) {
  const LibSsl& s = LibSsl::get();
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    errno = 0;
    const int got = s.SSL_read(ssl_, at, static_cast<int>(std::min(bytes, kChunkBytes)));
    if (got <= 0) {
      await(got, "a greeting", deadline_ns);
      continue;
    }
    at += got;
    bytes -= static_cast<size_t>(got);
  }
}

void Connection::writeBy(const void* from, size_t bytes, int64_t deadline_ns) {
  const LibSsl& s = LibSsl::get();
  int result;
  errno = 0;
  while ((result = s.SSL_write(ssl_, from, static_cast<int>(bytes))) <= 0) {
    await(result, "a greeting", deadline_ns);
  }
  if (s.BIO_ctrl(out_, kBioFlush, 0, nullptr) <= 0) {  // a greeting fits any socket's buffer
    throw ConnectionLost("the connection broke");
  }
}

size_t Connection::readSome(void* to, size_t bytes_max) {
  const LibSsl& s = LibSsl::get();
  const int want = static_cast<int>(std::min(bytes_max, kChunkBytes));
  int64_t start = 0;
  while (true) {
    errno = 0;
    const int got = s.SSL_read(ssl_, to, want);
    if (got > 0) return static_cast<size_t>(got);
    const int reason = s.SSL_get_error(ssl_, got);
    if (reason != kErrorWantRead) fail(got, "a read");
    // More bytes are usually near, and a sleeping core wakes slowly. Do not yield: the scheduler
    // may run every other thread first.
    const int64_t now = nowNs();
    if (start == 0) start = now;
    if (now - start < spin_ns_) {
      for (int i = 0; i < 20; ++i) cpuRelax();
      continue;
    }
    pollfd waited{fd_, POLLIN, 0};
    const int64_t left_ms = silence_ms_ == 0 ? -1 : silence_ms_ - (now - start) / 1000000;
    if (silence_ms_ > 0 && left_ms <= 0) {
      throw ConnectionLost("nothing was heard of it over the network for " +
                               std::to_string(silence_ms_ / 1000) + " s",
                           ConnectionLost::Cause::kSilent);
    }
    poll(&waited, 1, static_cast<int>(left_ms));
  }
}

void Connection::write(const void* from, size_t bytes) {
  const LibSsl& s = LibSsl::get();
  auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const int chunk = static_cast<int>(std::min(bytes, kChunkBytes));
    errno = 0;
    const int sent = s.SSL_write(ssl_, at, chunk);
    if (sent <= 0) {
      await(sent, "a write", /*deadline_ns=*/-1);
      continue;
    }
    at += sent;
    bytes -= static_cast<size_t>(sent);
    written_bytes_ += static_cast<size_t>(sent);
  }
  if (written_bytes_ > kBytesPerKey) {
    s.SSL_key_update(ssl_, kKeyUpdateNotRequested);  // goes with the next record
    written_bytes_ = 0;
  }
}

void Connection::flush() {
  const LibSsl& s = LibSsl::get();
  errno = 0;
  while (s.BIO_ctrl(out_, kBioFlush, 0, nullptr) <= 0) {
    if (s.BIO_test_flags(out_, kBioShouldRetry) == 0) {
      failWith(errno);
    }
    awaitSocket(/*to_read=*/false, "a write", /*deadline_ns=*/-1);
    errno = 0;
  }
}

void Connection::shutdown() noexcept {
  if (fd_ >= 0) ::shutdown(fd_, SHUT_RDWR);
}

void Connection::abandon() noexcept {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

}  // namespace shoal::network
