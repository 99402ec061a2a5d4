// Capture of one device's operators, and their replay on another.
#include "client/replay/recording.h"
#include "python/bindings.h"

namespace shoal {

void bindRecording(py::module_& m) {
  using client::Recording;
  using client::Repeat;
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<Recording, std::shared_ptr<Recording>>(
      m, "Recording", "The operators that this thread sends to one device.")
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
  py::class_<Repeat>(m, "Repeat", "A recording on another device.")
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

}  // namespace shoal
