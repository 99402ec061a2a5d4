// A prepared call: an operator with all arguments that repeat. The worker checks it once against
// the operator's schema and the allow-list. After that a call costs only its addresses.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "wire/messages.h"
#include "wire/templates.h"

namespace shoal::worker {

// Shape and type of one tensor, with the bytes it spans.
struct Shape {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  uint8_t flags = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t item_bytes = 0;
  int64_t span_bytes = 0;
};

struct Argument {
  wire::Tag tag = wire::Tag::kNone;
  Shape shape;           // kTensor, kHostScalar
  c10::IValue constant;  // everything that has no immediate
  bool is_constant = false;
  std::vector<Argument> items;  // kList with immediates
  c10::TypePtr element;         // kList: type of its items
};

struct Output {
  wire::OutputKind kind = wire::OutputKind::kFresh;
  Shape shape;          // kFresh
  uint32_t number = 0;  // kArgument: which; kList: how many
};

struct PreparedCall {
  c10::OperatorHandle op;
  std::string name;
  std::vector<Argument> arguments;
  std::vector<Output> outputs;
  std::vector<bool> written;            // by argument: the operator writes to it
  std::vector<uint32_t> address_words;  // of the immediates
  size_t immediate_words = 0;
  size_t fresh_outputs = 0;
};

// Parses the name ("namespace::name.overload"), the template and the outputs. `device` replaces the
// client's device arguments. Throws wire::ProtocolError (malformed) or c10::NotImplementedError
// (not allowed or not known here).
PreparedCall parsePrepared(const wire::Prepare& message, c10::Device device);

// Whether a client may run this operator. Returns the reason if not.
std::optional<std::string> refusal(const c10::OperatorName& name);

}  // namespace shoal::worker
