// How a worker's process ends. Its device server learns the reason from the exit code and, where
// that does not say enough, from the last words.
#pragma once

#include <string>

namespace shoal::transport {

enum class Ending : int {
  kFailed = 1,        // the last words say why
  kClientEnded = 3,   // the client's process is gone
  kClientClosed = 4,  // the client closed the connection; a remote process may also be gone
  kClientSilent = 5,  // the network between the two is cut
  kDeviceFailed = 6,  // the accelerator's context is lost; the last words are the device's own
};

// Sets the descriptor for the last words, a pipe to the device server. -1: nobody reads them.
void setLastWords(int fd);
// Ends the process without cleaning up: the kernel frees its memory and closes its connections.
[[noreturn]] void endProcess(Ending ending, const std::string& words = "");
// The client at the other end of `socket` has closed it. `pidfd` is of the client's process, or -1
// if it is on another machine.
[[noreturn]] void endWithClient(int socket, int pidfd);
// Whether an error of a socket means that the other machine is silent.
bool isSilence(int error);

}  // namespace shoal::transport
