// What one thread tells one device, written down so that it can be told to another device with
// other addresses: groups that train on alike parts of a batch need the program to run only once.
//
// A capture holds calls, not values. As soon as a value is read, or anything else happens that
// depends on what the device computes, the capture has failed, with the reason; who made it then
// runs the program for the other device too. Nothing was told to that device before, so there is
// nothing to undo.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "client/call/call_template.h"
#include "client/call/operator_info.h"
#include "client/member/observer.h"
#include "client/space/session.h"
#include "wire/address.h"

namespace shoal::client {

class Capture final : public Observer {
 public:
  // Begins to capture what this thread tells device `index`. Fails where somebody else captures.
  explicit Capture(c10::DeviceIndex index);
  ~Capture() { stop(); }
  Capture(const Capture&) = delete;

  // Ends it, in the thread that began it.
  void stop() noexcept;
  // A point between what was captured so far and what comes next.
  size_t mark() const;
  // Why it cannot be replayed; empty: it can. For the thread that captures.
  const std::string& failure() const { return failure_; }

  // Between the two, what this thread does is not captured: it belongs to this device alone.
  static void pause() { ++pauses_; }
  static void resume() { --pauses_; }

  void fail(std::string why) override;
  void called(const OperatorInfo& info, const CallTemplate& call, uint64_t graph,
              const std::vector<OutputMeta>& outputs, c10::ArrayRef<wire::Address> made,
              const Lock&) override;
  void minted(wire::Address address, uint64_t bytes, c10::DeviceIndex index) override;
  void released(wire::Address address) noexcept override;
  void uploaded(wire::Address base, uint64_t offset, const void* from, uint64_t bytes,
                const Lock&) override;
  // Any message at all: a message that is not one of the above makes it fail.
  void posted(wire::Kind kind) override;

 private:
  friend class Replay;
  using Symbol = uint32_t;  // stands for a segment; 0: none

  struct Operand {
    Symbol symbol;
    uint32_t position;  // of its address in the immediates
    uint64_t offset;    // in the segment
    bool writes;
  };
  struct Range {
    uint32_t start = 0, count = 0;
  };
  struct Call {
    const OperatorInfo* info;
    uint64_t hash;
    uint64_t line;  // of the program, for errors
    Range key, immediates, operands, outputs, made;
  };
  struct Mint {
    Symbol symbol;
    uint64_t bytes;
  };
  struct Free {
    Symbol symbol;
  };
  struct Upload {
    Symbol symbol;
    uint64_t offset;
    Range bytes;
  };
  using Event = std::variant<Call, Mint, Free, Upload>;
  struct Segment {
    wire::Address base;  // on the captured device
    bool outside;        // was there before
    bool kept = false;   // was made, and not freed since
  };

  Symbol symbolOf(wire::Address base);  // a new one, from outside, if there is none
  Symbol known(wire::Address base) const {
    const uint32_t slot = wire::slotOf(base);
    return slot < by_slot_.size() ? by_slot_[slot] : 0;
  }
  Symbol name(wire::Address base, bool outside);

  uint32_t session_number_;
  c10::DeviceIndex index_;
  bool capturing_ = false;
  std::string failure_;
  std::atomic<bool> failed_{false};  // for other threads
  std::vector<Event> events_;
  std::vector<Segment> segments_;  // by symbol
  std::vector<Symbol> by_slot_;
  std::vector<uint64_t> words_;  // keys and immediates
  std::vector<Operand> operands_;
  std::vector<OutputMeta> outputs_;
  std::vector<Symbol> made_;
  std::vector<std::byte> bytes_;  // that were uploaded
};

// One replay of a capture on another device of the same lease.
class Replay {
 public:
  // `theirs` take the place of `ours`, pair by pair; `wanted` are tensors that the capture made
  // and that tensor() will be asked for. They are all that is left of it: a tensor that the program
  // keeps besides would be missing at the other device. Raises std::invalid_argument, before
  // anything is told to the device, if the capture cannot be replayed so.
  Replay(std::shared_ptr<const Capture> capture, c10::DeviceIndex index,
         const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs,
         const std::vector<at::Tensor>& wanted);
  ~Replay();
  Replay(const Replay&) = delete;

  // Tells the device what was captured before `mark`, from where the last call of this ended.
  void until(size_t mark);
  // What became of a tensor that the capture made. It is the caller's from now on.
  at::Tensor tensor(const at::Tensor& original);

 private:
  using Symbol = Capture::Symbol;
  void pair(const at::Tensor& ours, const at::Tensor& theirs);
  void checkWanted(const std::vector<at::Tensor>& wanted) const;
  void replay(const Capture::Call& call, const Lock&);
  void replay(const Capture::Mint& mint, const Lock&);
  void replay(const Capture::Free& free, const Lock&);

  std::shared_ptr<const Capture> capture_;
  c10::DeviceIndex index_;
  Session* session_;
  Member* member_;
  size_t at_ = 0;
  std::vector<wire::Address> targets_;  // by symbol
  std::unordered_map<Symbol, c10::Storage> taken_;
  // Reused from call to call.
  std::vector<uint64_t> immediates_;
  std::vector<SegmentUse> uses_;
  std::vector<wire::Address> made_;
};

}  // namespace shoal::client
