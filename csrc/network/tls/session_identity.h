// A key and a certificate for one session, made by the process that serves it.
#pragma once

#include "network/tls/tls.h"

namespace shoal::network {

// What the certificate's owner answers to, as a server.
inline constexpr const char* kSessionServerName = "worker.shoal";

// Makes a new key and a certificate that it signs itself, with kSessionServerName. No authority
// stands behind it: who connects has got the certificate itself over a connection that it trusts.
// `authority` of the result is empty. Throws ConnectionLost if OpenSSL cannot do it.
Identity makeSessionIdentity();

}  // namespace shoal::network
