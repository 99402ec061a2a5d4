// Copies: host to device, device to host, within a device and between devices; and the read of one
// element. A transfer request holds addresses; the bytes go straight between the two memories.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "client/call/operator_info.h"
#include "client/dispatch/dispatch.h"
#include "client/member/interrupts.h"
#include "client/space/devices.h"
#include "client/space/transfers.h"
#include "client/tensor/shape_inference.h"
#include "client/tensor/tensor.h"
#include "client/torch/kernels.h"

namespace shoal::client {
namespace {

bool onDevice(const at::Tensor& tensor) {
  return tensor.device().is_privateuseone();
}

// Whether the tensor's elements fill one range of memory, in some order.
bool isDense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense();
}

// A transfer whose wait was interrupted goes on, and may still use the program's memory.
void keepWhileBusy(const at::Tensor& host, Session& session) {
  struct Kept {
    at::Tensor tensor;
    uint32_t session;
    std::vector<uint64_t> until;  // by member
  };
  static std::mutex mutex;
  static auto* kept = new std::vector<Kept>;
  const auto over = [](const Kept& one) {
    Session* session = Devices::get().byNumber(one.session);
    for (size_t i = 0; session != nullptr && i < one.until.size(); ++i) {
      Member& member = session->member(i);
      if (member.usable() && !member.isDone(one.until[i])) return false;
    }
    return true;
  };
  Kept added{host, session.number(), {}};
  for (size_t i = 0; i < session.size(); ++i) {
    added.until.push_back(session.member(i).lastSequence());
  }
  const std::lock_guard lock(mutex);
  kept->erase(std::remove_if(kept->begin(), kept->end(), over), kept->end());
  kept->push_back(std::move(added));
}

void copyOnDevice(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  static const OperatorInfo info(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  torch::jit::Stack stack{self, source, non_blocking};
  dispatchCall(info, &stack);
}

void copyToDevice(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (from.scalar_type() != self.scalar_type() || !isDense(self)) {
    // Converted or scattered at the device: fewer bytes to send, or bytes in one piece.
    at::Tensor sent = at::empty(from.sizes(), self.options().dtype(from.scalar_type()));
    copyToDevice(sent, from.contiguous(), non_blocking);
    copyOnDevice(self, sent, non_blocking);
    return;
  }
  if (from.strides() != self.strides() || !isDense(from)) {
    at::Tensor same_layout = at::empty_strided(self.sizes(), self.strides(), from.options());
    from = same_layout.copy_(from);
    non_blocking = false;  // the temporary is ours: pageable, copied before this returns
  }
  const wire::Address base = baseOf(self);
  Session& session = sessionOf(self);
  try {
    upload(session, base, addressOf(self) - base, from.const_data_ptr(), from.nbytes(),
           non_blocking);
  } catch (const Interrupted&) {
    keepWhileBusy(from, session);
    throw;
  }
}

// Reads a dense tensor's bytes into those of `to`.
void readFrom(const at::Tensor& from, at::Tensor& to, bool non_blocking) {
  const wire::Address base = baseOf(from);
  Session& session = sessionOf(from);
  try {
    download(session, base, addressOf(from) - base, to.mutable_data_ptr(), from.nbytes(),
             non_blocking);
  } catch (const Interrupted&) {
    keepWhileBusy(to, session);
    throw;
  }
}

void copyFromDevice(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::Tensor from = source;
  if (from.scalar_type() != self.scalar_type()) from = from.to(self.scalar_type());
  if (from.sizes() == self.sizes() && isDense(self)) {
    if (from.strides() != self.strides() || !isDense(from)) {
      at::Tensor same_layout = at::empty_strided(self.sizes(), self.strides(), from.options());
      copyOnDevice(same_layout, from, false);
      from = same_layout;
      non_blocking = false;
    }
    readFrom(from, self, non_blocking);
    return;
  }
  from = from.contiguous();
  at::Tensor received = at::empty(from.sizes(), self.options());
  readFrom(from, received, false);
  self.copy_(received);
}

// Between two devices of a lease the bytes go from worker to worker; what has to be converted or
// spread out is so before (fewer bytes) or after it.
void copyBetweenDevices(at::Tensor& self, const at::Tensor& source) {
  if (&sessionOf(self) != &sessionOf(source)) {
    at::Tensor host = at::empty(source.sizes(), source.options().device(at::kCPU));
    copyFromDevice(host, source, false);
    return copyToDevice(self, host, false);
  }
  const bool smaller = self.itemsize() < source.itemsize();
  at::Tensor from = smaller ? source.to(self.scalar_type()) : source;
  if (from.sizes() != self.sizes() || self.scalar_type() != from.scalar_type() || !isDense(self)) {
    at::Tensor moved = at::empty(from.sizes(), from.options().device(self.device()));
    copyBetweenDevices(moved, from);
    return copyOnDevice(self, moved, false);
  }
  if (from.strides() != self.strides() || !isDense(from)) {
    at::Tensor same_layout = at::empty_strided(self.sizes(), self.strides(), from.options());
    copyOnDevice(same_layout, from, false);
    from = same_layout;
  }
  const wire::Address to_base = baseOf(self);
  const wire::Address from_base = baseOf(from);
  copyAcross(sessionOf(self), to_base, addressOf(self) - to_base, from_base,
             addressOf(from) - from_base, from.nbytes());
}

// The lazy conjugate and negative bits of either side become a real operation on the destination.
at::Tensor withoutBits(const at::Tensor& tensor) {
  at::Tensor plain = tensor.is_conj() ? tensor.conj() : tensor;
  return plain.is_neg() ? at::_neg_view(plain) : plain;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (ShapeInference::active() || self.is_same(source)) return self;
  const bool conjugate = self.is_conj() != source.is_conj();
  const bool negate = self.is_neg() != source.is_neg();
  at::Tensor to = withoutBits(self);
  const at::Tensor from = withoutBits(source);
  if (to.numel() == 0) {
    (void)from.expand(to.sizes());  // raises where the shapes do not fit
    return self;
  }
  if (onDevice(to) && onDevice(from)) {
    if (&sessionOf(to) == &sessionOf(from) && to.device() == from.device()) {
      copyOnDevice(to, from, non_blocking);
    } else {
      copyBetweenDevices(to, from);
    }
  } else if (onDevice(to)) {
    copyToDevice(to, from, non_blocking);
  } else {
    copyFromDevice(to, from, non_blocking);
  }
  if (conjugate && to.is_complex()) to.conj_physical_();
  if (negate) to.neg_();
  return self;
}

// Pairs that lie on one device are copied in one call; others one by one, as on any accelerator.
void foreachCopy(at::TensorList self, at::TensorList source, bool non_blocking) {
  TORCH_CHECK(!self.empty() && self.size() == source.size(),
              "_foreach_copy_: two lists of one length are needed, not ", self.size(), " and ",
              source.size(), " tensors");
  const auto beside = [&](const at::Tensor& t) { return t.device() == self[0].device(); };
  if (std::all_of(self.begin(), self.end(), beside) &&
      std::all_of(source.begin(), source.end(), beside)) {
    static const OperatorInfo info(
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::_foreach_copy_", ""));
    torch::jit::Stack stack{self.vec(), source.vec(), non_blocking};
    return dispatchCall(info, &stack);
  }
  for (size_t i = 0; i < self.size(); ++i) {
    at::Tensor to = self[i];
    to.copy_(source[i], non_blocking);
  }
}

at::Tensor copyFrom(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  at::Tensor to = destination;
  return copy_(to, self, non_blocking);
}

at::Tensor copyFromAndResize(const at::Tensor& self, const at::Tensor& destination) {
  at::Tensor to = destination;
  to.resize_(self.sizes());
  return copy_(to, self, false);
}

at::Scalar localScalar(const at::Tensor& self) {
  // Only the bytes of the one element travel.
  at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  readFrom(self, host, false);
  at::Scalar value = host.item();
  if (self.is_conj()) value = value.conj();
  return self.is_neg() ? -value : value;
}

}  // namespace

void registerCopies(torch::Library& m) {
  m.impl("copy_", copy_);
  m.impl("_foreach_copy_", foreachCopy);
  m.impl("_copy_from", copyFrom);
  m.impl("_copy_from_and_resize", copyFromAndResize);
  m.impl("_local_scalar_dense", localScalar);
}

}  // namespace shoal::client
