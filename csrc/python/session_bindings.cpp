// A lease of this program: its members, and attaching it to torch's devices.
#include "client/space/devices.h"
#include "client/space/host_memory.h"
#include "client/tensor/generator.h"
#include "client/torch/autograd_threads.h"
#include "network/client_link.h"
#include "python/bindings.h"
#include "python/python_signals.h"

namespace shoal {

namespace {

void bindClientLink(py::module_& m) {
  py::class_<network::ClientLink, std::shared_ptr<network::ClientLink>>(
      m, "ClientLink", "The client's half of a session between machines.")
      .def(py::init([](std::vector<int> up_fds, std::vector<int> down_fds, const std::string& key,
                       const std::string& certificate, const std::string& authority,
                       std::string server_name, const py::bytes& secret) {
             network::ClientLinkOptions options{std::move(up_fds),
                                                std::move(down_fds),
                                                {key, certificate, authority},
                                                std::move(server_name),
                                                {}};
             options.secret = exactly<32>(secret);
             const py::gil_scoped_release release;
             return std::make_shared<network::ClientLink>(std::move(options));
           }),
           py::kw_only(), py::arg("up_fds"), py::arg("down_fds"), py::arg("key"),
           py::arg("certificate"), py::arg("authority"), py::arg("server_name"), py::arg("secret"))
      .def_property_readonly("lanes", &network::ClientLink::lanes)
      .def("fds", &network::ClientLink::fds)
      .def("failure", &network::ClientLink::failure)
      .def("stop", &network::ClientLink::stop, py::call_guard<py::gil_scoped_release>());
}

void bindMemberOptions(py::module_& m) {
  py::class_<client::MemberOptions>(m, "MemberOptions", "A leased device, for `attach`.")
      .def(py::init([](int socket, std::vector<int> fds, uint64_t arena_bytes,
                       uint64_t memory_bytes, uint64_t spill_bytes, std::string name, bool is_cpu,
                       std::shared_ptr<network::ClientLink> link) {
             client::MemberOptions options;
             options.socket = socket;
             options.requests_fd = fds.at(0);
             options.replies_fd = fds.at(1);
             options.progress_fd = fds.at(2);
             options.locations_fd = fds.at(3);
             if (arena_bytes > 0) options.arena_fd = fds.at(4);
             options.arena_bytes = arena_bytes;
             options.memory_bytes = memory_bytes;
             options.spill_bytes = spill_bytes;
             options.name = std::move(name);
             options.is_cpu = is_cpu;
             options.link = std::move(link);
             return options;
           }),
           py::kw_only(), py::arg("socket"), py::arg("fds"), py::arg("arena_bytes"),
           py::arg("memory_bytes"), py::arg("spill_bytes"), py::arg("name"), py::arg("is_cpu"),
           py::arg("link") = nullptr);
}

}  // namespace

void bindSession(py::module_& m) {
  using client::Devices;
  bindClientLink(m);
  bindMemberOptions(m);
  m.def("host_region", [] {
    auto& host = client::HostMemory::get();
    return py::make_tuple(host.fd(), host.bytes());
  });
  m.def("sessions_in_use", [] { return Devices::get().sessionsInUse(); });
  m.def("set_pool_starter", [](std::function<void()> start) {
    Devices::get().start_pool = [start = std::move(start)] {
      const py::gil_scoped_acquire gil;
      start();
    };
  });
  m.def(
      "attach",
      [](uint32_t number, std::vector<client::MemberOptions> members) {
        auto session = std::make_unique<client::Session>(number);
        for (auto& member : members) session->add(std::move(member));
        client::seedNewSession(*session);
        watchInterrupts();
        Devices::get().attach(std::move(session));
        client::startAutogradThreads(Devices::get().namesEver());
      },
      py::arg("session"), py::arg("members"), py::call_guard<py::gil_scoped_release>());
  m.def("detach", [] { Devices::get().detach(); }, py::call_guard<py::gil_scoped_release>());
  m.def("abandon", [] { return Devices::get().abandon(); });
  m.def("report_lost", [](uint32_t number, size_t member, const std::string& reason) {
    client::Session* session = Devices::get().byNumber(number);
    if (session != nullptr && member < session->size())
      session->member(member).liveness().reportLost(reason);
  });
}

}  // namespace shoal
