// Data connections that come to a worker. Its device server's door passes on those whose first,
// plain bytes name this session; here they show a certificate of the pool and the session's secret.
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
#include "network/tls.h"

namespace shoal::network {

struct ArrivalsOptions {
  int channel = -1;  // from the door: descriptors of connections
  Identity identity;
  std::array<unsigned char, 32> secret;
  std::string client;  // whose session it is, as its certificate says
};

class Arrivals {
 public:
  using TakePeer = std::function<void(std::unique_ptr<Connection>, const Greeting&)>;
  explicit Arrivals(ArrivalsOptions options);
  ~Arrivals();

  const Tls& tls() const;
  const std::array<unsigned char, 32>& secret() const;
  // Opens the channel. `take_peer` gets the connections of other workers, each in its own thread.
  void start(TakePeer take_peer);
  // The client's connections for `purpose`: the stream, then its lanes. Throws ConnectionLost if
  // they do not come in time.
  std::vector<std::unique_ptr<Connection>> await(Purpose purpose, int64_t deadline_ns);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shoal::network
