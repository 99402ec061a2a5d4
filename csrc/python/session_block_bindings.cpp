// The block that a device server shares with a worker. The server reads what the worker counts.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "memory/shared_memory.h"
#include "python/bindings.h"
#include "transport/session_block.h"

namespace shoal {
namespace {

using transport::CallUse;
using transport::SessionBlock;

// The server's side.
class ServerBlock {
 public:
  ServerBlock()
      : region_(memory::SharedMemory::create("shoal-session", transport::kSessionBlockBytes)) {
    // Only the session's own worker maps it, by its descriptor.
    madvise(region_.data(), region_.bytes(), MADV_DONTFORK);
  }
  SessionBlock& words() { return *reinterpret_cast<SessionBlock*>(region_.data()); }
  int fd() const { return region_.fd(); }

 private:
  memory::SharedMemory region_;
};

using BlockClass = py::class_<ServerBlock>;

template <auto word>
void bindReport(BlockClass& bound, const char* name) {
  bound.def_property_readonly(name, [](ServerBlock& block) {
    return (block.words().*word).load(std::memory_order_acquire);
  });
}

template <auto word>
void bindOrder(BlockClass& bound, const char* name) {
  bound.def_property(
      name,
      [](ServerBlock& block) { return (block.words().*word).load(std::memory_order_relaxed); },
      [](ServerBlock& block, uint64_t value) {
        using Word = std::remove_reference_t<decltype(block.words().*word)>;
        (block.words().*word)
            .store(static_cast<typename Word::value_type>(value), std::memory_order_release);
      });
}

py::list usesOf(ServerBlock& block) {
  py::list found;
  const SessionBlock& words = block.words();
  const size_t rows =
      std::min<size_t>(words.rows.load(std::memory_order_acquire), SessionBlock::kRows);
  for (size_t i = 0; i < rows; ++i) {
    const CallUse& use = words.uses[i];
    const uint64_t calls = use.calls.load(std::memory_order_relaxed);
    if (calls == 0) continue;
    const size_t length = strnlen(use.name, sizeof use.name);
    found.append(py::make_tuple(py::bytes(use.name, length), use.hash, use.dtype, use.flops,
                                use.bytes, use.updates != 0, calls,
                                use.ns.load(std::memory_order_relaxed),
                                use.repeats.load(std::memory_order_relaxed)));
  }
  return found;
}

}  // namespace

void bindSessionBlock(py::module_& m) {
  BlockClass bound(m, "SessionBlock",
                   "What a device server and one of its workers share: orders, and what the "
                   "session does.");
  bound.def(py::init<>()).def("fd", &ServerBlock::fd).def("uses", &usesOf);
  bindOrder<&SessionBlock::limit_bytes>(bound, "limit_bytes");
  bindOrder<&SessionBlock::ceiling_bytes>(bound, "ceiling_bytes");
  bindOrder<&SessionBlock::swap_limit_bytes>(bound, "swap_limit_bytes");
  bindOrder<&SessionBlock::order>(bound, "order");
  bindReport<&SessionBlock::state>(bound, "state");
  bindReport<&SessionBlock::reason>(bound, "reason");
  bindReport<&SessionBlock::used_bytes>(bound, "used_bytes");
  bindReport<&SessionBlock::away_bytes>(bound, "away_bytes");
  bindReport<&SessionBlock::swap_bytes>(bound, "swap_bytes");
  bindReport<&SessionBlock::disk_bytes>(bound, "disk_bytes");
  bindReport<&SessionBlock::peak_bytes>(bound, "peak_bytes");
  bindReport<&SessionBlock::wanted_bytes>(bound, "wanted_bytes");
}

}  // namespace shoal
