// Amounts of memory for people.
#pragma once

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>

namespace shoal::memory {

// "160 MiB", "1.5 GiB".
inline std::string readable(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double amount = static_cast<double>(bytes);
  size_t unit = 0;
  for (; amount >= 1024 && unit + 1 < std::size(kUnits); ++unit) amount /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, amount < 999.5 ? "%.3g %s" : "%.0f %s", amount, kUnits[unit]);
  return text;
}

}  // namespace shoal::memory
