// The client reads every setting that the worker applies.
#include "worker/calls/settings.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <doctest/doctest.h>

#include "client/settings/program_settings.h"

namespace shoal {
namespace {

// What this machine cannot switch on.
constexpr uint64_t kElsewhere = wire::bitOf(wire::Setting::kFp16ReductionCpu);

struct Unchanged {
  ~Unchanged() { worker::applySettings({}); }
};

TEST_CASE("settings: a worker that starts is set as a program that starts") {
  const Unchanged unchanged;
  const wire::Settings own = client::programSettings();
  CHECK(own == wire::Settings{});
  worker::applySettings({});
  CHECK(client::programSettings() == own);
}

TEST_CASE("settings: every flag arrives") {
  const Unchanged unchanged;
  for (unsigned bit = 0; bit < static_cast<unsigned>(wire::Setting::kEnd); ++bit) {
    if ((kElsewhere >> bit & 1) != 0) continue;
    CAPTURE(bit);
    wire::Settings settings;
    settings.flags ^= uint64_t{1} << bit;
    worker::applySettings(settings);
    CHECK(client::programSettings() == settings);
  }
}

TEST_CASE("settings: what is not a flag arrives") {
  const Unchanged unchanged;
  wire::Settings settings;
  settings.default_dtype = static_cast<uint8_t>(at::kDouble);
  settings.attention_order = {4, 3, 2, 1, 0};
  settings.cudnn_benchmark_limit = 3;
  settings.cudnn_depthwise = 2;
  settings.fp16_reduction = 1;
  settings.bf16_reduction = 2;
  using wire::Precision;
  settings.precisions = {Precision::kIeee, Precision::kTf32, Precision::kTf32, Precision::kBf16,
                         Precision::kIeee, Precision::kBf16, Precision::kIeee};
  worker::applySettings(settings);
  CHECK(client::programSettings() == settings);
}

TEST_CASE("settings: values that no program has are refused") {
  const Unchanged unchanged;
  wire::Settings settings;
  settings.default_dtype = static_cast<uint8_t>(at::kLong);
  CHECK_THROWS_AS(worker::applySettings(settings), wire::ProtocolError);
  settings = {};
  settings.attention_order = {1, 1, 2, 3, 4};
  CHECK_THROWS_AS(worker::applySettings(settings), wire::ProtocolError);
}

TEST_CASE("settings: a change is noticed once") {
  const Unchanged unchanged;
  client::ProgramSettings known(/*of_cpu=*/true);
  CHECK_FALSE(known.changed(true));
  at::globalContext().setBenchmarkCuDNN(true);
  CHECK(known.changed(false));
  CHECK(known.told().has(wire::Setting::kCudnnBenchmark));
  CHECK_FALSE(known.changed(true));
  at::globalContext().setFloat32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL,
                                          at::Float32Precision::BF16);
  CHECK_FALSE(known.changed(false));  // only calls that depend on it look
  CHECK(known.changed(true));
  CHECK(known.told().precision(wire::PrecisionOf::kMkldnnMatmul) == wire::Precision::kBf16);
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(at::kDouble));
  CHECK(known.changed(false));
  CHECK_FALSE(known.changed(false));
}

}  // namespace
}  // namespace shoal
