#include "transport/ending.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace shoal::transport {
namespace {

constexpr size_t kWordsMax = 2000;  // a pipe takes so much at once
// A process that ends closes its descriptors a moment before it is gone. Queued calls go on
// meanwhile, so this wait is short. The head has other ways to find out.
constexpr int kEndMs = 20;

int g_last_words = -1;

}  // namespace

void setLastWords(int fd) {
  g_last_words = fd;
}

void endProcess(Ending ending, const std::string& words) {
  if (g_last_words >= 0 && !words.empty()) {
    const size_t bytes = std::min(words.size(), kWordsMax);
    // If nobody reads this, the exit code still says the most important part.
    [[maybe_unused]] const ssize_t written = write(g_last_words, words.data(), bytes);
  }
  _exit(static_cast<int>(ending));
}

void endWithClient(int socket, int pidfd) {
  if (pidfd >= 0) {
    pollfd process{pidfd, POLLIN, 0};
    const bool ended = poll(&process, 1, kEndMs) > 0;
    endProcess(ended ? Ending::kClientEnded : Ending::kClientClosed);
  }
  int error = 0;
  socklen_t bytes = sizeof error;
  getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes);
  endProcess(isSilence(error) ? Ending::kClientSilent : Ending::kClientClosed);
}

bool isSilence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
}

}  // namespace shoal::transport
