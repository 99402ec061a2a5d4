#include "python/python_signals.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

#include "client/member/interrupts.h"

namespace py = pybind11;

namespace shoal {
namespace {

using namespace std::chrono_literals;

// With it a main thread that runs Python takes up a signal; one that waits in torch does not.
constexpr auto kMainThreadAnswers = 60ms;

std::atomic<uint64_t> g_interrupts{0};
struct sigaction g_python{};  // Python's own handler, which ours calls

void onInterrupt(int number, siginfo_t* info, void* context) {
  g_interrupts.fetch_add(1, std::memory_order_relaxed);
  if ((g_python.sa_flags & SA_SIGINFO) != 0) {
    g_python.sa_sigaction(number, info, context);
  } else {
    g_python.sa_handler(number);
  }
}

struct Interruption : torch::PyTorchError, client::Interrupted {
  explicit Interruption(PyObject* type)
      : torch::PyTorchError("interrupted while the program waited for a shoal device"),
        type(type) {}
  // Torch asks for it in the thread that the error reaches, which holds the GIL.
  PyObject* python_type() override {
    if (type == nullptr) {
      if (PyErr_CheckSignals() != 0) PyErr_Clear();  // this error stands for the signal
      type = PyExc_KeyboardInterrupt;
    }
    return type;
  }
  PyObject* type;  // null: KeyboardInterrupt, which Python does not know of yet
};

bool isMainThread() {
  return syscall(SYS_gettid) == getpid();
}

bool isAutogradThread() {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::string_view(name).starts_with("pt_autograd");
}

void checkMainThread() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  throw Interruption(type);  // owns the reference for good: exception types are few
}

// Whether Ctrl-C raises KeyboardInterrupt, as it does unless the program decided otherwise.
bool raisesKeyboardInterrupt() {
  const py::gil_scoped_acquire gil;
  const auto module = py::module_::import("signal");
  return module.attr("getsignal")(SIGINT).is(module.attr("default_int_handler"));
}

// Whether the main thread runs Python code, which takes up signals by itself.
bool mainThreadAnswers() {
  using Answer = std::shared_ptr<std::atomic<bool>>;
  const auto answered = std::make_shared<std::atomic<bool>>(false);
  auto* passed = new Answer(answered);
  const auto answer = [](void* given) {
    const std::unique_ptr<Answer> mine(static_cast<Answer*>(given));
    (*mine)->store(true);
    return 0;
  };
  if (Py_AddPendingCall(answer, passed) != 0) {  // its queue is full: try again later
    delete passed;
    return true;
  }
  const auto deadline = std::chrono::steady_clock::now() + kMainThreadAnswers;
  while (!answered->load() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(2ms);
  }
  return answered->load();
}

}  // namespace

void watchInterrupts() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  struct sigaction current{};
  if (sigaction(SIGINT, nullptr, &current) != 0) return;
  const bool ours = (current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == &onInterrupt;
  if (ours || current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN) return;
  g_python = current;
  struct sigaction chained = current;
  chained.sa_flags |= SA_SIGINFO;
  chained.sa_sigaction = &onInterrupt;
  sigaction(SIGINT, &chained, nullptr);
}

uint64_t interruptsSeen() {
  return g_interrupts.load(std::memory_order_relaxed);
}

void checkSignals(uint64_t& seen) {
  if (PyGILState_Check() != 0) {
    // Not every function of torch lets go of the GIL: saving a tensor does not. Other threads must
    // go on, for one of them keeps the lease, and the main thread may want the GIL to check
    // signals.
    const py::gil_scoped_release let_others;
    sched_yield();
  }
  if (isMainThread()) return checkMainThread();
  watchInterrupts();  // the program may have set a handler of its own since
  const uint64_t now = interruptsSeen();
  if (now == seen) return;
  seen = now;
  if (isAutogradThread() && raisesKeyboardInterrupt() && !mainThreadAnswers()) {
    throw Interruption(nullptr);
  }
}

}  // namespace shoal
