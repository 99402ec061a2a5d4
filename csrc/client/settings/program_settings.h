// What the program has set in torch, as one worker knows it. Torch tells nobody that a setting
// changes, so every call looks. A look must cost nanoseconds; it compares bytes.
#pragma once

#include <ATen/Context.h>

#include <array>
#include <cstddef>

#include "wire/settings.h"

namespace shoal::client {

// Reads all settings of the calling thread's torch.
wire::Settings programSettings();

class ProgramSettings {
 public:
  // `of_cpu`: the worker's device is a CPU device, which only MKLDNN's precisions concern.
  explicit ProgramSettings(bool of_cpu) : of_cpu_(of_cpu) {}

  // Whether the settings are others than the worker knows. `precisions`: also those of float32 on
  // its kind of device; each costs 14 ns to read. The worker then gets told(), before its next
  // call.
  bool changed(bool precisions);
  const wire::Settings& told() const { return told_; }

 private:
  using Bytes = std::array<std::byte, sizeof(at::Context)>;
  using Precisions = decltype(wire::Settings::precisions);

  bool seenPrecisions() const;

  const bool of_cpu_;
  Bytes seen_{};  // of torch's object, when the settings were last read
  Precisions seen_precisions_{};
  c10::ScalarType seen_dtype_ = c10::ScalarType::Undefined;
  bool seen_flush_ = false;
  wire::Settings told_;
};

}  // namespace shoal::client
