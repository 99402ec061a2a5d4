// Random generators of the device. Their state lives at the worker; the client sends seeds in the
// stream, so that random operators need no reply.
#pragma once

#include <ATen/core/Generator.h>

#include "client/space/session.h"

namespace shoal::client {

const at::Generator& defaultGenerator(c10::DeviceIndex index);
// Seeds every device, also those of later leases.
void seedDefaultGenerators(uint64_t seed);
at::Generator newGenerator(c10::DeviceIndex index);
// The worker's number of a generator. Raises if it belongs to another device.
uint64_t generatorNumber(const at::Generator& generator, Session& session, c10::DeviceIndex index);
// A new session starts with the seeds that the program set before it.
void seedNewSession(Session& session);

}  // namespace shoal::client
