// The only file that knows Python (with python_line.cpp, which reads its frames).
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "base/log.h"
#include "client/call/issue.h"
#include "client/member/errors.h"
#include "client/member/events.h"
#include "client/member/interrupts.h"
#include "client/replay/recording.h"
#include "client/space/devices.h"
#include "client/space/host_memory.h"
#include "client/space/session_report.h"
#include "client/space/shared_segments.h"
#include "client/space/transfers.h"
#include "client/tensor/generator.h"
#include "client/tensor/tensor.h"
#include "client/torch/autograd_threads.h"
#include "client/torch/composites.h"
#include "client/torch/hooks.h"
#include "client/torch/kernels.h"
#include "network/client_link.h"
#include "network/data_connections.h"
#include "python/layouts.h"
#include "python/policy_replay.h"
#include "python/python_line.h"
#include "python/python_signals.h"
#include "transport/ending.h"
#include "wire/limits.h"
#include "worker/process/worker.h"

namespace py = pybind11;

namespace shoal {
namespace {

// Shoal's own error types, which Python defines.
struct ErrorTypes {
  PyObject* device_lost = nullptr;
  PyObject* peer_lost = nullptr;
  PyObject* share = nullptr;
  PyObject* share_revoked = nullptr;
};
ErrorTypes g_errors;

struct NamedError : torch::PyTorchError {
  NamedError(const std::string& text, PyObject* type) : torch::PyTorchError(text), type(type) {}
  PyObject* python_type() override { return type; }
  PyObject* type;
};

// What the pool says of a device that was lost; waits a moment for it.
PyObject* g_explain_loss = nullptr;

// Torch makes an exception from a type and one string, so the device's name follows the text behind
// a separator. shoal.DeviceLostError takes them apart.
std::string withDevice(const std::string& text, const std::string& device) {
  return text + '\x1f' + device;
}

struct LostError final : NamedError {
  explicit LostError(client::LostDevice device)
      : NamedError(withDevice(device.text(device.reason), device.name), g_errors.device_lost),
        lost(std::move(device)) {}

  // Torch, and we below, ask for the text where the error becomes Python's: with the GIL, and
  // without any lock of ours. Whoever asks elsewhere gets what this program saw by itself.
  const char* what() const noexcept override {
    if (!explained && g_explain_loss != nullptr && Py_IsInitialized() != 0 &&
        PyGILState_Check() != 0) {
      explain();
    }
    return explained ? text.c_str() : msg.c_str();
  }

 private:
  void explain() const noexcept {
    try {
      const py::object why = py::handle(g_explain_loss)(lost.session, lost.member,
                                                        static_cast<int>(lost.seen), lost.reason);
      std::string found = withDevice(lost.text(why.cast<std::string>()), lost.name);
      if (!explained) text = std::move(found);  // another thread may have had the GIL meanwhile
      explained = true;
    } catch (py::error_already_set& error) {
      // Ctrl-C while it waited: it is heard at the next line.
      if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    } catch (const std::exception&) {
      // The text stays what this program saw by itself.
    }
  }

  client::LostDevice lost;
  mutable std::string text;
  mutable bool explained = false;
};

void throwLost(const client::LostDevice& lost) {
  if (g_errors.device_lost != nullptr) throw LostError(lost);
}

void throwDeviceLost(const std::string& text, const std::string& device) {
  if (g_errors.device_lost != nullptr)
    throw NamedError(withDevice(text, device), g_errors.device_lost);
}

py::object typeOf(wire::ErrorKind kind) {
  using wire::ErrorKind;
  if (kind == ErrorKind::kPeerLost) return py::reinterpret_borrow<py::object>(g_errors.peer_lost);
  if (kind == ErrorKind::kOutOfMemory) return py::module_::import("torch").attr("OutOfMemoryError");
  if (kind == ErrorKind::kLinAlg) return py::module_::import("torch.linalg").attr("LinAlgError");
  PyObject* type = kind == ErrorKind::kIndex            ? PyExc_IndexError
                   : kind == ErrorKind::kValue          ? PyExc_ValueError
                   : kind == ErrorKind::kType           ? PyExc_TypeError
                   : kind == ErrorKind::kNotImplemented ? PyExc_NotImplementedError
                                                        : PyExc_RuntimeError;
  return py::reinterpret_borrow<py::object>(type);
}

// Throws an exception of the type that local torch raises, with the data as attributes.
void throwOperatorError(wire::ErrorKind kind, const std::string& text,
                        const client::ErrorData& data) {
  if (g_errors.peer_lost == nullptr || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  const py::object type = typeOf(kind);
  const py::object error = type(text);
  const auto set = [&error](const char* name, const std::string& value) {
    error.attr(name) = value.empty() ? py::object(py::none()) : py::object(py::str(value));
  };
  set("device", data.device);
  set("operator", data.operator_name);
  set("line", data.line);
  if (kind == wire::ErrorKind::kPeerLost) set("peer", data.peer);
  PyErr_SetObject(type.ptr(), error.ptr());
  python_error raised;
  raised.persist();
  throw raised;
}

void throwShareError(const std::string& text, bool revoked) {
  PyObject* type = revoked ? g_errors.share_revoked : g_errors.share;
  if (type != nullptr) throw NamedError(text, type);
}

template <size_t count>
std::array<unsigned char, count> exactly(const py::bytes& given) {
  const std::string_view text = given;
  std::array<unsigned char, count> bytes;
  if (text.size() != count) throw std::invalid_argument("a session's id or secret is too short");
  std::copy(text.begin(), text.end(), bytes.begin());
  return bytes;
}

void bindClient(py::module_& m) {
  using client::Devices;
  m.def("register_device", [](py::object device_lost, py::object peer_lost, py::object share,
                              py::object share_revoked, std::vector<std::string> internal) {
    g_errors = {device_lost.release().ptr(), peer_lost.release().ptr(), share.release().ptr(),
                share_revoked.release().ptr()};
    setInternalDirectories(std::move(internal));
    client::lineHooks() = {&currentPythonLine, &describePythonLine, &throwOperatorError,
                           &throwDeviceLost,   &throwShareError,    &throwLost};
    client::signalHooks() = {&interruptsSeen, &checkSignals};
    client::registerHooks();
    // Exceptions that leave our own functions; torch translates those that leave its own.
    py::register_exception_translator([](std::exception_ptr error) {
      try {
        if (error) std::rethrow_exception(error);
      } catch (torch::PyTorchError& known) {
        PyErr_SetString(known.python_type(), known.what());
      } catch (python_error& known) {
        known.restore();
      }
    });
  });
  m.def("set_loss_explainer", [](py::object explain) { g_explain_loss = explain.release().ptr(); });
  m.def("tell_lost", [](uint32_t number, size_t member, const std::string& reason) {
    client::Session* session = Devices::get().byNumber(number);
    if (session != nullptr && member < session->size()) session->member(member).tellLost(reason);
  });
  m.def("register_kernels", [] {
    static std::once_flag once;
    std::call_once(once, [] {
      client::registerComposites();
      client::registerKernels();
      client::registerAutocast();
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
  py::class_<network::ClientLink, std::shared_ptr<network::ClientLink>>(
      m, "Link", "The client's half of a session between machines.")
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
  py::class_<client::StreamOptions>(m, "Member", "A leased device's end of the session.")
      .def(py::init([](int socket, std::vector<int> fds, uint64_t arena_bytes,
                       uint64_t memory_bytes, uint64_t spill_bytes, std::string name, bool is_cpu,
                       std::shared_ptr<network::ClientLink> link) {
             client::StreamOptions options;
             options.socket = socket;
             options.requests_fd = fds.at(0);
             options.replies_fd = fds.at(1);
             options.progress_fd = fds.at(2);
             options.places_fd = fds.at(3);
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
  m.def(
      "attach",
      [](uint32_t number, std::vector<client::StreamOptions> members) {
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
  m.def("wanted", [] { return Devices::get().wanted(); });
  m.def("want", [] { Devices::get().want(); });
  m.def("device_count", [] { return static_cast<int>(Devices::get().count()); });
  m.def("current_device", [] { return static_cast<int>(Devices::current()); });
  m.def("set_device", [](int index) { Devices::setCurrent(static_cast<c10::DeviceIndex>(index)); });
  m.def("give_up", [](int index) {
    const auto device = static_cast<c10::DeviceIndex>(index);
    Devices::get().sessionWith(device).deviceMember(device).giveUp();
  });
  m.def(
      "synchronize",
      [](int index) {
        const auto device = static_cast<c10::DeviceIndex>(index);
        Devices::get().sessionWith(device).synchronize(device);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("seed_default_generators", &client::seedDefaultGenerators,
        py::call_guard<py::gil_scoped_release>());
  m.def("default_generator",
        [](int index) { return client::defaultGenerator(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_blocking", &client::setBlocking);
  m.def("set_whole_rnn", &client::setWholeRnn);
  m.def("whole_rnn", &client::wholeRnn);
}

void bindSharing(py::module_& m) {
  using client::Devices;
  py::class_<client::SharedDescriptors>(m, "SharedMemory", "What makes a memory shared.")
      .def(py::init([](int memory, int control, int line, uint64_t participant) {
             return client::SharedDescriptors{memory, control, line, participant};
           }),
           py::kw_only(), py::arg("memory"), py::arg("control"), py::arg("line"),
           py::arg("participant"));
  const auto modeOf = [](bool exclusive) {
    return exclusive ? wire::ShareMode::kExclusive : wire::ShareMode::kRead;
  };
  m.def(
      "share",
      [modeOf](const at::Tensor& tensor, size_t member, const client::SharedDescriptors& fds,
               bool exclusive) {
        client::share(client::sessionOf(tensor), client::baseOf(tensor), member, fds,
                      modeOf(exclusive));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "open_shared",
      [modeOf](uint64_t bytes, size_t member, const client::SharedDescriptors& fds, bool exclusive,
               at::ScalarType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides,
               int64_t offset) {
        const wire::Address address =
            client::openShared(Devices::get().session(), bytes, member, fds, modeOf(exclusive));
        return client::makeView(address, bytes, dtype, sizes, strides, offset);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "unshare",
      [](const at::Tensor& tensor) {
        client::unshare(client::sessionOf(tensor), client::baseOf(tensor));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("is_shared", [](const at::Tensor& tensor) {
    const wire::Address base = client::baseOf(tensor);
    return base != 0 && client::isShared(client::sessionOf(tensor), base);
  });
}

void bindRecording(py::module_& m) {
  using client::Recording;
  using client::Repeat;
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<Recording, std::shared_ptr<Recording>>(m, "Recording",
                                                    "What this thread tells one device.")
      .def(py::init([](int index) {
             const py::gil_scoped_release release;
             return std::make_shared<Recording>(static_cast<c10::DeviceIndex>(index));
           }),
           py::arg("device"))
      .def("stop", &Recording::stop, released)
      .def_static("pause", &Recording::pause)
      .def_static("resume", &Recording::resume)
      .def("mark", &Recording::mark, released)
      .def_property_readonly("failure", &Recording::failure);
  py::class_<Repeat>(m, "Repeat", "The same on another device.")
      .def(py::init([](std::shared_ptr<Recording> recording, int index,
                       const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs,
                       const std::vector<at::Tensor>& wanted) {
             const py::gil_scoped_release release;
             return std::make_unique<Repeat>(
                 std::move(recording), static_cast<c10::DeviceIndex>(index), ours, theirs, wanted);
           }),
           py::arg("recording"), py::arg("device"), py::kw_only(), py::arg("ours"),
           py::arg("theirs"), py::arg("wanted"))
      .def("until", &Repeat::until, released)
      .def("tensor", &Repeat::tensor, released);
}

void bindStatistics(py::module_& m) {
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
    session.directory(session.lock()).resetPeak();
  });
  m.def("trim", [] { Devices::get().session().trim(); });
  m.def("segments", [] {
    py::list entries;
    for (const auto& [address, segment, resident, frame] :
         client::mapOf(Devices::get().session())) {
      entries.append(py::make_tuple(address, segment.bytes, segment.bound, segment.valid, resident,
                                    segment.home, segment.pinned, segment.extent_of,
                                    segment.written_at, frame, segment.shared));
    }
    return entries;
  });
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
  m.def("add_from", [](const at::Tensor& target, const at::Tensor& source) {
    const at::ScalarType type = target.scalar_type();
    const bool floats =
        type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
    if (!floats || source.scalar_type() != type || source.sizes() != target.sizes() ||
        !target.is_contiguous() || !source.is_contiguous() || target.numel() == 0 ||
        target.device().type() != at::kPrivateUse1 || source.device().type() != at::kPrivateUse1) {
      return false;
    }
    const py::gil_scoped_release released;
    client::Session& session = client::sessionOf(target);
    if (&client::sessionOf(source) != &session) return false;
    const auto to = client::baseOf(target), from = client::baseOf(source);
    return client::addAcross(session, to, client::addressOf(target) - to, from,
                             client::addressOf(source) - from, source.nbytes(), type);
  });
  m.def("copy_later", [](const at::Tensor& target, const at::Tensor& source) {
    const auto whole = [](const at::Tensor& t) {
      return t.device().type() == at::kPrivateUse1 && t.is_non_overlapping_and_dense() &&
             t.storage_offset() == 0 && t.storage().nbytes() == t.nbytes() && t.numel() > 0;
    };
    if (!whole(target) || !whole(source) || source.scalar_type() != target.scalar_type() ||
        source.sizes() != target.sizes() || source.strides() != target.strides() ||
        source.is_conj() != target.is_conj() || source.is_neg() != target.is_neg()) {
      return false;
    }
    const py::gil_scoped_release released;
    client::Session& session = client::sessionOf(target);
    if (&client::sessionOf(source) != &session) return false;
    if (!session.copyLater(client::baseOf(target), client::baseOf(source))) return false;
    target.unsafeGetTensorImpl()->bump_version();
    return true;
  });
  m.def("load", [](const at::Tensor& target, uint64_t reader, uint64_t from) {
    TORCH_CHECK(target.device().type() == at::kPrivateUse1 && target.device().index() > 0 &&
                    target.is_contiguous() && target.numel() > 0,
                "a reader's samples go to a dense tensor of one device");
    const auto member = static_cast<size_t>(target.device().index()) - 1;
    const py::gil_scoped_release released;
    const auto base = client::baseOf(target);
    return client::load(client::sessionOf(target), base, client::addressOf(target) - base,
                        target.nbytes(), member, reader, from);
  });
  m.def("is_past", [](int index, uint64_t sequence) {
    const py::gil_scoped_release released;
    TORCH_CHECK(Devices::get().attached(), "shoal: the lease has ended");
    const auto device = static_cast<c10::DeviceIndex>(index);
    client::Stream& member = Devices::get().sessionWith(device).deviceMember(device);
    member.checkSometimes();
    return member.completed(sequence);
  });
  m.def("elapsed_ms", [](uintptr_t start, uintptr_t end) {
    const py::gil_scoped_release released;
    const client::Elapsed elapsed = client::elapsedBetween(reinterpret_cast<const void*>(start),
                                                           reinterpret_cast<const void*>(end));
    return std::make_pair(elapsed.all_ms, elapsed.waited_ms);
  });
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

void bindWorker(py::module_& m) {
  m.attr("EXIT_FAILED") = static_cast<int>(transport::Ending::kFailed);
  m.attr("EXIT_CLIENT_ENDED") = static_cast<int>(transport::Ending::kClientEnded);
  m.attr("EXIT_CLIENT_CLOSED") = static_cast<int>(transport::Ending::kClientClosed);
  m.attr("EXIT_CLIENT_SILENT") = static_cast<int>(transport::Ending::kClientSilent);
  py::class_<network::ArrivalsOptions>(m, "Arrivals", "Who may open data connections to a worker.")
      .def(py::init([](int channel, const std::string& key, const std::string& certificate,
                       const std::string& authority, const py::bytes& secret, std::string client) {
             return network::ArrivalsOptions{
                 channel, {key, certificate, authority}, exactly<32>(secret), std::move(client)};
           }),
           py::kw_only(), py::arg("channel"), py::arg("key"), py::arg("certificate"),
           py::arg("authority"), py::arg("secret"), py::arg("client"));
  m.def(
      "set_up_log",
      [](std::string component, bool json, bool errors_only) {
        transport::setUpLog({std::move(component), json, errors_only});
      },
      py::kw_only(), py::arg("component"), py::arg("json"), py::arg("errors_only"));
  py::class_<worker::Worker>(m, "Worker", "One session on one device; the process serves it.")
      .def(py::init([](int socket, int client_pidfd, uint32_t session, std::string device,
                       std::string name, uint64_t memory_bytes, int host_fd, uint64_t host_bytes,
                       uint64_t spill_host_bytes, uint64_t spill_disk_bytes,
                       std::string spill_directory, bool least_recent, double speed, int threads,
                       std::optional<network::ArrivalsOptions> arrivals, int last_words_fd) {
             worker::WorkerOptions options;
             options.last_words_fd = last_words_fd;
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
           py::arg("threads"), py::arg("arrivals") = std::nullopt, py::arg("last_words_fd") = -1)
      .def("fds",
           [](const worker::Worker& w) {
             const auto r = w.regions();
             std::vector<int> fds{r.requests_fd, r.replies_fd, r.progress_fd, r.places_fd};
             if (r.arena_fd >= 0) fds.push_back(r.arena_fd);
             return fds;
           })
      .def("arena_bytes", [](const worker::Worker& w) { return w.regions().arena_bytes; })
      .def(
          "add_peer",
          [](worker::Worker& w, std::vector<int> fds, uint64_t arena_bytes, std::string name) {
            worker::PeerOptions options;
            options.progress_fd = fds.at(0);
            options.places_fd = fds.at(1);
            if (arena_bytes > 0) options.arena_fd = fds.at(2);
            options.arena_bytes = arena_bytes;
            options.name = std::move(name);
            w.addPeer(std::move(options));
          },
          py::kw_only(), py::arg("fds"), py::arg("arena_bytes"), py::arg("name"))
      .def("add_self", &worker::Worker::addSelf, py::kw_only(), py::arg("name"))
      .def(
          "add_peer_elsewhere",
          [](worker::Worker& w, std::string host, uint16_t port, std::string server_name,
             const py::bytes& data_id, const py::bytes& secret, uint32_t member, std::string name) {
            w.addPeerElsewhere({std::move(host), port, std::move(server_name), exactly<16>(data_id),
                                exactly<32>(secret)},
                               member, std::move(name));
          },
          py::kw_only(), py::arg("host"), py::arg("port"), py::arg("server_name"),
          py::arg("data_id"), py::arg("secret"), py::arg("member"), py::arg("name"))
      .def("serve", &worker::Worker::serve, py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace shoal

PYBIND11_MODULE(_core, m) {
  m.doc() = "Shoal's core: the client of the torch device and the worker behind it.";
  m.attr("LANES_MAX") = shoal::network::kLanesMax;
  m.attr("PROTOCOL_VERSION") = shoal::wire::kProtocolVersion;
  m.attr("SESSIONS_MAX") = shoal::wire::kSessionsMax;
  shoal::bindClient(m);
  shoal::bindSharing(m);
  shoal::bindRecording(m);
  shoal::bindStatistics(m);
  shoal::bindPolicyReplay(m);
  shoal::bindWorker(m);
  shoal::bindLayouts(m);
}
