// The worker's end of the reply ring.
#pragma once

#include <mutex>
#include <vector>

#include "transport/progress.h"
#include "transport/ring.h"
#include "worker/execute/replies.h"

namespace shoal::worker {

class RingReplies final : public ReplySink {
 public:
  RingReplies(std::byte* region, transport::Progress& progress, transport::Liveness liveness);

  // Replies to a message that is done.
  void send(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
            const std::vector<uint64_t>& payload) override;
  void sendBytes(wire::Kind kind, uint64_t sequence, std::span<const std::byte> bytes) override {
    send(kind, wire::ErrorKind::kNone, sequence, dataPayload(bytes));
  }
  // Replies to a message that is issued. Its reply says nothing of the device.
  void sendEarly(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
                 const std::vector<uint64_t>& payload);

 private:
  void put(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
           const std::vector<uint64_t>& payload, bool done);

  transport::Progress& progress_;
  std::mutex mutex_;  // of a device that runs late, two threads reply
  transport::RingProducer ring_;
};

}  // namespace shoal::worker
