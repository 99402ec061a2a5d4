// Writes a call's template (the cache key: what decides the outputs) and its immediates (addresses
// and numbers that do not) from the arguments on torch's stack.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "client/operator_info.h"
#include "client/stream.h"
#include "wire/address.h"

namespace shoal::client {

class CallTemplate {
 public:
  // Fills this from a call. Afterwards either needsUpload() is true (a CPU tensor must be moved to
  // the device first), or everything is set.
  void build(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments, bool record = false);

  const std::vector<uint64_t>& key() const { return key_; }
  const std::vector<uint64_t>& immediates() const { return immediates_; }
  const std::vector<wire::Address>& bases() const { return bases_; }  // segments that are used
  Stream& stream() const { return *stream_; }
  bool needsUpload() const { return needs_upload_; }
  uint64_t hash(const OperatorInfo& info) const {
    return CallCache::hash(&info, key_.data(), key_.size());
  }

 private:
  void chooseStream(c10::ArrayRef<c10::IValue> arguments);
  void add(const c10::IValue& value, bool number);
  void addTensor(const at::Tensor& tensor);
  void addHostTensor(const at::Tensor& tensor);
  void raiseOtherDevice(const at::Tensor& tensor) const;
  void addSmallHostTensor(const at::Tensor& tensor);
  void addList(const c10::IValue& value, bool number);
  void addString(const std::string& text);

  std::vector<uint64_t> key_;
  std::vector<uint64_t> immediates_;
  std::vector<wire::Address> bases_;
  Stream* stream_ = nullptr;
  const OperatorInfo* info_ = nullptr;
  bool needs_upload_ = false;
  bool record_ = false;
};

}  // namespace shoal::client
