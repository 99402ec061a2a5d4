// Runs the messages of one op stream, in order, on one device. It checks everything in a message
// before it uses it. It keeps the first Failure, and the next reply reports it.
#pragma once

#include <memory>
#include <vector>

#include "memory/shared_memory.h"
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
  void dispatch(wire::Kind kind, uint16_t flags, wire::Reader& reader);
  void allocate(wire::Address address, uint64_t bytes, const char* what);
  void adopt(wire::Reader& reader);
  void write(wire::Reader& reader);
  void copyHost(wire::Reader& reader, bool into_device);
  void copyWithin(wire::Reader& reader);
  void load(wire::Reader& reader);
  void read(wire::Reader& reader);
  void locate(wire::Reader& reader);
  void exportTo(wire::Reader& reader);
  Fetch fetchOf(wire::Reader& reader) const;
  void fetch(wire::Reader& reader);
  void fetchAdd(wire::Reader& reader);
  void addFrom(const Fetch& fetch, at::ScalarType type);
  template <typename Copy>
  void copyInto(wire::Address to, uint64_t bytes, const Copy& copy);
  void fetchFrom(uint32_t peer, const network::ReadRequest& request, std::byte* to);
  void share(wire::Reader& reader);
  void open(wire::Reader& reader);
  void unshare(wire::Reader& reader);
  struct Sharing {
    wire::Address address;
    uint64_t bytes;
    uint64_t number;
    ShareRole role;
  };
  Sharing readSharing(wire::Reader& reader, bool owner);
  std::shared_ptr<SharedBlock> takeShared(const Sharing& sharing);
  void generatorSave(wire::Reader& reader);
  void generatorLoad(wire::Reader& reader);
  void generatorGet(wire::Reader& reader);
  void generatorSet(wire::Reader& reader);
  void recordEvent(uint64_t event);
  void stats();
  std::byte* hostRange(uint64_t offset, uint64_t bytes) const;
  struct Range {
    std::byte* data;
    c10::Storage pin;  // while it is held, the memory stays
  };
  Range deviceRange(wire::Address address, uint64_t bytes, bool writes);

  void fail(std::exception_ptr error, bool reply_now);
  void reply(const std::vector<uint64_t>& payload);
  bool replyPending();
  void replyFailure(const Failure& failure, uint64_t at);

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
