#include "shared_state.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "config.h"

namespace standin {
namespace {

constexpr int kHoldersMax = 4096;

struct Holder {
  pid_t pid;
  uint64_t started;  // with the pid, names a process for ever
  int device;
  uint64_t bytes;
};

// Zeros are a valid state but for the lock, which whoever makes the file makes, too.
struct State {
  Counters counters;
  std::atomic<uint32_t> ready;
  pthread_mutex_t lock;
  Holder holders[kHoldersMax];
};

// When a process started, in clock ticks since boot; 0: it does not run (any more).
uint64_t startOf(pid_t pid) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return 0;
  char line[1024];
  const size_t read = std::fread(line, 1, sizeof line - 1, file);
  std::fclose(file);
  line[read] = '\0';
  const char* rest = std::strrchr(line, ')');  // the name may hold anything
  if (rest == nullptr) return 0;
  char state = 'X';
  unsigned long long started = 0;
  std::sscanf(rest + 1,
              " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
              &state, &started);
  return state == 'Z' || state == 'X' ? 0 : started;
}

void makeLock(State& state) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&state.lock, &attributes);
  state.ready.store(1, std::memory_order_release);
}

State* open() {
  void* memory = MAP_FAILED;
  const std::string& path = config().state_path;
  const int fd = path.empty() ? -1 : ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd >= 0 && lockf(fd, F_LOCK, 0) == 0 && ftruncate(fd, sizeof(State)) == 0) {
    memory = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  } else if (path.empty()) {
    memory =
        mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  }
  if (memory == MAP_FAILED) {
    std::fprintf(stderr, "standin: cannot map its state at %s: %s\n", path.c_str(),
                 std::strerror(errno));
    std::abort();
  }
  State* state = static_cast<State*>(memory);
  if (state->ready.load(std::memory_order_acquire) == 0) makeLock(*state);
  if (fd >= 0) close(fd);  // gives the file's lock back
  return state;
}

State& state() {
  static State* const found = open();
  return *found;
}

class Locked {
 public:
  Locked() {
    if (pthread_mutex_lock(&state().lock) == EOWNERDEAD) pthread_mutex_consistent(&state().lock);
  }
  ~Locked() { pthread_mutex_unlock(&state().lock); }
};

// Under the lock. Forgets holders that have ended.
uint64_t sum(int device, pid_t process) {
  uint64_t bytes = 0;
  for (Holder& holder : state().holders) {
    if (holder.pid == 0 || holder.device != device) continue;
    if (process != 0 && holder.pid != process) continue;
    if (startOf(holder.pid) != holder.started) {
      holder = Holder();
    } else {
      bytes += holder.bytes;
    }
  }
  return bytes;
}

Holder* own(int device) {
  static thread_local pid_t pid = 0;
  static thread_local uint64_t started = 0;
  if (pid != getpid()) {
    pid = getpid();
    started = startOf(pid);
  }
  Holder* free = nullptr;
  for (Holder& holder : state().holders) {
    if (holder.pid == pid && holder.device == device && holder.started == started) return &holder;
    if (holder.pid == 0 && free == nullptr) free = &holder;
  }
  if (free != nullptr) *free = {pid, started, device, 0};
  return free;
}

}  // namespace

Counters& counters() {
  return state().counters;
}

uint64_t usedBytes(int device) {
  const Locked locked;
  return sum(device, 0);
}

uint64_t usedBytesBy(int device, pid_t process) {
  const Locked locked;
  return sum(device, process);
}

bool take(int device, uint64_t bytes) {
  const Locked locked;
  const uint64_t used = sum(device, 0);
  if (bytes > config().memory_bytes || used > config().memory_bytes - bytes) return false;
  Holder* holder = own(device);
  if (holder == nullptr) return false;
  holder->bytes += bytes;
  return true;
}

void giveBack(int device, uint64_t bytes) {
  const Locked locked;
  Holder* holder = own(device);
  if (holder != nullptr) holder->bytes -= bytes < holder->bytes ? bytes : holder->bytes;
}

}  // namespace standin
