// The call cache: from a call's template to its prepared number and its outputs' metadata. It is
// what makes the device fast: a hit costs no shape inference and no message but the call itself.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "wire/limits.h"
#include "wire/templates.h"

namespace shoal::client {

struct OutputMeta {
  wire::OutputKind kind = wire::OutputKind::kFresh;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  uint32_t number = 0;  // kArgument, kResized: which argument; kList: how many follow
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  uint64_t bytes = 0;  // of the storage behind it
};

struct CachedCall {
  uint32_t id = 0;
  bool known = false;  // the outputs are known; otherwise every call asks the worker for them
  std::vector<OutputMeta> outputs;
};

class CallCache {
 public:
  CallCache() { clear(); }

  static uint64_t hash(const void* op, const uint64_t* words, size_t count) {
    uint64_t h = reinterpret_cast<uintptr_t>(op) * 0x9E3779B97F4A7C15ull;
    for (size_t i = 0; i < count; ++i) {
      h = (h ^ words[i]) * 0xD6E8FEB86659FD93ull;
      h ^= h >> 32;
    }
    return h;
  }

  CachedCall* find(uint64_t hash, const void* op, const uint64_t* words, size_t count) {
    for (size_t at = hash & mask_;; at = (at + 1) & mask_) {
      Slot& slot = slots_[at];
      if (slot.entry == nullptr) return nullptr;
      if (slot.hash == hash && slot.op == op && slot.entry->key.size() == count &&
          std::equal(words, words + count, slot.entry->key.begin())) {
        return &slot.entry->call;
      }
    }
  }

  // The cache must not be full.
  CachedCall* insert(uint64_t hash, const void* op, const uint64_t* words, size_t count) {
    size_t at = hash & mask_;
    while (slots_[at].entry != nullptr) at = (at + 1) & mask_;
    slots_[at] = {hash, op, std::make_unique<Entry>()};
    slots_[at].entry->key.assign(words, words + count);
    slots_[at].entry->call.id = size_++;
    words_ += count;
    return &slots_[at].entry->call;
  }

  // Also full before the worker's bound on all templates together is reached (outputs need room
  // too).
  bool full() const { return size_ >= wire::kPreparedMax || words_ > wire::kPreparedWordsMax / 2; }
  uint32_t size() const { return size_; }
  void clear() {
    slots_.clear();
    slots_.resize(wire::kPreparedMax * 2);
    mask_ = slots_.size() - 1;
    size_ = 0;
    words_ = 0;
  }

 private:
  struct Entry {
    std::vector<uint64_t> key;
    CachedCall call;
  };
  struct Slot {
    uint64_t hash = 0;
    const void* op = nullptr;
    std::unique_ptr<Entry> entry;
  };
  std::vector<Slot> slots_;
  size_t mask_ = 0;
  uint32_t size_ = 0;
  size_t words_ = 0;  // of all keys
};

}  // namespace shoal::client
