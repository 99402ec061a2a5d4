// What Python has to know of the layouts that C++ owns.
#pragma once

#include <pybind11/pybind11.h>

#include "wire/codec.h"

namespace shoal {

void bindLayouts(pybind11::module_& m);

// The fields of a message that has only words, by their names.
struct NamedWords {
  pybind11::dict fields;
  void word(const char* name, auto& value, wire::Rule = {}) { fields[name] = value; }
};
template <typename M>
pybind11::dict namedWords(M message) {
  NamedWords codec;
  message.layout(codec);
  return codec.fields;
}

}  // namespace shoal
