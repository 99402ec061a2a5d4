// A coverage-guided fuzzer of everything that a client's bytes reach before an operator runs: the
// codec, the templates, the page table, the executor's front.
//
//   executor_fuzz CORPUS_DIR SECONDS [SEED]
//
// An input is a whole stream: messages as they lie in a ring. It starts from streams that are
// valid, keeps mutants that reach new code, and ends with the sanitizers' report if one breaks
// anything. Operators themselves are replaced by one that returns empty results: torch's kernels
// are not the target, and a fault in one ends a worker and nothing else.
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <fcntl.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "memory/shared_memory.h"
#include "transport/ring.h"
#include "wire/address.h"
#include "wire/limits.h"
#include "wire/messages.h"
#include "wire/templates.h"
#include "worker/execute/executor.h"
#include "worker/memory/arena.h"
#include "worker/shared/reader_memory.h"

namespace {

constexpr size_t kEdges = 1 << 16;
uint8_t g_seen[kEdges];
size_t g_edges = 0;
bool g_new = false;

}  // namespace

// Called by the compiler's instrumentation at every basic block of our own code.
extern "C" __attribute__((no_sanitize("all"))) void __sanitizer_cov_trace_pc() {
  static thread_local uintptr_t last = 0;
  const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  const size_t edge = (here ^ (last >> 1)) % kEdges;
  last = here;
  if (g_seen[edge] == 0) {
    g_seen[edge] = 1;
    ++g_edges;
    g_new = true;
  }
}

namespace {

using namespace shoal;
using Words = std::vector<uint64_t>;
using Stream = std::vector<Words>;

constexpr uint32_t kSession = 5;

// Stands in for every operator: empty results of the right kind.
void pretend(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  torch::jit::Stack results;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !stack.empty()) {
      results.push_back(stack[0]);
    } else if (result.type()->kind() == c10::TypeKind::TensorType) {
      results.emplace_back(at::empty({2, 2}));
    } else if (result.type()->kind() == c10::TypeKind::ListType) {
      results.emplace_back(c10::List<at::Tensor>({at::empty({2, 2}), at::empty({0})}));
    } else {
      results.emplace_back(int64_t{1});
    }
  }
  stack = std::move(results);
}

class Sink final : public worker::ReplySink {
 public:
  void send(wire::Kind, wire::ErrorKind, uint64_t, const std::vector<uint64_t>& payload) override {
    for (const uint64_t word : payload) check_ += word;  // every word of a reply is readable
  }
  void sendBytes(wire::Kind, uint64_t, std::span<const std::byte> bytes) override {
    for (const std::byte byte : bytes) check_ += static_cast<uint64_t>(byte);
  }

 private:
  uint64_t check_ = 0;
};

Words message(wire::Kind kind, Words body, uint16_t flags = 0) {
  body.insert(body.begin(),
              wire::headerWord(kind, static_cast<uint32_t>((body.size() + 1) * 8), flags));
  return body;
}

Words prepare(uint32_t id, const std::string& name, const Words& arguments, const Words& outputs) {
  Words body{
      wire::pair(id, static_cast<uint32_t>(name.size())),
      wire::pair(static_cast<uint32_t>(arguments.size()), static_cast<uint32_t>(outputs.size()))};
  const size_t at = body.size();
  body.resize(at + (name.size() + 7) / 8);
  std::memcpy(body.data() + at, name.data(), name.size());
  body.insert(body.end(), arguments.begin(), arguments.end());
  body.insert(body.end(), outputs.begin(), outputs.end());
  return message(wire::Kind::kPrepare, body);
}

// Valid streams to start from: one for each part of the protocol.
std::vector<Stream> seeds() {
  using wire::Kind;
  using wire::Tag;
  using wire::tagWord;
  const auto address = [](uint32_t slot) { return wire::makeAddress(kSession, slot); };
  const Words matrix{tagWord(Tag::kTensor, 6, 2), 2, 2, 2, 1};
  const Words fresh{tagWord(static_cast<Tag>(wire::OutputKind::kFresh), 6, 2), 2, 2, 2, 1};
  Words add = matrix;
  add.insert(add.end(), matrix.begin(), matrix.end());
  add.push_back(tagWord(Tag::kIntFree));
  Words cat{tagWord(Tag::kList, 0, 0, 0, 2)};
  cat.insert(cat.end(), matrix.begin(), matrix.end());
  cat.insert(cat.end(), matrix.begin(), matrix.end());
  cat.insert(cat.end(), {tagWord(Tag::kInt), 0});
  Words clamp = matrix;
  clamp.insert(clamp.end(), {tagWord(Tag::kFloat), tagWord(Tag::kNone)});
  const Words zeros{tagWord(Tag::kList, 0, 0, 0, 1),
                    tagWord(Tag::kInt),
                    7,
                    tagWord(Tag::kInt),
                    6,
                    tagWord(Tag::kNone),
                    tagWord(Tag::kDevice),
                    tagWord(Tag::kBool, 0)};
  Words scalar = matrix;
  scalar.push_back(tagWord(Tag::kHostScalar, 6, 0, wire::kTensorWrapped));
  const Words settings = wire::body(wire::Settings{});
  const Words a = message(Kind::kAllocate, {address(1), 64});
  const Words b = message(Kind::kAllocate, {address(2), 64});
  return {
      {a, b, prepare(1, "aten::add.Tensor", add, fresh),
       message(Kind::kCall, {wire::pair(1, 1), address(1), address(2), 1, address(3)}),
       message(Kind::kRead, {address(3), 16}), message(Kind::kFree, {address(3)})},
      {a, b, prepare(2, "aten::cat", cat, {}),
       message(Kind::kCall, {wire::pair(2, 0), address(1), address(2)}, wire::kFlagLearn),
       message(Kind::kBind, {1, address(4)}), message(Kind::kLocate, {address(4), 16})},
      {a, prepare(3, "aten::clamp", clamp, fresh),
       message(Kind::kCall, {wire::pair(3, 1), address(1), 0x3ff0000000000000, address(5)}),
       prepare(4, "aten::mul.Tensor", scalar, fresh),
       message(Kind::kCall, {wire::pair(4, 1), address(1), 1, 0, address(6)})},
      {prepare(5, "aten::zeros", zeros, {}),
       message(Kind::kCall, {wire::pair(5, 0)}, wire::kFlagLearn),
       message(Kind::kBind, {1, address(7)}), prepare(6, "aten::from_file", {}, {})},
      {a, message(Kind::kWrite, {address(1), 8, 42}), message(Kind::kAdopt, {address(8), 4096, 0}),
       message(Kind::kCopyIn, {address(8), 16, 64}), message(Kind::kCopyOut, {address(8), 16, 128}),
       message(Kind::kCopyWithin, {address(8), address(1), 16}),
       message(Kind::kLoad, {address(1), 64, 1, 4096 - 64}),
       message(Kind::kLoad, {address(8), 4096, 1, 0}), message(Kind::kLoad, {address(1), 8, 0, 0})},
      {message(Kind::kSeed, {1, 7}), message(Kind::kGeneratorGet, {1}),
       message(Kind::kGeneratorSet, {1, 8, 0}), message(Kind::kGeneratorDrop, {1}),
       message(Kind::kEventRecord, {1}), message(Kind::kEventRecord, {2}),
       message(Kind::kEventElapsed, {1, 2}), message(Kind::kFetchAdd, {0, 0, 4, 0, 1, 1, 6}),
       message(Kind::kEventDrop, {1}), message(Kind::kStats, {}), message(Kind::kSync, {}),
       message(Kind::kSettings, settings), message(Kind::kForget, {}), message(Kind::kTrim, {}),
       message(Kind::kBackward, {1, 0}), message(Kind::kGraphDrop, {1})},
  };
}

Stream load(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  Stream stream;
  uint64_t count = 0;
  while (file.read(reinterpret_cast<char*>(&count), 8) && count > 0 && count < 1 << 16) {
    Words words(count);
    if (!file.read(reinterpret_cast<char*>(words.data()), static_cast<std::streamsize>(count * 8)))
      break;
    stream.push_back(std::move(words));
  }
  return stream;
}

void save(const std::filesystem::path& path, const Stream& stream) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& words : stream) {
    const uint64_t count = words.size();
    file.write(reinterpret_cast<const char*>(&count), 8);
    file.write(reinterpret_cast<const char*>(words.data()),
               static_cast<std::streamsize>(count * 8));
  }
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}
  uint64_t below(uint64_t limit) { return limit == 0 ? 0 : random_() % limit; }

  Stream mutate(Stream stream, const Stream& other) {
    for (uint64_t i = 0, n = 1 + below(4); i < n; ++i) {
      if (stream.empty()) stream.push_back(message(wire::Kind::kSync, {}));
      Words& words = stream[below(stream.size())];
      switch (below(8)) {
        case 0:
          words[below(words.size())] = interesting();
          break;
        case 1:
          words[below(words.size())] ^= uint64_t{1} << below(64);
          break;
        case 2:
          words[below(words.size())] += below(5) - 2;
          break;
        case 3:
          words.insert(words.begin() + static_cast<long>(below(words.size() + 1)), interesting());
          break;
        case 4:
          if (words.size() > 1) words.erase(words.begin() + static_cast<long>(below(words.size())));
          break;
        case 5:
          if (!other.empty()) stream.push_back(other[below(other.size())]);
          break;
        case 6:
          stream.erase(stream.begin() + static_cast<long>(below(stream.size())));
          break;
        case 7:
          std::swap(words, stream[below(stream.size())]);
          break;
      }
    }
    if (stream.size() > 64) stream.resize(64);
    return stream;
  }

 private:
  uint64_t interesting() {
    static const uint64_t values[] = {0,
                                      1,
                                      2,
                                      7,
                                      8,
                                      63,
                                      64,
                                      255,
                                      4096,
                                      4097,
                                      65535,
                                      1u << 20,
                                      1ull << 30,
                                      1ull << 31,
                                      1ull << 32,
                                      (1ull << 32) - 1,
                                      1ull << 52,
                                      1ull << 62,
                                      1ull << 63,
                                      ~0ull,
                                      ~0ull - 7,
                                      wire::makeAddress(kSession, 1),
                                      wire::makeAddress(kSession, 2) + 8,
                                      wire::makeAddress(kSession, wire::kSlotsMax - 1),
                                      wire::makeAddress(kSession + 1, 1)};
    if (below(3) == 0) return random_();
    if (below(3) == 0)
      return wire::tagWord(static_cast<wire::Tag>(below(16)), static_cast<uint8_t>(below(256)),
                           static_cast<uint8_t>(below(70)), static_cast<uint8_t>(below(16)),
                           static_cast<uint32_t>(below(5)));
    return values[below(std::size(values))];
  }

  std::mt19937_64 random_;
};

// A reader's memory of a page. It is mapped in every run, so that a stream finds it as it is.
int readerMemory() {
  static const auto memory = memory::SharedMemory::create("fuzz-reader", 4096);
  return fcntl(memory.fd(), F_DUPFD_CLOEXEC, 0);
}

void run(const Stream& stream, const memory::SharedMemory& host, worker::Arena& arena) {
  Sink sink;
  worker::ExecutorOptions options;
  options.session = kSession;
  options.memory_bytes = 1 << 20;
  options.run_operator = &pretend;
  worker::ReaderMemory reader(std::chrono::milliseconds(0));  // nothing else will come
  reader.put(1, readerMemory());
  options.reader = &reader;
  worker::Executor executor(options, host, &arena, sink);
  uint64_t sequence = 0;
  for (const auto& words : stream) {
    if (!words.empty()) executor.handle(words, ++sequence);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: executor_fuzz CORPUS_DIR SECONDS [SEED]\n");
    return 2;
  }
  const std::filesystem::path directory(argv[1]);
  const int64_t limit_ns = std::atoll(argv[2]) * 1000000000LL;
  Mutator mutator(argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  std::filesystem::create_directories(directory);

  const auto host = memory::SharedMemory::create("fuzz-host", 1 << 20);
  worker::Arena arena(memory::SharedMemory::create("fuzz-arena", 16 << 20), 8 << 20, "fuzz");
  c10::SetAllocator(c10::DeviceType::CPU, &arena, 255);
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;

  std::vector<Stream> corpus = seeds();
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    corpus.push_back(load(entry.path()));
  }
  for (const auto& stream : corpus) run(stream, host, arena);
  const int64_t start = nowNs();
  uint64_t runs = corpus.size();
  size_t kept = 0;
  int64_t reported = start;
  while (nowNs() - start < limit_ns) {
    const Stream mutant =
        mutator.mutate(corpus[mutator.below(corpus.size())], corpus[mutator.below(corpus.size())]);
    save(directory / ".last", mutant);  // what to look at if this one ends the process
    g_new = false;
    run(mutant, host, arena);
    ++runs;
    if (g_new) {
      corpus.push_back(mutant);
      save(directory / ("found-" + std::to_string(runs)), mutant);
      ++kept;
    }
    if (nowNs() - reported > 10000000000LL) {
      reported = nowNs();
      std::printf("%lld s: %llu streams, %zu edges, corpus %zu\n",
                  static_cast<long long>((reported - start) / 1000000000),
                  static_cast<unsigned long long>(runs), g_edges, corpus.size());
      std::fflush(stdout);
    }
  }
  std::filesystem::remove(directory / ".last");
  std::printf("%llu streams without a fault, %zu edges, %zu new in the corpus\n",
              static_cast<unsigned long long>(runs), g_edges, kept);
  std::fflush(stdout);
  std::_Exit(0);  // tensors of torch's own may still live in the arena
}
