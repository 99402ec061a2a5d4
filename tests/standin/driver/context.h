// What every call of the driver starts with, and the contexts of this process.
#pragma once

#include <sstream>
#include <string>

#include "cuda_types.h"
#include "engine.h"

#define STANDIN_API extern "C" __attribute__((visibility("default")))

namespace standin {

enum class Needs { kNothing, kInit, kContext };

// Counts the call and writes it to the log. Returns why it must fail, if it must.
CUresult enter(const char* name, Needs needs, const std::string& arguments);
bool logging();

template <typename... Arguments>
CUresult enter(const char* name, Needs needs, const Arguments&... arguments) {
  if (!logging()) return enter(name, needs, std::string());
  std::ostringstream text;
  ((text << ' ' << arguments), ...);
  return enter(name, needs, text.str());
}

CUresult init();
CUresult retain(int device);
CUresult release(int device);
bool hasContext(int device);
int currentDevice();  // -1: the thread has no context
void setCurrentDevice(int device);
// The stream that a handle means; null: none does.
Stream* streamOf(void* handle);

}  // namespace standin

#define STANDIN_ENTER(needs, ...)                                                             \
  if (const CUresult failed = standin::enter(__func__, standin::Needs::needs, ##__VA_ARGS__); \
      failed != CUDA_SUCCESS)                                                                 \
  return failed
