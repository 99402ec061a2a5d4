#define Py_BUILD_CORE 1
#include <Python.h>
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000
#include <internal/pycore_frame.h>
#define SHOAL_HAS_FRAMES 1
#endif
#undef Py_BUILD_CORE

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "python/python_line.h"

namespace shoal {

#ifdef SHOAL_HAS_FRAMES
namespace {

// Code objects that we have met. Each is kept alive for ever, so its address stays its name.
struct Known {
  std::atomic<PyCodeObject*> code{nullptr};
  std::atomic<bool> internal{false};
};
constexpr size_t kKnownMax = 1 << 14;  // a power of two; beyond it, lines of new code are unknown
std::array<Known, kKnownMax> g_known;
std::mutex g_known_mutex;

size_t slotOf(PyCodeObject* code) {
  return (reinterpret_cast<uintptr_t>(code) >> 4) * 0x9E3779B97F4A7C15ull % kKnownMax;
}

std::vector<std::string> g_internal;

bool isInternal(const char* file) {
  const std::string path(file);
  for (const auto& directory : g_internal) {
    if (path.rfind(directory, 0) == 0) return true;
  }
  return path.rfind("<frozen", 0) == 0;
}

// Looks the code object up. The first time, this takes the GIL to keep a reference.
const Known* know(PyCodeObject* code) {
  size_t at = slotOf(code);
  for (size_t probes = 0; probes < 64; ++probes, at = (at + 1) % kKnownMax) {
    PyCodeObject* here = g_known[at].code.load(std::memory_order_acquire);
    if (here == code) return &g_known[at];
    if (here == nullptr) {
      const PyGILState_STATE gil = PyGILState_Ensure();
      {
        const std::lock_guard lock(g_known_mutex);
        if (g_known[at].code.load() == nullptr) {
          Py_INCREF(code);
          const char* file = PyUnicode_AsUTF8(code->co_filename);
          PyErr_Clear();
          g_known[at].internal = file == nullptr || isInternal(file);
          g_known[at].code.store(code, std::memory_order_release);
        }
      }
      PyGILState_Release(gil);
      if (g_known[at].code.load() == code) return &g_known[at];
    }
  }
  return nullptr;
}

_PyInterpreterFrame* topFrame(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
  return thread->current_frame;
#else
  return thread->cframe->current_frame;
#endif
}

PyCodeObject* codeOf(_PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyCode_Check(frame->f_executable) ? reinterpret_cast<PyCodeObject*>(frame->f_executable)
                                           : nullptr;
#else
  return frame->f_code;
#endif
}

std::atomic<uint64_t> g_last{0};  // autograd's threads have no frames: they answer for backward()

}  // namespace

void setInternalDirectories(std::vector<std::string> directories) {
  g_internal = std::move(directories);
}

// A token is the code's slot and the byte offset of the instruction inside it.
uint64_t currentPythonLine() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return g_last.load(std::memory_order_relaxed);
  int depth = 0;
  for (_PyInterpreterFrame* frame = topFrame(thread); frame != nullptr && depth < 64;
       frame = frame->previous, ++depth) {
    PyCodeObject* code = codeOf(frame);
    if (code == nullptr) continue;
    const Known* known = know(code);
    if (known == nullptr || known->internal.load(std::memory_order_relaxed)) continue;
    const auto slot = static_cast<uint64_t>(known - g_known.data());
    const auto offset = reinterpret_cast<const char*>(frame->prev_instr) -
                        reinterpret_cast<const char*>(_PyCode_CODE(code));
    const uint64_t token = ((slot + 1) << 32) | static_cast<uint32_t>(offset);
    g_last.store(token, std::memory_order_relaxed);
    return token;
  }
  return g_last.load(std::memory_order_relaxed);
}

std::string describePythonLine(uint64_t token) {
  if (token == 0 || (token >> 32) > kKnownMax) return "";
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyCodeObject* code = g_known[(token >> 32) - 1].code.load();
  std::string text;
  if (code != nullptr) {
    const int line = PyCode_Addr2Line(code, static_cast<int>(static_cast<uint32_t>(token)));
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* name = PyUnicode_AsUTF8(code->co_name);
    PyErr_Clear();
    text = std::string(file != nullptr ? file : "?") + ":" + std::to_string(line) + " in " +
           (name != nullptr ? name : "?");
  }
  PyGILState_Release(gil);
  return text;
}

#else  // another Python: calls are not traced to lines

void setInternalDirectories(std::vector<std::string>) {}
uint64_t currentPythonLine() {
  return 0;
}
std::string describePythonLine(uint64_t) {
  return "";
}

#endif

}  // namespace shoal
