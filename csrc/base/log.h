// Log lines of a worker's own threads, in the format of src/shoal/pool/base/log.py: a time, a level
// and a component, as text or JSON. Written without the GIL.
#pragma once

#include <string>

namespace shoal::transport {

struct LogOptions {
  std::string component = "worker";
  bool json = false;
  bool errors_only = false;
};

// Call before the process starts threads that log.
void setUpLog(LogOptions options);
void logWarning(const std::string& text);
void logError(const std::string& text);

}  // namespace shoal::transport
