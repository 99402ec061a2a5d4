#include "client/torch/autograd_threads.h"

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <mutex>
#include <thread>

namespace shoal::client {
namespace {

using torch::autograd::Engine;
using torch::autograd::ReadyQueue;

// The engine has no call for this; its subclasses may see these two members. Never instantiated.
struct EngineMembers : Engine {
  static auto queues() { return &EngineMembers::device_ready_queues_; }
  static auto pool() { return &EngineMembers::thread_pool_shared_; }
};

}  // namespace

void startAutogradThreads(c10::DeviceIndex count) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Engine& engine = Engine::get_default_engine();
  const bool started = (engine.*EngineMembers::pool()) != nullptr;
  if (!started) return;
  auto& queues = engine.*EngineMembers::queues();
  while (queues.size() < static_cast<size_t>(count)) {
    const auto queue = std::make_shared<ReadyQueue>();
    const int device = static_cast<int>(queues.size());
    queues.push_back(queue);
    std::thread([&engine, device, queue] { engine.thread_init(device, queue); }).detach();
  }
}

}  // namespace shoal::client
