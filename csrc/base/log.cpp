#include "base/log.h"

#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace shoal::transport {

namespace {

LogOptions log_options;

std::string timeNow() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  tm parts;
  gmtime_r(&now.tv_sec, &parts);
  char text[32];
  const size_t size = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text + size, sizeof text - size, ".%03ldZ", now.tv_nsec / 1000000);
  return text;
}

// On one line and valid in JSON: a peer's text cannot forge a line of its own.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      out += code;
    } else {
      if (log_options.json && (c == '"' || c == '\\')) out += '\\';
      out += c;
    }
  }
  return out;
}

void writeLine(const char* level, const std::string& text) {
  std::string line;
  if (log_options.json) {
    line = "{\"time\": \"" + timeNow() + "\", \"level\": \"" + level + "\", \"component\": \"" +
           escaped(log_options.component) + "\", \"pid\": " + std::to_string(getpid()) +
           ", \"text\": \"" + escaped(text) + "\"}\n";
  } else {
    line = timeNow() + " " + level + " " + log_options.component + ": " + escaped(text) + "\n";
  }
  // One write: lines of several threads do not mix. A log that cannot be written stops nothing.
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

}  // namespace

void setUpLog(LogOptions options) {
  log_options = std::move(options);
}

void logWarning(const std::string& text) {
  if (!log_options.errors_only) writeLine("WARNING", text);
}

void logError(const std::string& text) {
  writeLine("ERROR", text);
}

}  // namespace shoal::transport
