// Copies between workers of one lease on different machines. The reader connects to the other's
// door, as the client does, and asks; the other answers straight from its memory, when it has got
// so far. No message to its executor. A reader that knows what it will read asks ahead, and
// computes while that comes.
//
// A second connection tells the other how far the reader is: it keeps what it exported until then.
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

#include "memory/shared_memory.h"
#include "network/frames.h"
#include "network/socket_reader.h"
#include "network/tls.h"
#include "transport/location_table.h"
#include "transport/progress.h"

namespace shoal::network {

// Where a worker's device server listens, and what its worker wants to see.
struct PeerEndpoint {
  std::string host;
  uint16_t port = 0;
  std::string server_name;
  std::array<unsigned char, 16> data_id;
  std::array<unsigned char, 32> secret;
};

// A new connection to a peer, on which `purpose` is agreed. `member` is who we are in the lease.
std::unique_ptr<Connection> openPeer(const Tls& tls, const PeerEndpoint& peer, Purpose purpose,
                                     uint32_t member);

class PeerReader {
 public:
  // What was asked for and not read yet, at most.
  static constexpr uint64_t kAheadBytesMax = uint64_t{64} << 20;

  PeerReader(const Tls& tls, PeerEndpoint peer, uint32_t member)
      : tls_(tls), peer_(std::move(peer)), member_(member) {}
  ~PeerReader();
  PeerReader(const PeerReader&) = delete;

  // Asks for what read() will want later: in the order of the reads, and not before one that is
  // still to come and was not asked for. Answers come in this order, and the peer takes an answer
  // for the reader's progress. False, with nothing done, if there is no room for it now.
  bool ask(const ReadRequest& request);
  // What messages up to `reading` have asked for is read no more.
  void forget(uint64_t reading);
  // [at, + bytes) of the range that was asked for. The same range may come twice: the last counts.
  using Piece = std::function<void(const std::byte* from, uint64_t at, uint64_t bytes)>;
  // False if the peer has no such segment. Throws ConnectionLost, and after it always.
  bool read(const ReadRequest& request, const Piece& piece);
  // Bytes that were there when they were read.
  uint64_t aheadBytes() const { return ahead_bytes_; }

 private:
  // Memory for an answer. It is used again: the first touch of new pages costs more than a copy.
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

  // --- of whoever uses the connection: the thread while anything is to come, else who reads
  void connect();
  void send(const ReadRequest& request);
  using Take = std::function<void(Reader& reader)>;  // reads the bytes that were asked for
  bool receive(const ReadRequest& request, const Take& take);

  void run();  // the thread
  std::vector<ReadRequest> toSend();
  void take(Answer& answer, const std::vector<ReadRequest>& unsent);
  bool readNow(const ReadRequest& request, const Piece& piece);
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
  uint64_t ahead_bytes_ = 0;  // of who reads

  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  Answers asked_;   // for read()
  Answers coming_;  // which the thread asks for and receives
  uint64_t asked_bytes_ = 0;
  std::vector<Block> spare_;  // at most kAheadBytesMax
  uint64_t spare_bytes_ = 0;
  bool ending_ = false;
  std::string lost_;    // why there is no connection any more
  std::thread thread_;  // made when something is asked for ahead
};

// What a worker has to show: how far it is, and where its segments are.
struct OwnMemory {
  transport::Progress* progress;
  const transport::Places* places;
  const memory::SharedMemory* arena;  // null: the device's memory is not ours to read
  const memory::SharedMemory* host;
};

// Serve one connection of a peer, until it ends.
// `seen` is the peer's progress as we know it.
void serveReads(Connection& connection, const OwnMemory& own, transport::Progress& seen);
void followProgress(Connection& connection, transport::Progress& seen);

// Tells a peer how far we are, until it is gone; in a thread of its own.
void tellProgress(const Tls& tls, const PeerEndpoint& peer, uint32_t member,
                  const transport::Progress& own);

}  // namespace shoal::network
