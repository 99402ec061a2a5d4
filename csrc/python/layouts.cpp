#include "python/layouts.h"

#include <pybind11/stl.h>

#include <atomic>

#include "client/space/session.h"
#include "network/data_connections.h"
#include "network/frames.h"
#include "transport/progress.h"

namespace py = pybind11;

namespace shoal {
namespace {

// A codec that lists fields: name, offset in the message, bytes. An offset of -1 is behind a field
// of any length, which has 0 bytes.
struct Description {
  py::list fields;
  int next = 8;  // behind the header

  void word(const char* name, auto&, wire::Rule = {}) { add(name, 8); }
  void halves(const char* low, uint32_t&, const char* high, uint32_t&, wire::Rule = {}) {
    add(low, 4);
    add(high, 4);
  }
  void list(const char* name, wire::Words&, uint64_t, wire::Rule = {}) { add(name, 0); }
  void bytes(const char* name, std::string_view&, uint64_t, wire::Rule) { add(name, 0); }
  uint64_t left(uint64_t) { return 0; }

  void add(const char* name, int bytes) {
    fields.append(py::make_tuple(name, next, bytes));
    next = bytes == 0 || next < 0 ? -1 : next + bytes;
  }
};

template <typename M>
py::tuple describe(M message) {
  if constexpr (requires { message.flags; }) message.flags = wire::kFlagRecord;  // all its fields
  Description description;
  message.layout(description);
  return py::make_tuple(static_cast<int>(M::kKind), description.fields);
}

}  // namespace

void bindLayouts(py::module_& m) {
  py::dict messages, frames;
  wire::Messages::each([&]<typename M>(const M& message) {
    messages[wire::kKindNames[static_cast<size_t>(M::kKind)]] = describe(message);
  });
  m.attr("MESSAGES") = messages;
  frames["progress"] = describe(network::ProgressFrame{});
  frames["data"] = describe(network::DataFrame{});
  frames["goodbye"] = describe(network::GoodbyeFrame{});
  frames["moment"] = describe(network::MomentFrame{});
  frames["chunk"] = describe(network::ChunkFrame{});
  frames["wait"] = describe(network::WaitFrame{});
  frames["end"] = describe(network::EndFrame{});
  m.attr("FRAMES") = frames;
  m.attr("ACCESS_READ") = static_cast<int>(client::Access::kRead);
  m.attr("ACCESS_WRITE") = static_cast<int>(client::Access::kWrite);
  m.attr("ACCESS_MAKE") = static_cast<int>(client::Access::kMake);
  m.attr("ACCESS_FREE") = static_cast<int>(client::Access::kFree);
  m.attr("ACCESS_UPLOAD") = static_cast<int>(client::Access::kUpload);
  m.attr("SEEN_CLOSED") = static_cast<int>(client::Seen::kClosed);
  m.attr("SEEN_SILENT") = static_cast<int>(client::Seen::kSilent);
  m.attr("SEEN_HUNG") = static_cast<int>(client::Seen::kHung);
  m.attr("SEEN_BROKEN") = static_cast<int>(client::Seen::kBroken);
  m.def("heartbeat", [](const py::buffer& progress) {
    const py::buffer_info page = progress.request();
    if (static_cast<size_t>(page.size * page.itemsize) < sizeof(transport::Progress)) {
      throw std::invalid_argument("a progress page is larger");
    }
    const auto& told = *static_cast<const transport::Progress*>(page.ptr);
    return told.heartbeat.load(std::memory_order_relaxed);
  });
  // What the device server sends to a worker with a descriptor.
  m.def("passed_connection", [] {
    const network::Passed passed{network::Passed::Kind::kConnection, 0};
    return py::bytes(reinterpret_cast<const char*>(&passed), sizeof passed);
  });
  m.def("passed_reader_memory", [](uint64_t number) {
    const network::Passed passed{network::Passed::Kind::kReaderMemory, number};
    return py::bytes(reinterpret_cast<const char*>(&passed), sizeof passed);
  });
}

}  // namespace shoal
