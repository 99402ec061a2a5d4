// What torch asks of a device module: kernels, devices, generators and events.
#include "client/call/issue.h"
#include "client/space/devices.h"
#include "client/tensor/generator.h"
#include "client/torch/composites.h"
#include "client/torch/kernels.h"
#include "python/bindings.h"

namespace shoal {

void bindDevices(py::module_& m) {
  using client::Devices;
  m.def("register_kernels", [] {
    static std::once_flag once;
    std::call_once(once, [] {
      client::registerComposites();
      client::registerKernels();
      client::registerAutocast();
    });
  });
  m.def("wanted", [] { return Devices::get().wanted(); });
  m.def("want", [] { Devices::get().want(); });
  m.def("device_count", [] { return static_cast<int>(Devices::get().count()); });
  m.def("current_device", [] { return static_cast<int>(Devices::current()); });
  m.def("set_device", [](int index) { Devices::setCurrent(static_cast<c10::DeviceIndex>(index)); });
  m.def("give_up", [](int index) {
    const auto device = static_cast<c10::DeviceIndex>(index);
    Devices::get().sessionWith(device).deviceMember(device).liveness().giveUp();
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

}  // namespace shoal
