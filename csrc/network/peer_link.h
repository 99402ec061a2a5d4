// Copies between workers of one lease on different machines. The reader connects to the peer's
// device server, as the client does, and asks. The peer answers from its memory once it is far
// enough; its executor gets no message. A reader that knows what it will read asks ahead, and
// computes meanwhile.
//
// A second connection reports how far the reader is: the peer keeps exported segments until then.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "network/exported_read.h"
#include "network/frames.h"
#include "network/tls/socket_reader.h"
#include "network/tls/tls.h"
#include "transport/progress.h"

namespace shoal::network {

// Where a worker's device server listens, and the credentials that the worker checks.
struct PeerEndpoint {
  std::string host;
  uint16_t port = 0;
  std::string server_name;
  std::array<unsigned char, 16> data_id;
  std::array<unsigned char, 32> secret;
};

// Connects to a peer for `purpose`. `member` is this device's index in the lease.
std::unique_ptr<Connection> openPeer(const Tls& tls, const PeerEndpoint& peer, Purpose purpose,
                                     uint32_t member);

class PeerReader {
 public:
  // Bytes that are asked for and not read yet, at most.
  static constexpr uint64_t kAheadBytesMax = uint64_t{64} << 20;

  PeerReader(const Tls& tls, PeerEndpoint peer, uint32_t member)
      : tls_(tls), peer_(std::move(peer)), member_(member) {}
  ~PeerReader();
  PeerReader(const PeerReader&) = delete;

  // Asks for bytes that read() will want later, in the order of the reads. No earlier read may be
  // left that was not asked for: answers come in this order, and the peer takes an answer for the
  // reader's progress. Returns false, and does nothing, if there is no room for it now.
  bool ask(const ReadRequest& request);
  // Drops what messages up to `reading` asked for.
  void forget(uint64_t reading);
  // [at, + bytes) of the requested range. The same range may come twice: the last one counts.
  using Chunk = std::function<void(const std::byte* from, uint64_t at, uint64_t bytes)>;
  // Returns false if the peer has no such segment. Once it throws ConnectionLost, it always does.
  bool read(const ReadRequest& request, const Chunk& chunk);
  // Bytes that had arrived before they were read.
  uint64_t aheadBytes() const { return ahead_bytes_; }

 private:
  // Memory for an answer. Answers reuse it: the first touch of new pages costs more than a copy.
  struct Block {
    std::unique_ptr<std::byte[]> data;
    uint64_t bytes = 0;
  };
  struct Answer {
    ReadRequest request;
    Block block = {};
    bool wanted = true, sent = false, done = false, there = false;
  };
  using Answers = std::deque<std::shared_ptr<Answer>>;

  // --- used by the thread that owns the connection: run() while answers are due, else the reader
  void connect();
  void send(const ReadRequest& request);
  using Take = std::function<void(Reader& reader)>;  // reads the bytes of an answer
  bool receive(const ReadRequest& request, const Take& take);

  void run();  // the thread
  std::vector<ReadRequest> toSend();
  void take(Answer& answer, const std::vector<ReadRequest>& unsent);
  bool readNow(const ReadRequest& request, const Chunk& chunk);
  void dropFirst();
  Block blockOf(uint64_t bytes);
  void giveBack(Block block);
  void setLost(std::string why);

  const Tls& tls_;
  PeerEndpoint peer_;
  uint32_t member_;
  std::unique_ptr<Connection> connection_;  // made at first use
  std::unique_ptr<Reader> reader_;          // of it
  std::vector<std::byte> buffer_;
  uint64_t ahead_bytes_ = 0;  // only the reader uses it

  std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  Answers asked_;   // for read()
  Answers coming_;  // that run() asks for and receives
  uint64_t asked_bytes_ = 0;
  std::vector<Block> spare_;  // at most kAheadBytesMax
  uint64_t spare_bytes_ = 0;
  bool ending_ = false;
  std::string lost_;    // why the connection is lost
  std::thread thread_;  // started by the first ask()
};

// Serve one connection of a peer, until it ends.
// `seen` is the peer's progress as we know it.
void serveReads(Connection& connection, const ShownMemory& own, transport::Progress& seen);
void followProgress(Connection& connection, transport::Progress& seen);

// Reports this worker's progress to a peer until the peer is gone. Needs a thread of its own.
void tellProgress(const Tls& tls, const PeerEndpoint& peer, uint32_t member,
                  const transport::Progress& own);

}  // namespace shoal::network
