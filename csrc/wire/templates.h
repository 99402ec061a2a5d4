// The words of a prepared call: its arguments (the template) and its outputs. The template is also
// the key of the client's call cache, so it holds everything that decides the outputs' metadata and
// nothing else. What is left out travels with each call as an immediate.
//
// An item is a head word and what follows it:
//
//   tag or kind (8) | dtype (8) | dims (8) | flags (8) | count (32)
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "wire/cursor.h"
#include "wire/limits.h"

namespace shoal::wire {

// What an argument is.
enum class Tag : uint8_t {
  kNone = 0,
  kUndefined = 1,    // an undefined tensor
  kTensor = 2,       // dtype, dims, flags; sizes, strides           immediate: address
  kHostScalar = 3,   // dtype, flags                                 immediate: 2 words of value
  kInt = 4,          // value
  kIntFree = 5,      //                                              immediate: value
  kFloat = 6,        //                                              immediate: value
  kFloatKeyed = 7,   // value
  kComplex = 8,      //                                              immediate: real, imaginary
  kBool = 9,         // dtype: the value
  kString = 10,      // count: bytes; text
  kList = 11,        // count: items; the items
  kDevice = 12,      // the session's own device
  kGenerator = 13,   //                                              immediate: generator
  kHostTensor = 14,  // dtype, dims, count: bytes; size, data: a small CPU tensor that stays one
  kLast = kHostTensor,
};

// What an output of a call is.
enum class OutputKind : uint8_t {
  kFresh = 0,      // dtype, dims; sizes, strides: a new dense storage from offset 0
  kUndefined = 1,  //
  kArgument = 2,   // count: the index of the argument that the operator changes and returns
  kScalar = 3,     // an IValue that is not a tensor: an argument item with its value
  kList = 4,       // count: the outputs that follow form a list
  kResized = 5,    // as kFresh and kArgument: an `out=` argument that the operator resized
};

// Flags of kTensor and kHostScalar.
inline constexpr uint8_t kTensorConj = 1;
inline constexpr uint8_t kTensorNeg = 2;
inline constexpr uint8_t kTensorWrapped = 4;  // a Python number that torch wraps in a tensor
inline constexpr uint8_t kTensorRequiresGrad = 8;

struct ItemHead {
  uint8_t tag = 0, dtype = 0, dims = 0, flags = 0;
  uint32_t count = 0;

  static constexpr ItemHead of(uint64_t word) {
    return {static_cast<uint8_t>(word), static_cast<uint8_t>(word >> 8),
            static_cast<uint8_t>(word >> 16), static_cast<uint8_t>(word >> 24),
            static_cast<uint32_t>(word >> 32)};
  }
  constexpr uint64_t word() const {
    return uint64_t{tag} | (uint64_t{dtype} << 8) | (uint64_t{dims} << 16) |
           (uint64_t{flags} << 24) | (uint64_t{count} << 32);
  }
};

inline constexpr uint64_t tagWord(Tag tag, uint8_t dtype = 0, uint8_t dims = 0, uint8_t flags = 0,
                                  uint32_t count = 0) {
  return ItemHead{static_cast<uint8_t>(tag), dtype, dims, flags, count}.word();
}

using Sizes = std::span<const int64_t>;

// --- writing. `to` is any vector of words.

void appendBytes(auto& to, const void* data, size_t bytes) {
  const size_t start = to.size();
  to.resize(start + (bytes + 7) / 8, 0);
  if (bytes > 0) std::memcpy(to.data() + start, data, bytes);
}

void appendTag(auto& to, Tag tag) {
  to.push_back(tagWord(tag));
}
// kInt, kFloatKeyed
void appendValue(auto& to, Tag tag, uint64_t value) {
  to.push_back(tagWord(tag));
  to.push_back(value);
}
void appendBool(auto& to, bool value) {
  to.push_back(tagWord(Tag::kBool, value ? 1 : 0));
}
void appendShape(auto& to, ItemHead head, const auto& sizes, const auto& strides) {
  head.dims = static_cast<uint8_t>(sizes.size());
  to.push_back(head.word());
  to.insert(to.end(), sizes.begin(), sizes.end());
  to.insert(to.end(), strides.begin(), strides.end());
}
void appendTensor(auto& to, uint8_t dtype, uint8_t flags, const auto& sizes, const auto& strides) {
  appendShape(to, {static_cast<uint8_t>(Tag::kTensor), dtype, 0, flags, 0}, sizes, strides);
}
void appendHostScalar(auto& to, uint8_t dtype, uint8_t flags) {
  to.push_back(tagWord(Tag::kHostScalar, dtype, 0, flags));
}
void appendHostTensor(auto& to, uint8_t dtype, int64_t size, const void* data, size_t bytes) {
  to.push_back(tagWord(Tag::kHostTensor, dtype, 1, 0, static_cast<uint32_t>(bytes)));
  to.push_back(static_cast<uint64_t>(size));
  appendBytes(to, data, bytes);
}
void appendString(auto& to, std::string_view text) {
  to.push_back(tagWord(Tag::kString, 0, 0, 0, static_cast<uint32_t>(text.size())));
  appendBytes(to, text.data(), text.size());
}
// `count` items follow.
void appendList(auto& to, size_t count) {
  to.push_back(tagWord(Tag::kList, 0, 0, 0, static_cast<uint32_t>(count)));
}
// `number`: which argument (kArgument, kResized), or how many outputs follow (kList). kScalar: an
// argument item follows.
void appendOutput(auto& to, OutputKind kind, uint32_t number = 0) {
  to.push_back(ItemHead{static_cast<uint8_t>(kind), 0, 0, 0, number}.word());
}
void appendOutput(auto& to, OutputKind kind, uint32_t number, uint8_t dtype, const auto& sizes,
                  const auto& strides) {
  appendShape(to, {static_cast<uint8_t>(kind), dtype, 0, 0, number}, sizes, strides);
}

// --- reading

struct ShapeView {
  Sizes sizes, strides;

  static ShapeView read(size_t dims, Reader& reader) {
    if (dims > kDimensionsMax) throw ProtocolError("a tensor has too many dimensions");
    const auto* words = reinterpret_cast<const int64_t*>(reader.words(2 * dims, "shape"));
    return {{words, dims}, {words + dims, dims}};
  }
};

// One argument of a template. Only the fields of its tag are set.
struct ArgumentItem {
  Tag tag = Tag::kNone;
  ItemHead head;
  uint64_t value = 0;     // kInt, kFloatKeyed; kHostTensor: its size
  ShapeView shape;        // kTensor
  std::string_view data;  // kString, kHostTensor

  // The items of a list follow it and are read one by one.
  static ArgumentItem read(Reader& reader) {
    ArgumentItem item;
    item.head = ItemHead::of(reader.word("argument"));
    if (item.head.tag > static_cast<uint8_t>(Tag::kLast)) {
      throw ProtocolError("tag " + std::to_string(item.head.tag) + " does not exist");
    }
    item.tag = static_cast<Tag>(item.head.tag);
    if (item.tag == Tag::kInt || item.tag == Tag::kFloatKeyed || item.tag == Tag::kHostTensor) {
      item.value = reader.word("value");
    }
    if (item.tag == Tag::kTensor) item.shape = ShapeView::read(item.head.dims, reader);
    if (item.tag == Tag::kString) {
      item.data = reader.bytes(item.head.count, kStringBytesMax, "string argument");
    }
    if (item.tag == Tag::kHostTensor) {
      item.data = reader.bytes(item.head.count, kHostTensorBytesMax, "CPU tensor");
    }
    return item;
  }
  bool boolean() const { return head.dtype != 0; }
  double number() const { return asDouble(value); }
  // Words of a call's immediates that belong to it.
  size_t immediates() const {
    switch (tag) {
      case Tag::kHostScalar:
      case Tag::kComplex:
        return 2;
      case Tag::kTensor:
      case Tag::kIntFree:
      case Tag::kFloat:
      case Tag::kGenerator:
        return 1;
      default:
        return 0;
    }
  }
};

// One output. An argument item follows kScalar.
struct OutputItem {
  OutputKind kind = OutputKind::kFresh;
  uint8_t dtype = 0;
  uint32_t number = 0;
  ShapeView shape;  // kFresh, kResized

  static OutputItem read(Reader& reader) {
    const ItemHead head = ItemHead::of(reader.word("output"));
    if (head.tag > static_cast<uint8_t>(OutputKind::kResized)) {
      throw ProtocolError("an output of kind " + std::to_string(head.tag) + " does not exist");
    }
    OutputItem item{static_cast<OutputKind>(head.tag), head.dtype, head.count, {}};
    if (item.kind == OutputKind::kFresh || item.kind == OutputKind::kResized) {
      item.shape = ShapeView::read(head.dims, reader);
    }
    return item;
  }
};

}  // namespace shoal::wire
