// Runs the messages of one op stream, in order, on one device. The executor checks everything that
// a message says before it uses it. It keeps a failure and reports it with the next reply.
#pragma once

#include <memory>
#include <vector>

#include "memory/shared_memory.h"
#include "wire/messages.h"
#include "worker/execute/calls.h"
#include "worker/execute/device.h"
#include "worker/paging/arena.h"
#include "worker/paging/fetch_ahead.h"
#include "worker/paging/segments.h"
#include "worker/peers/fetch.h"
#include "worker/shared/reader_memory.h"
#include "worker/shared/shared_memories.h"

namespace shoal::worker {

// Where replies go. One per transport.
class ReplySink {
 public:
  virtual ~ReplySink() = default;
  virtual void send(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
                    const std::vector<uint64_t>& payload) = 0;
};

struct ExecutorOptions {
  uint32_t session = 1;
  c10::Device device{c10::DeviceType::CPU};
  uint64_t memory_bytes = 0;     // what the lease grants
  const Peers* peers = nullptr;  // the other devices of the lease, if there are any
  const transport::RingConsumer* requests = nullptr;  // the stream, to look ahead
  SwapOptions swap;
  bool least_recent = false;                // page by plain LRU on demand, to compare with
  transport::Places* places = nullptr;      // where they find this device's segments
  transport::Progress* progress = nullptr;  // where the client finds the times of events
  SharedMemories* shared = nullptr;         // shared tensors that the client passes
  ReaderMemory* reader = nullptr;           // where a data reader at this node puts samples
  double speed = 1.0;  // below 1, calls take 1/speed of their time: an unequal device to test with
  RunOperator run_operator = &runOperator;
};

class Executor {
 public:
  // `host` is the region that the client allocates pinned memory and staging blocks from; `arena`
  // is the CPU device's memory, null on accelerators.
  Executor(ExecutorOptions options, const memory::SharedMemory& host, Arena* arena,
           ReplySink& replies);

  // Runs one message. Throws only if replying fails.
  void handle(const std::vector<uint64_t>& message, uint64_t sequence);
  // Whether a failure is pending that no reply has reported.
  bool hasFailed() const { return pending_.failure != nullptr; }

 private:
  void run(wire::Words message);
  void allocate(const wire::Allocate& message, const char* what);
  void adopt(const wire::Adopt& message);
  void write(const wire::Write& message);
  void copyIn(const wire::CopyIn& message);
  void copyOut(const wire::CopyOut& message);
  void copyWithin(const wire::CopyWithin& message);
  void load(const wire::Load& message);
  void read(const wire::Read& message);
  void locate(const wire::Locate& message);
  void exportTo(const wire::Export& message);
  void checkPeer(uint32_t peer) const;
  void fetch(const wire::Fetch& message);
  void fetchAdd(const wire::FetchAdd& message);
  void addFrom(const wire::Fetch& fetch, at::ScalarType type);
  template <typename Copy>
  void copyInto(wire::Address to, uint64_t bytes, const Copy& copy);
  void fetchFrom(uint32_t peer, const network::ReadRequest& request, std::byte* to);
  void share(const wire::Share& message);
  void open(const wire::Open& message);
  void unshare(const wire::Unshare& message);
  std::shared_ptr<SharedBlock> takeShared(const auto& message, bool owner);
  void generatorSave(const wire::GeneratorSave& message);
  void generatorLoad(const wire::GeneratorLoad& message);
  void generatorGet(const wire::GeneratorGet& message);
  void generatorSet(const wire::GeneratorSet& message);
  void recordEvent(uint64_t event);
  wire::StatsReply stats() const;
  std::byte* hostRange(uint64_t offset, uint64_t bytes) const;
  struct Range {
    std::byte* data;
    c10::Storage pin;  // while it is held, the memory stays
  };
  Range deviceRange(wire::Address address, uint64_t bytes, bool writes);

  void fail(std::exception_ptr error, bool reply_now);
  void reply(const std::vector<uint64_t>& payload);
  template <typename Reply>
  void answer(const Reply& payload) {
    reply(wire::body(payload));
  }
  bool replyPending();
  void replyFailure(const Failure& failure, uint64_t shown_in);

  struct Pending {  // the first failure that no reply has reported
    std::shared_ptr<const Failure> failure;
    uint64_t at = 0;  // the message in which it showed
  };

  const memory::SharedMemory& host_;
  Arena* arena_;
  uint64_t memory_bytes_;
  const Peers* peers_;
  SharedMemories* shared_;
  ReaderMemory* reader_;
  ReplySink& replies_;
  DeviceMemory memory_;
  Events events_;
  Generators generators_;
  Segments segments_;
  Calls calls_;
  std::unique_ptr<FetchAhead> fetch_ahead_;  // where the lease has devices on other machines
  Pending pending_;

  wire::Kind kind_ = wire::Kind::kPad;  // of the message that runs now
  uint64_t sequence_ = 0;
  bool replied_ = false;
  uint64_t bytes_in_ = 0;
  uint64_t bytes_out_ = 0;
  uint64_t bytes_peer_ = 0;
};

}  // namespace shoal::worker
