// What the parts of Calls ask about tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "worker/calls/prepared.h"

namespace shoal::worker {

inline Shape shapeOf(const at::Tensor& tensor) {
  Shape shape;
  if (!tensor.defined()) return shape;
  shape.dtype = tensor.scalar_type();
  shape.sizes = tensor.sizes().vec();
  shape.strides = tensor.strides().vec();
  return shape;
}

// Whether the storage can become a segment as it is: only this tensor holds it, and starts where it
// starts. It must hold all that the tensor spans: torch's "zero tensors" have no memory at all.
inline bool ownsStorage(const at::Tensor& tensor, size_t holders) {
  return tensor.has_storage() && tensor.storage().use_count() == holders &&
         tensor.storage_offset() == 0 && !tensor.is_conj() && !tensor.is_neg() &&
         (tensor.numel() == 0 || tensor.storage().data() != nullptr);
}

// The worker's loop runs below autograd. A recorded call needs autograd for one operator.
struct AboveAutograd {
  c10::impl::ForceDispatchKeyGuard keys{c10::default_included_set, c10::default_excluded_set};
  c10::AutoGradMode with_grad{true};
};

}  // namespace shoal::worker
