"""A wrong clock for a process: a library that is loaded before libc and adds to what it says."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from tests.support import needs

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
  static volatile long *shared;
  static int looked;
  if (!looked) {
    looked = 1;
    const char *path = getenv("TEST_CLOCK_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
      void *at = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
      if (at != MAP_FAILED) shared = at;
      close(fd);
    }
  }
  if (shared) return *shared;
  const char *s = getenv("TEST_CLOCK_S");
  return s ? atol(s) : 0;
}

int clock_gettime(clockid_t id, struct timespec *ts) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(id, ts);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) ts->tv_sec += offset();
  return status;
}
time_t time(time_t *out) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  if (out) *out = ts.tv_sec;
  return ts.tv_sec;
}
int gettimeofday(struct timeval *tv, void *zone) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  tv->tv_sec = ts.tv_sec;
  tv->tv_usec = ts.tv_nsec / 1000;
  return 0;
}
"""


def build(directory: Path) -> Path:
    """The library; skips the test where there is no C compiler."""
    compiler = needs.command("cc")
    source, library = directory / "clock.c", directory / "clock.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class Stepped:
    """A clock for many processes that can be set at any moment, forwards and back."""

    def __init__(self, directory: Path) -> None:
        self._library, self._file = build(directory), directory / "clock"
        self._file.write_bytes(bytes(8))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "TEST_CLOCK_FILE": str(self._file)}

    def set(self, seconds: int) -> None:
        """Let the clock be that far ahead from now on."""
        with open(self._file, "r+b") as file:
            file.write(struct.pack("=q", seconds))


def wrong_by(library: Path, seconds: float) -> dict[str, str]:
    """The environment of a process whose clock is that far ahead."""
    return {"LD_PRELOAD": str(library), "TEST_CLOCK_S": str(int(seconds))}
