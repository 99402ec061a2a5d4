// The functions that bind each topic of the core to Python.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>

namespace shoal {

namespace py = pybind11;

void bindSession(py::module_& m);
void bindDevices(py::module_& m);
void bindMemory(py::module_& m);
void bindCounters(py::module_& m);
void bindTransfers(py::module_& m);
void bindSharing(py::module_& m);
void bindReplay(py::module_& m);
void bindPolicyReplay(py::module_& m);
void bindWorker(py::module_& m);
void bindSessionBlock(py::module_& m);

template <size_t count>
std::array<unsigned char, count> exactly(const py::bytes& given) {
  const std::string_view text = given;
  std::array<unsigned char, count> bytes;
  if (text.size() != count)
    throw std::invalid_argument("a session's id or secret has a wrong length");
  std::copy(text.begin(), text.end(), bytes.begin());
  return bytes;
}

}  // namespace shoal
