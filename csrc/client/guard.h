// Autograd starts one thread for each device that exists at the first backward, and never again. While
// this is alive the guard reports as many devices as a lease can ever have.
#pragma once

namespace shoal::client {

struct ReportAllDevices {
  ReportAllDevices();
  ~ReportAllDevices();
};

}  // namespace shoal::client
