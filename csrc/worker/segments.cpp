#include "worker/segments.h"

#include <algorithm>
#include <cstdio>

#include "wire/reader.h"

namespace shoal::worker {
namespace {

std::string hex(wire::Address address) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

}  // namespace

Segment& Segments::at(wire::Address address, uint64_t bytes) {
  const uint32_t slot = wire::slotOf(address);
  const uint64_t count = wire::slotsFor(bytes);
  if (wire::sessionOf(address) != session_ || slot == 0 || address % wire::kSlotBytes != 0 ||
      count > wire::kSlotsMax - slot) {
    throw wire::ProtocolError("address " + hex(address) + " cannot start a segment of " +
                              std::to_string(bytes) + " bytes in this session");
  }
  if (slots_.size() < slot + count)
    slots_.resize(std::max<size_t>(slot + count, slots_.size() * 2));
  auto& segment = slots_[slot].segment;
  if (segment == nullptr) segment = std::make_unique<Segment>();
  if (!segment->bound && segment->poison == nullptr) ++count_;
  for (uint32_t i = 1; i < count; ++i) slots_[slot + i].back = i;
  return *segment;
}

void Segments::bind(wire::Address address, c10::Storage storage, uint64_t bytes) {
  Segment& segment = at(address, bytes);
  bound_bytes_ += bytes - (segment.bound ? segment.bytes : 0);
  segment.storage = std::move(storage);
  segment.bytes = bytes;
  segment.bound = true;
  segment.poison = nullptr;
}

void Segments::poison(wire::Address address, std::shared_ptr<const Failure> failure) {
  Segment& segment = at(address, 0);
  if (segment.bound) bound_bytes_ -= segment.bytes;
  segment.storage = c10::Storage();
  segment.bytes = 0;
  segment.bound = false;
  segment.poison = std::move(failure);
}

void Segments::release(wire::Address address) {
  const uint32_t slot = wire::slotOf(address);
  if (wire::sessionOf(address) != session_ || slot >= slots_.size() ||
      address % wire::kSlotBytes != 0 || slots_[slot].segment == nullptr) {
    throw wire::ProtocolError("address " + hex(address) +
                              " cannot be freed: no segment starts there");
  }
  Segment& segment = *slots_[slot].segment;
  if (segment.bound) bound_bytes_ -= segment.bytes;
  if (segment.bound || segment.poison != nullptr) --count_;
  for (uint64_t i = 1; i < wire::slotsFor(segment.bytes); ++i) slots_[slot + i].back = 0;
  segment = Segment();
}

Place Segments::resolve(wire::Address address, uint64_t bytes) {
  uint32_t slot = wire::slotOf(address);
  if (wire::sessionOf(address) == session_ && slot < slots_.size()) {
    const uint32_t start = slot - slots_[slot].back;
    Segment* segment = slots_[start].segment.get();
    if (segment != nullptr && segment->poison != nullptr) return {segment, 0};
    if (segment != nullptr && segment->bound) {
      const uint64_t offset = address - wire::makeAddress(session_, start);
      if (offset <= segment->bytes && bytes <= segment->bytes - offset) return {segment, offset};
      throw wire::ProtocolError("[" + hex(address) + ", +" + std::to_string(bytes) +
                                ") runs past the end of its segment of " +
                                std::to_string(segment->bytes) + " bytes");
    }
  }
  throw wire::ProtocolError("address " + hex(address) + " is not bound to memory in this session");
}

}  // namespace shoal::worker
