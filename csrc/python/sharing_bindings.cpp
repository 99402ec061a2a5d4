// Memory that programs share.
#include "client/space/devices.h"
#include "client/space/shared_segments.h"
#include "client/tensor/tensor.h"
#include "python/bindings.h"
#include "wire/limits.h"

namespace shoal {

void bindSharing(py::module_& m) {
  using client::Devices;
  py::class_<client::SharedDescriptors>(m, "SharedDescriptors", "The descriptors of shared memory.")
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

}  // namespace shoal
