#include "network/tls/libssl.h"

#include <dlfcn.h>

#include <string>

#include "network/tls/tls.h"

namespace shoal::network {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
  void* found = dlsym(library, name);
  if (found == nullptr) {
    throw ConnectionLost(std::string("libssl.so.3 has no function ") + name +
                         ": OpenSSL 3 is needed for devices on other machines");
  }
  function = reinterpret_cast<Function>(found);
}

void* open() {
  void* library = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw ConnectionLost(
        "libssl.so.3 was not found: OpenSSL 3 is needed for devices on other machines");
  }
  return library;
}

LibSsl load() {
  void* library = open();
  LibSsl s{};
#define FIND(result, name, parameters) find(library, #name, s.name);
  SHOAL_LIBSSL(FIND)
#undef FIND
  return s;
}

}  // namespace

const LibSsl& LibSsl::get() {
  static const LibSsl library = load();  // after an exception the next call tries again
  return library;
}

}  // namespace shoal::network
