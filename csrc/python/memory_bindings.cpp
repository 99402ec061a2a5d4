// Counters, the segments of the session, and the trace of accesses.
#include "client/member/devices.h"
#include "python/bindings.h"

namespace shoal {

void bindMemory(py::module_& m) {
  using client::Devices;
  m.def("memory_use", [](int index) {
    const auto device = static_cast<c10::DeviceIndex>(index);
    const auto use = Devices::get().sessionWith(device).memoryUse(device);
    py::dict d;
    d["allocated_bytes"] = use.allocated_bytes;
    d["peak_bytes"] = use.peak_bytes;
    d["limit_bytes"] = use.limit_bytes;
    d["memory_bytes"] = use.memory_bytes;
    d["allocations"] = use.allocations;
    d["frees"] = use.frees;
    return d;
  });
  m.def("reset_peak", [] { Devices::get().session().resetPeak(); });
  m.def("trim", [] { Devices::get().session().trim(); });
  m.def("segments", [] {
    py::list entries;
    for (const auto& e : Devices::get().session().map()) {
      entries.append(py::make_tuple(e.address, e.bytes, e.bound, e.valid, e.resident, e.home,
                                    e.pinned, e.part_of, e.version, e.frame, e.shared));
    }
    return entries;
  });
  m.def("copies", [](uint64_t address) {
    py::list copies;
    for (const auto& [member, bytes] : Devices::get().session().copies(address)) {
      copies.append(py::make_tuple(member, py::bytes(bytes)));
    }
    return copies;
  });
  m.def("start_trace", [] { Devices::get().session().startTrace(); });
  m.def("stop_trace", [] {
    py::list events;
    for (const auto& e : Devices::get().session().stopTrace()) {
      events.append(
          py::make_tuple(e.call, static_cast<int>(e.access), e.address, e.bytes, e.member));
    }
    return events;
  });
}

void bindCounters(py::module_& m) {
  using client::Devices;
  m.def("traffic", [](int index) {
    const auto device = static_cast<c10::DeviceIndex>(index);
    const auto traffic = Devices::get().sessionWith(device).traffic(device);
    py::dict d;
    d["messages"] = traffic.messages;
    d["stream_bytes"] = traffic.stream_bytes;
    d["bytes_in"] = traffic.bytes_in;
    d["bytes_out"] = traffic.bytes_out;
    d["bytes_copied_by_client"] = traffic.bytes_copied;
    d["bytes_peer"] = traffic.bytes_peer;
    d["bytes_node"] = traffic.bytes_node;
    d["round_trips"] = traffic.round_trips;
    return d;
  });
  m.def("worker_stats", [](int index) {
    client::Stream::Payload payload;
    {
      const py::gil_scoped_release release;
      const auto device = static_cast<c10::DeviceIndex>(index);
      payload =
          Devices::get().sessionWith(device).deviceMember(device).request(wire::Kind::kStats, {});
    }
    static const char* const names[] = {
        "used_bytes", "reserved_bytes", "segment_bytes", "segments",      "calls",     "busy_ns",
        "bytes_in",   "bytes_out",      "bytes_peer",    "paged_in",      "paged_out", "paged_disk",
        "dropped",    "prefetched",     "stall_ns",      "swapped_bytes", "peer_ahead"};
    py::dict d;
    for (size_t i = 0; i < payload.size() && i < std::size(names); ++i) d[names[i]] = payload[i];
    return d;
  });
}

}  // namespace shoal
