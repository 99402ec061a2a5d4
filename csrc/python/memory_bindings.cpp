// Counters, the segments of the session, the trace of accesses, and its replay.
#include "client/space/devices.h"
#include "client/space/session_report.h"
#include "client/space/transfers.h"
#include "python/bindings.h"
#include "python/layouts.h"
#include "python/policy_replay.h"

namespace shoal {

void bindMemory(py::module_& m) {
  using client::Devices;
  m.def("memory_use", [](int index) {
    const auto device = static_cast<c10::DeviceIndex>(index);
    const auto use = client::memoryUse(Devices::get().sessionWith(device), device);
    py::dict d;
    d["allocated_bytes"] = use.allocated_bytes;
    d["peak_bytes"] = use.peak_bytes;
    d["limit_bytes"] = use.limit_bytes;
    d["memory_bytes"] = use.memory_bytes;
    d["allocations"] = use.allocations;
    d["frees"] = use.frees;
    return d;
  });
  m.def("reset_peak", [] {
    client::Session& session = Devices::get().session();
    session.directory(session.lock()).memory().resetPeak();
  });
  m.def("trim", [] { Devices::get().session().trim(); });
  const auto of_segment = [](auto client::Segment::* field) {
    return [field](const client::MapEntry& entry) { return entry.segment.*field; };
  };
  py::class_<client::MapEntry>(m, "MapEntry", "One live segment.")
      .def_readonly("address", &client::MapEntry::address)
      .def_readonly("resident", &client::MapEntry::resident)
      .def_readonly("frame", &client::MapEntry::frame)
      .def_property_readonly("bytes", of_segment(&client::Segment::bytes))
      .def_property_readonly("bound", of_segment(&client::Segment::bound))
      .def_property_readonly("valid", of_segment(&client::Segment::valid))
      .def_property_readonly("home", of_segment(&client::Segment::home))
      .def_property_readonly("pinned", of_segment(&client::Segment::pinned))
      .def_property_readonly("extent_of", of_segment(&client::Segment::extent_of))
      .def_property_readonly("written_at", of_segment(&client::Segment::written_at))
      .def_property_readonly("shared", of_segment(&client::Segment::shared));
  m.def("segments", [] { return client::mapOf(Devices::get().session()); });
  py::class_<client::DirectoryReport>(m, "DirectoryReport")
      .def_readonly("violation", &client::DirectoryReport::violation)
      .def_readonly("steps", &client::DirectoryReport::steps);
  m.def("directory_report", [] { return client::reportOf(Devices::get().session()); });
  m.def("copies", [](uint64_t address) {
    py::list copies;
    for (const auto& [member, bytes] : client::copiesOf(Devices::get().session(), address)) {
      copies.append(py::make_tuple(member, py::bytes(bytes)));
    }
    return copies;
  });
  m.def("start_trace", [] {
    client::Session& session = Devices::get().session();
    session.trace(session.lock()).start();
  });
  m.def("stop_trace", [] {
    py::list events;
    client::Session& session = Devices::get().session();
    const auto traced = session.trace(session.lock()).stop();
    for (const auto& e : traced) {
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
    const auto traffic = client::traffic(Devices::get().sessionWith(device), device);
    py::dict d;
    d["messages"] = traffic.messages;
    d["stream_bytes"] = traffic.stream_bytes;
    d["bytes_in"] = traffic.bytes_in;
    d["bytes_out"] = traffic.bytes_out;
    d["bytes_copied_by_client"] = traffic.bytes_copied;
    d["bytes_peer"] = traffic.bytes_peer;
    d["bytes_node"] = traffic.bytes_node;
    d["round_trips"] = traffic.round_trips;
    const auto reached = client::reached(Devices::get().sessionWith(device), device);
    d["issued"] = reached.issued;
    d["done"] = reached.done;
    return d;
  });
  m.def("worker_stats", [](int index) {
    wire::StatsReply stats;
    {
      const py::gil_scoped_release release;
      const auto device = static_cast<c10::DeviceIndex>(index);
      stats = Devices::get().sessionWith(device).deviceMember(device).ask(wire::Stats{});
    }
    return namedWords(stats);
  });
}

void bindPolicyReplay(py::module_& m) {
  py::class_<PolicyReplay>(m, "PolicyReplay")
      .def(py::init<uint64_t, bool>(), py::arg("limit_bytes"), py::arg("least_recent"))
      .def("foresee", &PolicyReplay::foresee)
      .def("advance", &PolicyReplay::advance)
      .def("enter", &PolicyReplay::enter)
      .def("use", &PolicyReplay::use, py::arg("segment"), py::arg("copied"))
      .def("evict", &PolicyReplay::evict)
      .def("is_dead", &PolicyReplay::isDead)
      .def("free", &PolicyReplay::free);
}

}  // namespace shoal
