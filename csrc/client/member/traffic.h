// What went between the client and one member.
#pragma once

#include <cstdint>

namespace shoal::client {

struct Traffic {
  uint64_t messages = 0;
  uint64_t stream_bytes = 0;  // bytes of messages, without the data of transfers
  uint64_t bytes_in = 0;      // host to device
  uint64_t bytes_out = 0;     // device to host
  uint64_t bytes_copied = 0;  // of both, copied by the client itself
  uint64_t bytes_peer = 0;    // from other member devices
  uint64_t bytes_node = 0;    // from files at the device's node
  uint64_t round_trips = 0;
};

}  // namespace shoal::client
