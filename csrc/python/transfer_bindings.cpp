// Transfers that training asks for: sums across devices, lazy copies and loaded samples.
#include "client/member/events.h"
#include "client/space/devices.h"
#include "client/space/transfers.h"
#include "client/tensor/tensor.h"
#include "python/bindings.h"

namespace shoal {

void bindTransfers(py::module_& m) {
  using client::Devices;
  m.def("add_from", [](const at::Tensor& target, const at::Tensor& source) {
    const at::ScalarType type = target.scalar_type();
    const bool floats =
        type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
    if (!floats || source.scalar_type() != type || source.sizes() != target.sizes() ||
        !target.is_contiguous() || !source.is_contiguous() || target.numel() == 0 ||
        target.device().type() != at::kPrivateUse1 || source.device().type() != at::kPrivateUse1) {
      return false;
    }
    const py::gil_scoped_release released;
    client::Session& session = client::sessionOf(target);
    if (&client::sessionOf(source) != &session) return false;
    const auto to = client::baseOf(target), from = client::baseOf(source);
    return client::addAcross(session, to, client::addressOf(target) - to, from,
                             client::addressOf(source) - from, source.nbytes(), type);
  });
  m.def("copy_later", [](const at::Tensor& target, const at::Tensor& source) {
    const auto whole = [](const at::Tensor& t) {
      return t.device().type() == at::kPrivateUse1 && t.is_non_overlapping_and_dense() &&
             t.storage_offset() == 0 && t.storage().nbytes() == t.nbytes() && t.numel() > 0;
    };
    if (!whole(target) || !whole(source) || source.scalar_type() != target.scalar_type() ||
        source.sizes() != target.sizes() || source.strides() != target.strides() ||
        source.is_conj() != target.is_conj() || source.is_neg() != target.is_neg()) {
      return false;
    }
    const py::gil_scoped_release released;
    client::Session& session = client::sessionOf(target);
    if (&client::sessionOf(source) != &session) return false;
    if (!session.copyLater(client::baseOf(target), client::baseOf(source))) return false;
    target.unsafeGetTensorImpl()->bump_version();
    return true;
  });
  m.def("load", [](const at::Tensor& target, uint64_t reader, uint64_t from) {
    TORCH_CHECK(target.device().type() == at::kPrivateUse1 && target.device().index() > 0 &&
                    target.is_contiguous() && target.numel() > 0,
                "a reader's samples go to a dense tensor of one device");
    const auto member = static_cast<size_t>(target.device().index()) - 1;
    const py::gil_scoped_release released;
    const auto base = client::baseOf(target);
    return client::load(client::sessionOf(target), base, client::addressOf(target) - base,
                        target.nbytes(), member, reader, from);
  });
  m.def("is_past", [](int index, uint64_t sequence) {
    const py::gil_scoped_release released;
    TORCH_CHECK(Devices::get().attached(), "shoal: the lease has ended");
    const auto device = static_cast<c10::DeviceIndex>(index);
    client::Member& member = Devices::get().sessionWith(device).deviceMember(device);
    member.liveness().checkSometimes();  // the caller learns of a loss, also if nothing is missing
    return member.askDone(sequence);
  });
  m.def("elapsed_ms", [](uintptr_t start, uintptr_t end) {
    const py::gil_scoped_release released;
    const client::Elapsed elapsed = client::elapsedBetween(reinterpret_cast<const void*>(start),
                                                           reinterpret_cast<const void*>(end));
    return std::make_pair(elapsed.all_ms, elapsed.waited_ms);
  });
}

}  // namespace shoal
