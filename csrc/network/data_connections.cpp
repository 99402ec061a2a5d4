#include "network/data_connections.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "transport/ring.h"

namespace shoal::network {
namespace {

constexpr int kGreetingsMax = 16;  // connections that have not yet shown the secret

// Receives the next descriptor from the device server; -1 if the server is gone.
int receiveDescriptor(int channel, Passed& passed) {
  while (true) {
    iovec data{&passed, sizeof passed};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(channel, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return -1;
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS) continue;
    int fd;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    if (got == sizeof passed) return fd;
    close(fd);
  }
}

// Compares in constant time, so that the time does not show where they differ.
bool same(const std::array<unsigned char, 32>& a, const std::array<unsigned char, 32>& b) {
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace

std::unique_ptr<Connection> greet(const Tls& tls, int fd, const std::string& server_name,
                                  const Greeting& greeting, int64_t deadline_ns) {
  auto connection = Connection::connect(tls, fd, server_name, deadline_ns);
  connection->writeBy(&greeting, sizeof greeting, deadline_ns);
  uint64_t answer = 0;
  connection->readBy(&answer, sizeof answer, deadline_ns);
  if (answer != kGreetingAnswer) throw ConnectionLost("the worker did not answer the greeting");
  return connection;
}

struct Arrivals::State {
  explicit State(ArrivalsOptions given) : options(std::move(given)), tls(options.identity) {}
  ArrivalsOptions options;
  Tls tls;
  TakePeer take_peer;
  std::atomic<int> greetings{0};
  std::mutex mutex;
  std::condition_variable came;
  // By lane. A purpose is complete when none of its connections is missing.
  struct Bundle {
    std::vector<std::unique_ptr<Connection>> connections;
    size_t came = 0;
  };
  std::map<Purpose, Bundle> of_client;

  // Where a connection of the client belongs. Each is taken once.
  std::unique_ptr<Connection>& placeOf(const Greeting& greeting) {
    const uint32_t lane = greeting.member & 0xffff, lanes = greeting.member >> 16;
    if (lanes > kLanesMax || lane > lanes) throw ConnectionLost("there is no such lane");
    Bundle& bundle = of_client[greeting.purpose];
    if (bundle.connections.empty()) bundle.connections.resize(lanes + 1);
    if (bundle.connections.size() != lanes + 1 || bundle.connections[lane] != nullptr ||
        bundle.came == lanes + 1) {
      throw ConnectionLost("the session already has this connection");
    }
    ++bundle.came;
    return bundle.connections[lane];
  }

  void greet(int fd) {
    const int64_t deadline = nowNs() + kGreetingMs * 1000000;
    auto connection = Connection::accept(tls, fd, deadline);
    Greeting greeting;
    connection->readBy(&greeting, sizeof greeting, deadline);
    const PeerName peer = connection->peer(tls);
    const bool for_client = greeting.purpose == Purpose::kUp || greeting.purpose == Purpose::kDown;
    const bool for_peer =
        greeting.purpose == Purpose::kRead || greeting.purpose == Purpose::kProgress;
    const bool of_worker = peer.role == "worker";  // of this lease: the client has named it
    const bool of_machine = of_worker || peer.role == "node" || peer.role == "head";
    const bool of_client_itself = !of_machine && peer.name == options.client;  // in any other role
    if (!same(greeting.secret, options.secret) || !(for_client ? of_client_itself : of_worker)) {
      throw ConnectionLost("wrong certificate or secret");
    }
    if (!for_client && !for_peer) throw ConnectionLost("its purpose is unknown");
    const std::unique_lock held(mutex);
    std::unique_ptr<Connection>* place = for_client ? &placeOf(greeting) : nullptr;
    connection->writeBy(&kGreetingAnswer, sizeof kGreetingAnswer, deadline);
    if (for_client) {
      *place = std::move(connection);
      came.notify_all();
    } else {
      std::thread([take = take_peer, greeting, raw = connection.release()] {
        prctl(PR_SET_NAME, "shoal-peer");
        take(std::unique_ptr<Connection>(raw), greeting);
      }).detach();
    }
  }

  void greetLogged(int fd) {
    try {
      greet(fd);
    } catch (const std::exception& error) {
      transport::logWarning(std::string("a data connection was refused: ") + error.what());
    }
    --greetings;
  }
};

Arrivals::Arrivals(ArrivalsOptions options) : state_(std::make_shared<State>(std::move(options))) {}

Arrivals::~Arrivals() = default;

void Arrivals::trust(const std::string& certificate) {
  state_->tls.trust(certificate);
}

Identity Arrivals::identityFor(std::string authority) const {
  const Identity& own = state_->options.identity;
  return {own.key, own.certificate, std::move(authority)};
}

const std::array<unsigned char, 32>& Arrivals::secret() const {
  return state_->options.secret;
}

void Arrivals::start(TakePeer take_peer, TakeMemory take_memory) {
  state_->take_peer = std::move(take_peer);
  std::thread([state = state_, take_memory = std::move(take_memory)] {
    prctl(PR_SET_NAME, "shoal-arrivals");
    int fd;
    Passed passed;
    while ((fd = receiveDescriptor(state->options.channel, passed)) >= 0) {
      if (passed.kind == Passed::Kind::kReaderMemory) {
        try {
          take_memory(passed.number, fd);
        } catch (const std::exception& error) {
          transport::logWarning(std::string("the memory of a data reader was refused: ") +
                                error.what());
        }
        continue;
      }
      if (state->greetings.fetch_add(1) >= kGreetingsMax) {
        --state->greetings;
        close(fd);
        continue;
      }
      std::thread([state, fd] { state->greetLogged(fd); }).detach();
    }
  }).detach();
}

std::vector<std::unique_ptr<Connection>> Arrivals::await(Purpose purpose, int64_t deadline_ns) {
  std::unique_lock held(state_->mutex);
  const auto left = std::chrono::nanoseconds(std::max<int64_t>(0, deadline_ns - nowNs()));
  State::Bundle& bundle = state_->of_client[purpose];
  const auto ready = [&] {
    return bundle.came > 0 && bundle.came == bundle.connections.size() &&
           std::all_of(bundle.connections.begin(), bundle.connections.end(),
                       [](const auto& one) { return one != nullptr; });
  };
  if (!state_->came.wait_for(held, left, ready)) {
    throw ConnectionLost("the client's data connections did not come in time");
  }
  return std::exchange(bundle.connections, std::vector<std::unique_ptr<Connection>>(bundle.came));
}

}  // namespace shoal::network
