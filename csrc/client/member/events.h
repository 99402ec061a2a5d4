// Times between two torch events of a shoal device.
#pragma once

namespace shoal::client {

struct Elapsed {
  double all_ms;
  double waited_ms;  // of that, the time in which the device waited for others of its lease
};

// Takes what `torch.Event.event_id` gives. Waits for the later event. For a device of several
// members the times are those of the member that took longest.
Elapsed elapsedBetween(const void* start, const void* end);

}  // namespace shoal::client
