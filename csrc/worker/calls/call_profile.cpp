#include "worker/calls/call_profile.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace shoal::worker {
namespace {

constexpr uint64_t kBackward = 0x9e3779b97f4a7c15;

// Equal in every process, so that alike programs have alike hashes.
uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0xff51afd7ed558ccd;
  return hash ^ (hash >> 32);
}

uint64_t hashOf(const wire::Prepare& message) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : message.name) hash = mixed(hash, static_cast<unsigned char>(letter));
  for (const uint64_t word : message.arguments) hash = mixed(hash, word);
  return hash;
}

size_t immediateWords(const Argument& argument) {
  switch (argument.tag) {
    case wire::Tag::kHostScalar:
    case wire::Tag::kComplex:
      return 2;
    case wire::Tag::kTensor:
    case wire::Tag::kIntFree:
    case wire::Tag::kFloat:
    case wire::Tag::kGenerator:
      return 1;
    default:
      break;
  }
  size_t words = 0;
  for (const Argument& item : argument.items) words += immediateWords(item);
  return words;
}

// The index, among a call's immediates, of the first address that it writes to.
uint32_t writtenWord(const PreparedCall& call) {
  uint32_t word = 0;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const Argument& argument = call.arguments[i];
    const Argument* first = argument.items.empty() ? &argument : &argument.items.front();
    if (call.written[i] && first->tag == wire::Tag::kTensor) return word;
    word += static_cast<uint32_t>(immediateWords(argument));
  }
  return UINT32_MAX;
}

}  // namespace

CallProfile::CallProfile(transport::SessionBlock* block) : block_(block) {
  if (block_ != nullptr) add(0, "others", {}, false);
}

transport::CallUse* CallProfile::add(uint64_t hash, std::string_view name, const CallCosts& costs,
                                     bool updates) {
  const auto found = rows_.find(hash);
  if (found != rows_.end()) return &block_->uses[found->second];
  const uint32_t number = block_->rows.load(std::memory_order_relaxed);
  if (number >= transport::SessionBlock::kRows) return &block_->uses[0];
  transport::CallUse& use = block_->uses[number];
  std::memcpy(use.name, name.data(), std::min(name.size(), sizeof use.name - 1));
  use.hash = hash;
  use.flops = costs.flops;
  use.bytes = costs.bytes;
  use.dtype = static_cast<uint32_t>(costs.dtype);
  use.updates = updates ? 1 : 0;
  rows_.emplace(hash, number);
  block_->rows.store(number + 1, std::memory_order_release);
  return &use;
}

CallRow CallProfile::row(const wire::Prepare& message, const PreparedCall& call) {
  if (block_ == nullptr) return {};
  const uint32_t word = writtenWord(call);
  return {add(hashOf(message), message.name, costsOf(call), word != UINT32_MAX), word, 0};
}

CallRow CallProfile::backwardRow(const CallRow& forward) {
  if (forward.use == nullptr) return {};
  const transport::CallUse& use = *forward.use;
  const CallCosts costs =
      backwardCosts({use.flops, use.bytes, static_cast<c10::ScalarType>(use.dtype)});
  return {add(mixed(use.hash, kBackward), std::string(use.name) + "_backward", costs, false)};
}

}  // namespace shoal::worker
