// Something that watches what one thread sends to the devices, such as a capture.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "client/member/call_cache.h"
#include "wire/address.h"
#include "wire/message.h"

namespace shoal::client {

class CallTemplate;
struct OperatorInfo;
// Held from the first word of a message to the last, so that messages stay whole; and over all
// messages that move one piece of memory, so that all streams agree on their order.
using Lock = std::unique_lock<std::mutex>;

class Observer {
 public:
  // The one that watches this thread; null: none.
  static Observer* current() { return pauses_ == 0 ? current_ : nullptr; }
  // What happens cannot be watched.
  static void giveUp(const char* why) {
    if (Observer* observer = current()) observer->fail(why);
  }
  // While one lives, nothing that this thread does is watched: it belongs to one device alone.
  struct Aside {
    Aside() { ++pauses_; }
    ~Aside() { --pauses_; }
    Aside(const Aside&) = delete;
  };

  virtual void fail(std::string why) = 0;
  // All but `posted` hold the session's lock. Any thread may call `released`; the others are called
  // by the thread that is watched.
  virtual void called(const OperatorInfo& info, const CallTemplate& call, uint64_t graph,
                      const std::vector<OutputMeta>& outputs, c10::ArrayRef<wire::Address> made,
                      const Lock&) = 0;
  virtual void minted(wire::Address address, uint64_t bytes, c10::DeviceIndex index) = 0;
  virtual void released(wire::Address address) noexcept = 0;
  virtual void uploaded(wire::Address base, uint64_t offset, const void* from, uint64_t bytes,
                        const Lock&) = 0;
  virtual void posted(wire::Kind kind) = 0;

 protected:
  ~Observer() = default;
  static inline thread_local Observer* current_ = nullptr;
  static inline thread_local int pauses_ = 0;
};

}  // namespace shoal::client
