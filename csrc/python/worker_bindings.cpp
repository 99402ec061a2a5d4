// A worker process: its options, its peers and its exit codes.
#include "base/log.h"
#include "network/data_connections.h"
#include "network/tls/session_identity.h"
#include "python/bindings.h"
#include "transport/ending.h"
#include "worker/accelerator/cuda_driver.h"
#include "worker/accelerator/start.h"
#include "worker/process/worker.h"

namespace shoal {

namespace {

using WorkerClass = py::class_<worker::Worker>;

void bindWorkerInit(WorkerClass& bound) {
  bound.def(py::init([](int socket, int client_pidfd, uint32_t session, std::string device,
                        std::string name, uint64_t memory_bytes, int host_fd, uint64_t host_bytes,
                        uint64_t spill_host_bytes, uint64_t spill_disk_bytes,
                        std::string spill_directory, bool least_recent, double speed, int threads,
                        std::optional<network::ArrivalsOptions> arrivals, int last_words_fd,
                        int block_fd, int orders_fd, int reports_fd) {
              worker::WorkerOptions options;
              options.last_words_fd = last_words_fd;
              options.block_fd = block_fd;
              options.orders_fd = orders_fd;
              options.reports_fd = reports_fd;
              options.socket = socket;
              options.client_pidfd = client_pidfd;
              options.session = session;
              options.device = std::move(device);
              options.name = std::move(name);
              options.memory_bytes = memory_bytes;
              options.host_fd = host_fd;
              options.host_bytes = host_bytes;
              options.spill_host_bytes = spill_host_bytes;
              options.spill_disk_bytes = spill_disk_bytes;
              options.spill_directory = std::move(spill_directory);
              options.least_recent = least_recent;
              options.speed = speed;
              options.threads = threads;
              options.arrivals = std::move(arrivals);
              return new worker::Worker(std::move(options));
            }),
            py::kw_only(), py::arg("socket"), py::arg("client_pidfd"), py::arg("session"),
            py::arg("device"), py::arg("name"), py::arg("memory_bytes"), py::arg("host_fd"),
            py::arg("host_bytes"), py::arg("spill_host_bytes"), py::arg("spill_disk_bytes"),
            py::arg("spill_directory"), py::arg("least_recent"), py::arg("speed"),
            py::arg("threads"), py::arg("arrivals") = std::nullopt, py::arg("last_words_fd") = -1,
            py::arg("block_fd") = -1, py::arg("orders_fd") = -1, py::arg("reports_fd") = -1);
}

void bindWorkerMethods(WorkerClass& bound) {
  bound
      .def("fds",
           [](const worker::Worker& w) {
             const auto r = w.regions();
             std::vector<int> fds{r.requests_fd, r.replies_fd, r.progress_fd, r.locations_fd};
             if (r.arena_fd >= 0) fds.push_back(r.arena_fd);
             return fds;
           })
      .def("arena_bytes", [](const worker::Worker& w) { return w.regions().arena_bytes; })
      .def(
          "add_peer",
          [](worker::Worker& w, std::vector<int> fds, uint64_t arena_bytes, std::string name) {
            worker::PeerOptions options;
            options.progress_fd = fds.at(0);
            options.locations_fd = fds.at(1);
            if (arena_bytes > 0) options.arena_fd = fds.at(2);
            options.arena_bytes = arena_bytes;
            options.name = std::move(name);
            w.addPeer(std::move(options));
          },
          py::kw_only(), py::arg("fds"), py::arg("arena_bytes"), py::arg("name"))
      .def("add_self", &worker::Worker::addSelf, py::kw_only(), py::arg("name"))
      .def(
          "add_remote_peer",
          [](worker::Worker& w, std::string host, uint16_t port, const std::string& certificate,
             const py::bytes& data_id, const py::bytes& secret, uint32_t member, std::string name) {
            w.addPeerElsewhere(
                {std::move(host), port, "", exactly<16>(data_id), exactly<32>(secret)}, certificate,
                member, std::move(name));
          },
          py::kw_only(), py::arg("host"), py::arg("port"), py::arg("certificate"),
          py::arg("data_id"), py::arg("secret"), py::arg("member"), py::arg("name"))
      .def("serve", &worker::Worker::serve, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bindWorker(py::module_& m) {
  m.attr("EXIT_FAILED") = static_cast<int>(transport::Ending::kFailed);
  m.attr("EXIT_CLIENT_ENDED") = static_cast<int>(transport::Ending::kClientEnded);
  m.attr("EXIT_CLIENT_CLOSED") = static_cast<int>(transport::Ending::kClientClosed);
  m.attr("EXIT_DEVICE_FAILED") = static_cast<int>(transport::Ending::kDeviceFailed);
  m.attr("EXIT_CLIENT_SILENT") = static_cast<int>(transport::Ending::kClientSilent);
  py::class_<network::ArrivalsOptions>(m, "ArrivalsOptions",
                                       "Who may open data connections to a worker.")
      .def(py::init([](int channel, const std::string& key, const std::string& certificate,
                       const std::string& authority, const py::bytes& secret, std::string client) {
             return network::ArrivalsOptions{
                 channel, {key, certificate, authority}, exactly<32>(secret), std::move(client)};
           }),
           py::kw_only(), py::arg("channel"), py::arg("key"), py::arg("certificate"),
           py::arg("authority"), py::arg("secret"), py::arg("client"));
  const auto pair = [](worker::DeviceBytes bytes) {
    return std::make_pair(bytes.free, bytes.total);
  };
  m.def("start_device", [pair](const std::string& device) {
    worker::startDevice(c10::Device(device));
    return pair(worker::bytesOf(c10::Device(device)));
  });
  m.def("device_bytes",
        [pair](const std::string& device) { return pair(worker::bytesOf(c10::Device(device))); });
  m.def("cuda_facts", [](int ordinal) {
    const worker::CudaFacts facts = worker::cudaFacts(ordinal);
    return std::make_tuple(facts.name, facts.major, facts.minor);
  });
  m.attr("SESSION_SERVER_NAME") = network::kSessionServerName;
  m.def("make_session_identity", [] {
    const network::Identity made = network::makeSessionIdentity();
    return std::make_pair(made.key, made.certificate);
  });
  m.def(
      "set_up_log",
      [](std::string component, bool json, bool errors_only) {
        transport::setUpLog({std::move(component), json, errors_only});
      },
      py::kw_only(), py::arg("component"), py::arg("json"), py::arg("errors_only"));
  WorkerClass bound(m, "Worker", "One session on one device; the process serves it.");
  bindWorkerInit(bound);
  bindWorkerMethods(bound);
}

}  // namespace shoal
