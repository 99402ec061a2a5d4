// Data connections that arrive at a worker. Its device server passes on those whose first, plain
// bytes name this session. Here they show a certificate of the pool and the session's secret.
#pragma once

#include <array>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "network/frames.h"
#include "network/tls/tls.h"

namespace shoal::network {

struct ArrivalsOptions {
  int channel = -1;  // from the device server: descriptors, see Passed
  Identity identity;
  std::array<unsigned char, 32> secret;
  std::string client;  // the owner of the session, as its certificate says
};

// What the device server passes with each descriptor.
struct Passed {
  enum class Kind : uint64_t { kConnection = 1, kReaderMemory = 2 };
  Kind kind;
  uint64_t number;  // of the reader
};
static_assert(sizeof(Passed) == 16);

// The other end: connects over `fd`, which it owns, greets, and awaits the worker's answer.
std::unique_ptr<Connection> greet(const Tls& tls, int fd, const std::string& server_name,
                                  const Greeting& greeting, int64_t deadline_ns);

class Arrivals {
 public:
  using TakePeer = std::function<void(std::unique_ptr<Connection>, const Greeting&)>;
  // Gets the number of a data reader of this session, and its memory, which the callee owns.
  using TakeMemory = std::function<void(uint64_t, int)>;
  explicit Arrivals(ArrivalsOptions options);
  ~Arrivals();

  // Accepts another worker of the lease by its certificate. Before start().
  void trust(const std::string& certificate);
  // This worker's own identity, for connections to the owner of `authority`.
  Identity identityFor(std::string authority) const;
  const std::array<unsigned char, 32>& secret() const;
  // Opens the channel. `take_peer` gets the connections of other workers, each in its own thread.
  void start(TakePeer take_peer, TakeMemory take_memory);
  // The client's connections for `purpose`: the stream, then its lanes. Throws ConnectionLost if
  // they do not arrive in time.
  std::vector<std::unique_ptr<Connection>> await(Purpose purpose, int64_t deadline_ns);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shoal::network
