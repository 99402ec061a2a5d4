// Reads words and blocks from a connection: small ones through a buffer, large ones straight to
// where they belong.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "network/tls/tls.h"
#include "wire/cursor.h"
#include "wire/limits.h"
#include "wire/message.h"

namespace shoal::network {

class Reader {
 public:
  explicit Reader(Connection& connection) : connection_(connection), buffer_(kBufferBytes) {}

  uint64_t word() {
    uint64_t word;
    read(&word, sizeof word);
    return word;
  }

  // The next message or frame, with its header. `what` names it in errors.
  void message(std::vector<uint64_t>& words, const char* what, size_t bytes_min) {
    const uint64_t header = word();
    const size_t bytes = wire::headerBytes(header);
    if (bytes < bytes_min || bytes % 8 != 0 || bytes > wire::kMessageBytesMax) {
      throw wire::ProtocolError(std::string(what) + " of " + std::to_string(bytes) +
                                " bytes is out of range");
    }
    words.resize(bytes / 8);
    words[0] = header;
    read(words.data() + 1, bytes - 8);
  }

  void read(void* to, size_t bytes) {
    auto* at = static_cast<std::byte*>(to);
    while (bytes > 0) {
      if (begin_ == end_) {
        if (bytes >= kDirectBytes) {
          const size_t got = connection_.readSome(at, bytes);
          at += got;
          bytes -= got;
          continue;
        }
        begin_ = 0;
        end_ = connection_.readSome(buffer_.data(), buffer_.size());
      }
      const size_t chunk = std::min(bytes, end_ - begin_);
      std::memcpy(at, buffer_.data() + begin_, chunk);
      begin_ += chunk;
      at += chunk;
      bytes -= chunk;
    }
  }

 private:
  static constexpr size_t kBufferBytes = 64 * 1024;
  static constexpr size_t kDirectBytes = 16 * 1024;
  Connection& connection_;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0, end_ = 0;
};

}  // namespace shoal::network
