// Runs the messages of one op stream, in order, on one device. The executor checks everything that
// a message says before it uses it. It keeps a failure and reports it with the next reply.
#pragma once

#include <memory>
#include <vector>

#include "memory/shared_memory.h"
#include "wire/messages.h"
#include "worker/accelerator/late.h"
#include "worker/calls/calls.h"
#include "worker/calls/device.h"
#include "worker/execute/peer_copies.h"
#include "worker/execute/replies.h"
#include "worker/execute/server_orders.h"
#include "worker/execute/session_memory.h"
#include "worker/execute/sharing.h"
#include "worker/execute/transfers.h"
#include "worker/memory/arena.h"
#include "worker/paging/segments.h"
#include "worker/shared/reader_memory.h"
#include "worker/shared/shared_memories.h"

namespace shoal::worker {

struct ExecutorOptions {
  uint32_t session = 1;
  c10::Device device{c10::DeviceType::CPU};  // started, if it is an accelerator
  uint64_t memory_bytes = 0;                 // what the lease grants
  const Peers* peers = nullptr;              // the other devices of the lease, if there are any
  const transport::RingConsumer* requests = nullptr;  // the stream, to look ahead
  SwapOptions swap;
  bool least_recent = false;                      // page by plain LRU on demand, to compare with
  transport::LocationTable* locations = nullptr;  // where they find this device's segments
  // How far this device is, and the times of events. An accelerator has one.
  transport::Progress* progress = nullptr;
  SharedMemories* shared = nullptr;  // shared tensors that the client passes
  ReaderMemory* reader = nullptr;    // where a data reader at this node puts samples
  double speed = 1.0;  // below 1, calls take 1/speed of their time: an unequal device to test with
  RunOperator run_operator = &runOperator;
  ShownCopies* shown = nullptr;  // what peers read of an accelerator
  Grant* grant = nullptr;        // where the device server limits, counts and suspends the session
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
  bool hasFailed() const { return replies_.hasFailed(); }
  Accelerator& device() const { return *device_; }
  Late* late() const { return late_.get(); }  // null where the device does not run late
  // To be carried out between two messages.
  ServerOrders& orders() { return orders_; }

 private:
  void run(wire::Words message, uint64_t sequence);
  void fail(std::exception_ptr error, uint64_t sequence);
  template <typename Reply>
  void answer(const Reply& payload) {
    replies_.reply(wire::body(payload));
  }
  void trim();
  void generatorSave(const wire::GeneratorSave& message);
  void generatorLoad(const wire::GeneratorLoad& message);
  void generatorGet(const wire::GeneratorGet& message);
  void generatorSet(const wire::GeneratorSet& message);
  void recordEvent(uint64_t event);
  wire::StatsReply stats() const;

  std::unique_ptr<Accelerator> device_;
  std::unique_ptr<Late> late_;
  Arena* arena_;
  const Peers* peers_;
  Replies replies_;
  Events events_;
  Generators generators_;
  Segments segments_;
  SessionMemory memory_;
  Transfers transfers_;
  PeerCopies peer_copies_;
  Sharing sharing_;
  Calls calls_;
  ServerOrders orders_;
};

}  // namespace shoal::worker
