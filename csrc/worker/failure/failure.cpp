#include "worker/failure/failure.h"

#include <c10/util/Exception.h>

#include "wire/cursor.h"

namespace shoal::worker {
namespace {

using wire::ErrorKind;

ErrorKind kindOf(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error)) return ErrorKind::kOutOfMemory;
  if (dynamic_cast<const c10::IndexError*>(&error)) return ErrorKind::kIndex;
  if (dynamic_cast<const c10::ValueError*>(&error)) return ErrorKind::kValue;
  if (dynamic_cast<const c10::TypeError*>(&error)) return ErrorKind::kType;
  if (dynamic_cast<const c10::NotImplementedError*>(&error)) return ErrorKind::kNotImplemented;
  if (dynamic_cast<const c10::LinAlgError*>(&error)) return ErrorKind::kLinAlg;
  return ErrorKind::kRuntime;
}

// torch lists every backend that has the operator: two screens that do not help a Shoal user.
std::string withoutDispatchTable(std::string text) {
  const auto end = text.find(" This could be because");
  if (text.rfind("Could not run '", 0) == 0 && end != std::string::npos) {
    text.resize(end);
    text += " The device's torch has no kernel for it.";
  }
  return text;
}

}  // namespace

std::shared_ptr<const Failure> describe(std::exception_ptr error, uint64_t sequence,
                                        const std::string& operator_name) {
  Failure failure{ErrorKind::kRuntime, sequence, operator_name, "unknown error"};
  try {
    std::rethrow_exception(std::move(error));
  } catch (const wire::ProtocolError& e) {
    failure.kind = ErrorKind::kProtocol;
    failure.text = e.what();
  } catch (const PoisonedError& e) {
    return e.cause();
  } catch (const c10::Error& e) {
    failure.kind = kindOf(e);
    failure.text = withoutDispatchTable(e.what_without_backtrace());
  } catch (const PeerFailed& e) {
    failure.kind = ErrorKind::kPeerFailed;
    failure.text = e.what();
  } catch (const PeerGone& e) {
    failure.kind = ErrorKind::kPeerLost;
    failure.operator_name = e.device;
    failure.text = e.what();
  } catch (const ShareError& e) {
    failure.kind = e.revoked ? ErrorKind::kShareRevoked : ErrorKind::kShareRefused;
    failure.text = e.what();
  } catch (const std::bad_alloc&) {
    failure.kind = ErrorKind::kOutOfMemory;
    failure.text = "the worker ran out of host memory";
  } catch (const std::exception& e) {
    failure.text = e.what();
  } catch (...) {
  }
  return std::make_shared<const Failure>(std::move(failure));
}

}  // namespace shoal::worker
