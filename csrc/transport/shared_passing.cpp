#include "transport/shared_passing.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace shoal::transport {
namespace {

constexpr size_t kFds = 3;
union Control {
  char bytes[CMSG_SPACE(kFds * sizeof(int))];
  cmsghdr align;
};

msghdr messageOf(iovec& data, Control& control) {
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  return message;
}

}  // namespace

CameShared receiveShared(int socket, SharedPassing& passing) {
  CameShared came;
  Control control;
  iovec data{&passing, sizeof passing};
  msghdr message = messageOf(data, control);
  const ssize_t bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (bytes < 0) {
    came.again = errno == EAGAIN || errno == EINTR;
    return came;
  }
  // The kernel closes descriptors beyond the third.
  size_t count = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t here = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < here; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      if (count < kFds) {
        came.fds[count] = fd;
      } else {
        close(fd);
      }
      ++count;
    }
  }
  came.whole = bytes == static_cast<ssize_t>(sizeof passing) && count == kFds &&
               (message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) == 0 &&
               passing.magic == SharedPassing::kMagic;
  return came;
}

bool sendShared(int socket, const SharedPassing& passing, const int (&fds)[3]) {
  Control control{};
  SharedPassing copy = passing;
  iovec data{&copy, sizeof copy};
  msghdr message = messageOf(data, control);
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof fds);
  std::memcpy(CMSG_DATA(part), fds, sizeof fds);
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof copy);
}

}  // namespace shoal::transport
