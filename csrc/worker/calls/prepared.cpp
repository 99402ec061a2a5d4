#include "worker/calls/prepared.h"

#include <ATen/Functions.h>
#include <ATen/core/jit_type.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstring>

#include "wire/layout.h"
#include "wire/limits.h"

namespace shoal::worker {
namespace {

using wire::ProtocolError;
using wire::Reader;
using wire::Tag;

// Operators of these namespaces compute on tensors and nothing else, except for those below.
constexpr std::array kNamespaces = {"aten",   "prims",  "torchvision", "quantized", "_quantized",
                                    "mkldnn", "onednn", "sparse",      "shoal"};
// Operators that open files, print, test torch itself, or take memory that is not theirs.
constexpr std::array kRefused = {"aten::from_file",
                                 "aten::_print",
                                 "aten::set_data",
                                 "aten::set_",
                                 "aten::set",
                                 "aten::record_stream",
                                 "aten::_pin_memory",
                                 "aten::pin_memory",
                                 "aten::_record_function_enter",
                                 "aten::_record_function_enter_new",
                                 "aten::_record_function_exit",
                                 "aten::_share_memory",
                                 "aten::_import_from_c",
                                 "aten::save",
                                 "aten::load",
                                 "aten::_assert_async",
                                 "aten::resize_",
                                 "aten::_resize_output_",
                                 "aten::_nested_view_from_buffer"};

c10::ScalarType parseDtype(uint8_t value) {
  if (value >= static_cast<uint8_t>(c10::ScalarType::Undefined)) {
    throw ProtocolError("dtype " + std::to_string(value) + " does not exist");
  }
  const auto dtype = static_cast<c10::ScalarType>(value);
  if (c10::isQIntType(dtype)) throw ProtocolError("quantized tensors cannot be sent");
  return dtype;
}

Shape parseShape(uint8_t dtype, uint8_t flags, const wire::ShapeView& view) {
  Shape shape;
  shape.dtype = parseDtype(dtype);
  shape.flags = flags;
  shape.sizes.assign(view.sizes.begin(), view.sizes.end());
  shape.strides.assign(view.strides.begin(), view.strides.end());
  shape.item_bytes = static_cast<int64_t>(c10::elementSize(shape.dtype));
  shape.span_bytes = wire::spanBytes(shape.sizes.data(), shape.strides.data(), shape.sizes.size(),
                                     shape.item_bytes);
  if (shape.span_bytes < 0) throw ProtocolError("a tensor's shape is negative or overflows");
  return shape;
}

bool isOptional(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType;
}

c10::TypePtr unwrapOptional(const c10::TypePtr& type) {
  return isOptional(type) ? type->castRaw<c10::OptionalType>()->getElementType() : type;
}

// Whether a value with this tag may stand where the schema wants `type`.
bool matches(Tag tag, const c10::TypePtr& type) {
  using K = c10::TypeKind;
  if (isOptional(type)) {
    return tag == Tag::kNone || matches(tag, unwrapOptional(type)) ||
           (tag == Tag::kUndefined && unwrapOptional(type)->kind() == K::TensorType);
  }
  switch (type->kind()) {
    case K::TensorType:
      return tag == Tag::kTensor || tag == Tag::kUndefined || tag == Tag::kHostScalar ||
             tag == Tag::kHostTensor;
    case K::IntType:
    case K::SymIntType:
    case K::ScalarTypeType:
    case K::LayoutType:
    case K::MemoryFormatType:
      return tag == Tag::kInt;
    case K::FloatType:
    case K::SymFloatType:
      return tag == Tag::kFloat || tag == Tag::kFloatKeyed;
    case K::ComplexType:
      return tag == Tag::kComplex;
    case K::BoolType:
    case K::SymBoolType:
      return tag == Tag::kBool;
    case K::NumberType:
      return tag == Tag::kInt || tag == Tag::kIntFree || tag == Tag::kFloat ||
             tag == Tag::kFloatKeyed || tag == Tag::kComplex || tag == Tag::kBool;
    case K::StringType:
      return tag == Tag::kString;
    case K::ListType:
      return tag == Tag::kList;
    case K::DeviceObjType:
      return tag == Tag::kDevice;
    case K::GeneratorType:
      return tag == Tag::kGenerator;
    default:
      return false;
  }
}

c10::IValue makeConstantList(const Argument& list) {
  using K = c10::TypeKind;
  switch (list.element->kind()) {
    case K::IntType:
    case K::SymIntType: {
      c10::List<int64_t> values;
      for (const auto& item : list.items) values.push_back(item.constant.toInt());
      return values;
    }
    case K::FloatType: {
      c10::List<double> values;
      for (const auto& item : list.items) values.push_back(item.constant.toDouble());
      return values;
    }
    case K::BoolType: {
      c10::List<bool> values;
      for (const auto& item : list.items) values.push_back(item.constant.toBool());
      return values;
    }
    case K::TensorType: {
      c10::List<at::Tensor> values;
      for (const auto& item : list.items) values.push_back(item.constant.toTensor());
      return values;
    }
    default: {
      c10::impl::GenericList values(list.element);
      for (const auto& item : list.items) values.push_back(item.constant);
      return values;
    }
  }
}

class TemplateParser {
 public:
  TemplateParser(Reader& reader, c10::Device device) : reader_(reader), device_(device) {}

  Argument parse(const c10::TypePtr& type, int depth = 0) {
    const wire::ArgumentItem item = wire::ArgumentItem::read(reader_);
    Argument argument;
    argument.tag = item.tag;
    if (!matches(item.tag, type)) {
      throw ProtocolError("an argument of type " + type->str() + " cannot have tag " +
                          std::to_string(item.head.tag));
    }
    if (item.tag == Tag::kList) {
      parseList(argument, item.head.count, type, depth);
    } else {
      parseLeaf(argument, item);
    }
    return argument;
  }

  size_t immediateWords() const { return immediates_; }
  const std::vector<uint32_t>& addressWords() const { return address_words_; }

 private:
  void constant(Argument& argument, c10::IValue value) {
    argument.constant = std::move(value);
    argument.is_constant = true;
  }

  void parseLeaf(Argument& argument, const wire::ArgumentItem& item) {
    switch (item.tag) {
      case Tag::kNone:
        return constant(argument, c10::IValue());
      case Tag::kUndefined:
        return constant(argument, at::Tensor());
      case Tag::kInt:
        return constant(argument, static_cast<int64_t>(item.value));
      case Tag::kFloatKeyed:
        return constant(argument, item.number());
      case Tag::kBool:
        return constant(argument, item.boolean());
      case Tag::kDevice:
        return constant(argument, device_);
      case Tag::kString:
        return constant(argument, std::string(item.data));
      case Tag::kHostTensor:
        return constant(argument, hostTensor(item));
      case Tag::kTensor:
        argument.shape = parseShape(item.head.dtype, item.head.flags, item.shape);
        address_words_.push_back(static_cast<uint32_t>(immediates_));
        break;
      case Tag::kHostScalar:
        argument.shape.dtype = parseDtype(item.head.dtype);
        argument.shape.flags = item.head.flags;
        break;
      default:
        break;
    }
    immediates_ += item.immediates();
  }

  static at::Tensor hostTensor(const wire::ArgumentItem& item) {
    const auto dtype = parseDtype(item.head.dtype);
    const uint64_t size = item.value;
    if (item.head.dims != 1 || size > item.data.size() ||
        size * c10::elementSize(dtype) != item.data.size()) {
      throw ProtocolError("a CPU tensor's size does not fit its bytes");
    }
    at::Tensor tensor = at::empty({static_cast<int64_t>(size)}, dtype);
    if (size > 0) std::memcpy(tensor.mutable_data_ptr(), item.data.data(), item.data.size());
    return tensor;
  }

  void parseList(Argument& argument, uint32_t length, const c10::TypePtr& type, int depth) {
    if (depth > 1) throw ProtocolError("lists are nested too deeply");
    argument.element = unwrapOptional(type)->castRaw<c10::ListType>()->getElementType();
    const size_t count = reader_.count(length, wire::kListLengthMax, 1, "list");
    argument.items.reserve(count);
    bool all_constant = true;
    for (size_t i = 0; i < count; ++i) {
      argument.items.push_back(parse(argument.element, depth + 1));
      all_constant = all_constant && argument.items.back().is_constant;
    }
    if (all_constant) constant(argument, makeConstantList(argument));
  }

  Reader& reader_;
  c10::Device device_;
  size_t immediates_ = 0;
  std::vector<uint32_t> address_words_;
};

std::vector<Output> parseOutputs(Reader reader, size_t argument_count) {
  std::vector<Output> outputs;
  while (reader.remaining() > 0) {
    if (outputs.size() >= wire::kOutputsMax) throw ProtocolError("too many outputs");
    const wire::OutputItem item = wire::OutputItem::read(reader);
    Output output;
    output.kind = item.kind;
    switch (item.kind) {
      case wire::OutputKind::kFresh:
        output.shape = parseShape(item.dtype, 0, item.shape);
        break;
      case wire::OutputKind::kArgument:
      case wire::OutputKind::kList:
        output.number = item.number;
        if (item.kind == wire::OutputKind::kArgument && output.number >= argument_count) {
          throw ProtocolError("an output names an argument that does not exist");
        }
        break;
      case wire::OutputKind::kUndefined:
        break;
      default:
        throw ProtocolError("an output of kind " + std::to_string(static_cast<int>(item.kind)) +
                            " cannot be prepared");
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

}  // namespace

std::optional<std::string> refusal(const c10::OperatorName& name) {
  const auto end = name.name.find("::");
  const std::string space = name.name.substr(0, end);
  bool known = false;
  for (const char* allowed : kNamespaces) known = known || space == allowed;
  if (!known) {
    return "shoal devices do not run operators of namespace '" + space + "'. Run it on the CPU";
  }
  for (const char* refused : kRefused) {
    if (name.name == refused) return "it may not run on a shared device";
  }
  if (name.name.rfind("aten::_test", 0) == 0) return "it only tests torch itself";
  return std::nullopt;
}

PreparedCall parsePrepared(const wire::Prepare& message, c10::Device device) {
  const std::string_view name = message.name;
  Reader template_words(message.arguments.data(), message.arguments.size());
  const auto dot = name.find('.');
  const c10::OperatorName operator_name(
      std::string(name.substr(0, dot)),
      dot == std::string_view::npos ? "" : std::string(name.substr(dot + 1)));
  if (const auto reason = refusal(operator_name)) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "operator ", name, " is refused: ", *reason);
  }
  const auto op = c10::Dispatcher::singleton().findSchema(operator_name);
  TORCH_CHECK_NOT_IMPLEMENTED(op.has_value(), "operator ", name,
                              " is not known to the device's torch. Install the library that "
                              "defines it on the device's machine.");
  PreparedCall call{*op, std::string(name), {}, {}, {}, {}, 0, 0};
  TemplateParser parser(template_words, device);
  for (const auto& argument : op->schema().arguments()) {
    call.arguments.push_back(parser.parse(argument.real_type()));
    // Batch norm changes its running statistics, but some of its schemas do not say so.
    const bool statistics = argument.name().rfind("running_", 0) == 0;
    const auto* alias = argument.alias_info();
    call.written.push_back(statistics || (alias != nullptr && alias->isWrite()));
  }
  template_words.finish("template");
  call.immediate_words = parser.immediateWords();
  call.address_words = parser.addressWords();
  call.outputs =
      parseOutputs(Reader(message.outputs.data(), message.outputs.size()), call.arguments.size());
  for (const auto& output : call.outputs) {
    call.fresh_outputs += output.kind == wire::OutputKind::kFresh ? 1 : 0;
  }
  return call;
}

}  // namespace shoal::worker
