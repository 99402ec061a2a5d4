// The Python module of the core, and the errors that it raises there.
#include "python/bindings.h"

#include <torch/csrc/Exceptions.h>

#include "client/member/errors.h"
#include "client/member/interrupts.h"
#include "client/torch/hooks.h"
#include "network/client_link.h"
#include "python/layouts.h"
#include "python/python_line.h"
#include "python/python_signals.h"
#include "wire/address.h"
#include "wire/limits.h"

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

// Returns the pool's reason for the loss of a device, after a short wait.
PyObject* g_explain_loss = nullptr;

// Torch makes an exception from a type and one string, so the device's name follows the text behind
// a separator. shoal.DeviceLostError takes them apart. An exception object with attributes would
// need the GIL here, where a lock may be held:
// docs/decisions/0042-device-name-in-the-error-text.md.
std::string withDevice(const std::string& text, const std::string& device) {
  return text + '\x1f' + device;
}

struct LostError final : NamedError {
  explicit LostError(client::LostDevice device)
      : NamedError(withDevice(device.text(device.reason), device.name), g_errors.device_lost),
        lost(std::move(device)) {}

  // Torch and the translator below ask for the text when the error becomes Python's: with the GIL
  // and without any lock of ours. Any other caller gets what this program saw by itself.
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

void bindRegistration(py::module_& m) {
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
}

}  // namespace
}  // namespace shoal

PYBIND11_MODULE(_core, m) {
  m.doc() = "Shoal's core: the client of the torch device and the worker behind it.";
  m.attr("LANES_MAX") = shoal::network::kLanesMax;
  m.attr("PROTOCOL_VERSION") = shoal::wire::kProtocolVersion;
  shoal::bindRegistration(m);
  shoal::bindSession(m);
  shoal::bindDevices(m);
  shoal::bindMemory(m);
  shoal::bindCounters(m);
  shoal::bindTransfers(m);
  shoal::bindSharing(m);
  shoal::bindReplay(m);
  shoal::bindPolicyReplay(m);
  shoal::bindWorker(m);
  shoal::bindSessionBlock(m);
  shoal::bindLayouts(m);
}
