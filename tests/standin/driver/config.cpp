#include "config.h"

#include <cstdlib>

namespace standin {
namespace {

std::string text(const char* name, const char* otherwise) {
  const char* found = std::getenv(name);
  return found != nullptr && *found != '\0' ? found : otherwise;
}

uint64_t number(const char* name, uint64_t otherwise) {
  const std::string found = text(name, "");
  return found.empty() ? otherwise : std::strtoull(found.c_str(), nullptr, 10);
}

Config read() {
  Config config;
  const std::string mode = text("STANDIN_MODE", "late");
  config.mode = mode == "now"       ? Mode::kNow
                : mode == "threads" ? Mode::kThreads
                : mode == "random"  ? Mode::kRandom
                                    : Mode::kLate;
  config.devices = static_cast<int>(number("STANDIN_DEVICES", 1));
  config.memory_bytes = number("STANDIN_MEMORY_BYTES", config.memory_bytes);
  config.context_bytes = number("STANDIN_CONTEXT_BYTES", config.context_bytes);
  config.seed = number("STANDIN_SEED", 0);
  config.patience_ns = static_cast<int64_t>(number("STANDIN_PATIENCE_MS", 20)) * 1000000;
  config.copy_speed = static_cast<double>(number("STANDIN_COPY_BYTES_S", 0));
  config.peer_speed = static_cast<double>(number("STANDIN_PEER_BYTES_S", 0));
  config.kernel_speed = static_cast<double>(number("STANDIN_KERNEL_BYTES_S", 0));
  config.delay_ns = static_cast<int64_t>(number("STANDIN_DELAY_US", 0)) * 1000;
  config.state_path = text("STANDIN_STATE", "");
  return config;
}

}  // namespace

const Config& config() {
  static const Config found = read();
  return found;
}

}  // namespace standin
