#include "worker/memory/shown_copies.h"

#include <c10/util/Exception.h>

#include "base/byte_units.h"

namespace shoal::worker {
namespace {

struct Block {
  memory::BlockAllocator* blocks;
  size_t offset;
};

}  // namespace

ShownCopies::ShownCopies(uint64_t limit_bytes)
    : region_(memory::SharedMemory::create("shoal-shown", limit_bytes + kBytesMax)),
      blocks_(region_.bytes()) {}

c10::Storage ShownCopies::allocate(uint64_t bytes) {
  const auto offset = blocks_.allocate(bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, offset.has_value(),
                   "host memory for values that other devices read is used up: ",
                   memory::readable(blocks_.usedBytes()), " are in use, ", memory::readable(bytes),
                   " are needed");
  c10::DataPtr data(region_.data() + *offset, new Block{&blocks_, *offset}, &release,
                    c10::Device(c10::DeviceType::CPU));
  return {c10::Storage::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr,
          /*resizable=*/false};
}

void ShownCopies::release(void* context) {
  const auto* block = static_cast<Block*>(context);
  block->blocks->release(block->offset);
  delete block;
}

}  // namespace shoal::worker
