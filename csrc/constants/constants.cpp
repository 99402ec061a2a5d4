// The Python module of what the core and processes without torch, the head and the agent, must
// agree on. It includes no torch and links to none of it.
#include <Python.h>

#include <cstddef>

#include "client/directory/segment.h"
#include "network/frames.h"
#include "wire/address.h"
#include "worker/shared/shared_block.h"

namespace {

struct Number {
  const char* name;
  long value;
};
constexpr Number kNumbers[] = {
    {"SESSIONS_MAX", shoal::wire::kSessionsMax - 1},  // 0 is no session
    {"DEVICES_PER_LEASE_MAX", shoal::client::kMembersMax},
    {"SHARE_CONTROL_BYTES", shoal::worker::kShareControlBytes},
    {"SHARE_REVOKED_WORD", offsetof(shoal::worker::ShareControl, revoked) / 8},
    {"SHARE_HOLDER_WORD", offsetof(shoal::worker::ShareControl, holder) / 8},
};

PyModuleDef definition{
    PyModuleDef_HEAD_INIT, "_constants", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__constants() {
  PyObject* module = PyModule_Create(&definition);
  for (const auto& [name, value] : kNumbers) {
    if (module != nullptr && PyModule_AddIntConstant(module, name, value) != 0) Py_CLEAR(module);
  }
  PyObject* magic =
      PyBytes_FromStringAndSize(shoal::network::kDataMagic, sizeof shoal::network::kDataMagic - 1);
  if (module != nullptr && PyModule_AddObjectRef(module, "DATA_MAGIC", magic) != 0) {
    Py_CLEAR(module);
  }
  Py_XDECREF(magic);
  if (module != nullptr &&
      PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION) != 0) {
    Py_CLEAR(module);
  }
  return module;
}
