// Capture of one device's operators, and their replay on another.
#include "client/replay/capture.h"
#include "python/bindings.h"

namespace shoal {

void bindReplay(py::module_& m) {
  using client::Capture;
  using client::Replay;
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<Capture, std::shared_ptr<Capture>>(
      m, "Capture", "The operators that this thread sends to one device.")
      .def(py::init([](int index) {
             const py::gil_scoped_release release;
             return std::make_shared<Capture>(static_cast<c10::DeviceIndex>(index));
           }),
           py::arg("device"))
      .def("stop", &Capture::stop, released)
      .def_static("pause", &Capture::pause)
      .def_static("resume", &Capture::resume)
      .def("mark", &Capture::mark, released)
      .def_property_readonly("failure", &Capture::failure);
  py::class_<Replay>(m, "Replay", "A capture on another device.")
      .def(py::init([](std::shared_ptr<Capture> capture, int index,
                       const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs,
                       const std::vector<at::Tensor>& wanted) {
             const py::gil_scoped_release release;
             return std::make_unique<Replay>(
                 std::move(capture), static_cast<c10::DeviceIndex>(index), ours, theirs, wanted);
           }),
           py::arg("capture"), py::arg("device"), py::kw_only(), py::arg("ours"), py::arg("theirs"),
           py::arg("wanted"))
      .def("until", &Replay::until, released)
      .def("tensor", &Replay::tensor, released);
}

}  // namespace shoal
