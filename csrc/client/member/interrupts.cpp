#include "client/member/interrupts.h"

namespace shoal::client {

SignalHooks& signalHooks() {
  static SignalHooks hooks;
  return hooks;
}

Wait::Wait() : seen_(signalHooks().interrupts != nullptr ? signalHooks().interrupts() : 0) {}

void Wait::look() {
  if (signalHooks().check != nullptr) signalHooks().check(seen_);
}

}  // namespace shoal::client
