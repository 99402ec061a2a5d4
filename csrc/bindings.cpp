// The only file that knows Python (with python_line.cpp, which reads its frames).
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "client/composites.h"
#include "client/devices.h"
#include "client/dispatch.h"
#include "client/errors.h"
#include "client/generator.h"
#include "client/hooks.h"
#include "client/host_memory.h"
#include "client/kernels.h"
#include "python_line.h"
#include "wire/limits.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace shoal {
namespace {

PyObject* g_device_lost = nullptr;

struct DeviceLostError : torch::PyTorchError {
  explicit DeviceLostError(const std::string& text) : torch::PyTorchError(text) {}
  PyObject* python_type() override { return g_device_lost; }
};

void throwDeviceLost(const std::string& text) {
  if (g_device_lost != nullptr) throw DeviceLostError(text);
}

void bindClient(py::module_& m) {
  using client::Devices;
  m.def("register_device", [](py::object device_lost, std::vector<std::string> internal) {
    g_device_lost = device_lost.release().ptr();
    setInternalDirectories(std::move(internal));
    client::lineHooks() = {&currentPythonLine, &describePythonLine, &throwDeviceLost};
    client::registerHooks();
    // Exceptions that leave our own functions; torch translates those that leave its own.
    py::register_exception_translator([](std::exception_ptr error) {
      try {
        if (error) std::rethrow_exception(error);
      } catch (DeviceLostError& lost) {
        PyErr_SetString(g_device_lost, lost.what());
      }
    });
  });
  m.def("register_kernels", [] {
    static std::once_flag once;
    std::call_once(once, [] {
      client::registerComposites();
      client::registerKernels();
    });
  });
  m.def("set_pool_starter", [](std::function<void()> start) {
    Devices::get().start_pool = [start = std::move(start)] {
      const py::gil_scoped_acquire gil;
      start();
    };
  });
  m.def("host_region", [] {
    auto& host = client::HostMemory::get();
    return py::make_tuple(host.fd(), host.bytes());
  });
  m.def("sessions_in_use", [] { return Devices::get().sessionsInUse(); });
  m.def(
      "attach",
      [](int socket, std::vector<int> fds, uint64_t arena_bytes, uint64_t memory_bytes,
         uint32_t session, int index, std::string name, bool is_cpu) {
        client::StreamOptions options;
        options.socket = socket;
        options.requests_fd = fds.at(0);
        options.replies_fd = fds.at(1);
        options.progress_fd = fds.at(2);
        if (arena_bytes > 0) options.arena_fd = fds.at(3);
        options.arena_bytes = arena_bytes;
        options.memory_bytes = memory_bytes;
        options.session = session;
        options.index = static_cast<c10::DeviceIndex>(index);
        options.name = std::move(name);
        options.is_cpu = is_cpu;
        auto stream = std::make_unique<client::Stream>(std::move(options));
        client::seedNewSession(*stream);
        Devices::get().attach(std::move(stream));
      },
      py::kw_only(), py::arg("socket"), py::arg("fds"), py::arg("arena_bytes"),
      py::arg("memory_bytes"), py::arg("session"), py::arg("index"), py::arg("name"),
      py::arg("is_cpu"), py::call_guard<py::gil_scoped_release>());
  m.def("detach_all", [] { Devices::get().detachAll(); }, py::call_guard<py::gil_scoped_release>());
  m.def("abandon_all", [] { return Devices::get().abandonAll(); });
  m.def("device_count", [] { return static_cast<int>(Devices::get().count()); });
  m.def("current_device", [] { return static_cast<int>(Devices::current()); });
  m.def("set_device", [](int index) { Devices::setCurrent(static_cast<c10::DeviceIndex>(index)); });
  m.def(
      "synchronize",
      [](int index) { Devices::get().stream(static_cast<c10::DeviceIndex>(index)).synchronize(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("default_generator",
        [](int index) { return client::defaultGenerator(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_blocking", &client::setBlocking);
  m.def("set_whole_rnn", &client::setWholeRnn);
  m.def("whole_rnn", &client::wholeRnn);
}

void bindStatistics(py::module_& m) {
  using client::Devices;
  m.def("memory_use", [](int index) {
    const auto use = Devices::get().stream(static_cast<c10::DeviceIndex>(index)).memoryUse();
    py::dict d;
    d["allocated_bytes"] = use.allocated_bytes;
    d["peak_bytes"] = use.peak_bytes;
    d["limit_bytes"] = use.limit_bytes;
    d["allocations"] = use.allocations;
    d["frees"] = use.frees;
    return d;
  });
  m.def("reset_peak",
        [](int index) { Devices::get().stream(static_cast<c10::DeviceIndex>(index)).resetPeak(); });
  m.def("trim", [](int index) {
    Devices::get().stream(static_cast<c10::DeviceIndex>(index)).post(wire::Kind::kTrim, {});
  });
  m.def("traffic", [](int index) {
    auto& stream = Devices::get().stream(static_cast<c10::DeviceIndex>(index));
    const auto traffic = stream.traffic();
    py::dict d;
    d["messages"] = traffic.messages;
    d["stream_bytes"] = traffic.stream_bytes;
    d["bytes_in"] = traffic.bytes_in;
    d["bytes_out"] = traffic.bytes_out;
    d["bytes_copied_by_client"] = traffic.bytes_copied;
    d["round_trips"] = traffic.round_trips;
    return d;
  });
  m.def("worker_stats", [](int index) {
    client::Stream::Payload payload;
    {
      const py::gil_scoped_release release;
      payload = Devices::get()
                    .stream(static_cast<c10::DeviceIndex>(index))
                    .request(wire::Kind::kStats, {});
    }
    static const char* const names[] = {"used_bytes", "reserved_bytes", "segment_bytes",
                                        "segments",   "calls",          "busy_ns",
                                        "bytes_in",   "bytes_out"};
    py::dict d;
    for (size_t i = 0; i < payload.size() && i < std::size(names); ++i) d[names[i]] = payload[i];
    return d;
  });
}

void bindWorker(py::module_& m) {
  py::class_<worker::Worker>(m, "Worker", "One session on one device; the process serves it.")
      .def(py::init([](int socket, int client_pidfd, uint32_t session, std::string device,
                       std::string name, uint64_t memory_bytes, int host_fd, uint64_t host_bytes,
                       double speed, int threads) {
             return new worker::Worker({socket, client_pidfd, session, std::move(device),
                                        std::move(name), memory_bytes, host_fd, host_bytes, speed,
                                        threads});
           }),
           py::kw_only(), py::arg("socket"), py::arg("client_pidfd"), py::arg("session"),
           py::arg("device"), py::arg("name"), py::arg("memory_bytes"), py::arg("host_fd"),
           py::arg("host_bytes"), py::arg("speed"), py::arg("threads"))
      .def("fds",
           [](const worker::Worker& w) {
             const auto r = w.regions();
             std::vector<int> fds{r.requests_fd, r.replies_fd, r.progress_fd};
             if (r.arena_fd >= 0) fds.push_back(r.arena_fd);
             return fds;
           })
      .def("arena_bytes", [](const worker::Worker& w) { return w.regions().arena_bytes; })
      .def("serve", &worker::Worker::serve, py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace shoal

PYBIND11_MODULE(_core, m) {
  m.doc() = "Shoal's core: the client of the torch device and the worker behind it.";
  m.attr("PROTOCOL_VERSION") = shoal::wire::kProtocolVersion;
  m.attr("SESSIONS_MAX") = shoal::wire::kSessionsMax;
  m.attr("DEVICES_MAX") = static_cast<int>(shoal::client::kDevicesMax);
  shoal::bindClient(m);
  shoal::bindStatistics(m);
  shoal::bindWorker(m);
}
