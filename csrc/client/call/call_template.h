// Writes a call's template (the cache key: what decides the outputs) and its immediates (addresses
// and numbers that do not) from the arguments on torch's stack.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "client/call/operator_info.h"
#include "client/space/session.h"
#include "wire/address.h"

namespace shoal::client {

class CallTemplate {
 public:
  // Fills this from a call. Afterwards either needsUpload() is true (a CPU tensor must be moved to
  // the device first), or everything is set.
  void build(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments, bool record = false);

  const std::vector<uint64_t>& key() const { return key_; }
  const std::vector<uint64_t>& immediates() const { return immediates_; }
  const std::vector<SegmentUse>& uses() const { return uses_; }
  // Where in immediates() the address of each of uses() stands.
  const std::vector<uint32_t>& addressPositions() const { return address_positions_; }
  Session& session() const { return *session_; }
  c10::Device device() const { return {c10::DeviceType::PrivateUse1, index_}; }
  // The generator that it draws from: the caller's own, or the device's default one.
  uint64_t generator() const { return generator_; }
  bool hasGenerator() const { return has_generator_; }
  bool needsUpload() const { return needs_upload_; }
  uint64_t hash(const OperatorInfo& info) const {
    return CallCache::hash(&info, key_.data(), key_.size());
  }

 private:
  void chooseDevice(c10::ArrayRef<c10::IValue> arguments);
  void add(const c10::IValue& value, bool number);
  void addTensor(const at::Tensor& tensor);
  void addHostTensor(const at::Tensor& tensor);
  void raiseOtherDevice(const at::Tensor& tensor) const;
  void addNumber(wire::Tag tag, uint64_t value, bool keyed);
  void addList(const c10::IValue& value, bool number);
  void addString(const std::string& text);

  std::vector<uint64_t> key_;
  std::vector<uint64_t> immediates_;
  std::vector<SegmentUse> uses_;
  std::vector<uint32_t> address_positions_;
  Session* session_ = nullptr;
  c10::DeviceIndex index_ = 0;
  uint64_t generator_ = 0;
  bool has_generator_ = false;
  bool writes_ = false;  // the argument that is being added is changed by the operator
  const OperatorInfo* info_ = nullptr;
  bool needs_upload_ = false;
  bool record_ = false;
};

}  // namespace shoal::client
