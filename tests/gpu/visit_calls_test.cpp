// What a visit of K steps asks of CUDA, counted where the runtime is entered (CUPTI calls back at
// each of its functions): one update kernel, K graphs, one event, two copies of what the visit
// leaves, and questions that cost nothing. No call that waits, allocates or captures.
#include <doctest/doctest.h>

#include <cupti.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/test_backend.h"
#include "tests/support/tiny_v4_visits.h"

namespace {

using namespace quire;
using namespace quire::serving;
using namespace quire::serving::test;
using quire::test::test_backend;

void check_cupti(CUptiResult result) {
  if (result == CUPTI_SUCCESS) return;
  const char* text = "";
  cuptiGetResultString(result, &text);
  throw std::runtime_error(std::string("CUPTI: ") + text);
}

// Calls of the runtime by name, while it lives. One thread calls.
class RuntimeCalls {
 public:
  RuntimeCalls() {
    check_cupti(cuptiSubscribe(&subscriber_, on_call, this));
    check_cupti(cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_RUNTIME_API));
  }
  ~RuntimeCalls() { cuptiUnsubscribe(subscriber_); }
  RuntimeCalls(const RuntimeCalls&) = delete;
  RuntimeCalls& operator=(const RuntimeCalls&) = delete;

  void clear() { counts_.clear(); }
  const std::map<std::string, std::int64_t>& counts() const { return counts_; }

 private:
  static void CUPTIAPI on_call(void* self, CUpti_CallbackDomain, CUpti_CallbackId,
                               const void* data) {
    const auto& call = *static_cast<const CUpti_CallbackData*>(data);
    if (call.callbackSite != CUPTI_API_ENTER) return;
    std::string name = call.functionName;
    name.resize(std::min(name.size(), name.find("_v")));  // the version
    ++static_cast<RuntimeCalls*>(self)->counts_[name];
  }

  CUpti_SubscriberHandle subscriber_{};
  std::map<std::string, std::int64_t> counts_;
};

// They read what the host holds, or say which device is meant.
bool only_asks(std::string_view name) {
  for (const std::string_view known :
       {"cudaGetDevice", "cudaGetLastError", "cudaPeekAtLastError", "cudaPointerGetAttributes",
        "cudaStreamGetCaptureInfo", "cudaStreamIsCapturing", "cudaStreamGetDevice",
        "cudaDeviceGetAttribute", "cudaSetDevice"}) {
    if (name == known) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("CUDA is entered for one update, K graphs, one event and two copies a visit, no more") {
  const ModelSpec spec{
      .layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca, LayerKind::kSliding},
      .draft_layers = 1};
  std::vector<VisitRequest> requests;
  for (std::uint32_t i = 0; i < 12; ++i) {
    const auto prompt = static_cast<std::int32_t>(1 + 11 * i);
    requests.push_back({1000 + i, prompt, prompt + 40});
  }
  for (const std::int32_t steps : {1, 4, 16}) {
    for (const std::int32_t drafts : {0, 2}) {
      CAPTURE(steps);
      CAPTURE(drafts);
      RuntimeCalls calls;
      std::int64_t visits = 0;
      VisitOptions options;
      options.drafts = drafts;
      options.steps = steps;
      options.on_visit = [&](bool begins) {
        if (begins) return calls.clear();
        std::map<std::string, std::int64_t> asked_to;
        for (const auto& [name, count] : calls.counts()) {
          if (!only_asks(name)) asked_to[name] = count;
        }
        const std::map<std::string, std::int64_t> expected{{"cudaLaunchKernelExC", 1},
                                                           {"cudaGraphLaunch", steps},
                                                           {"cudaEventRecord", 1},
                                                           {"cudaMemcpyAsync", 2}};
        const bool as_promised = asked_to == expected;
        CHECK(as_promised);
        if (!as_promised) {
          for (const auto& [name, count] : asked_to) MESSAGE(name, ": ", count);
        }
        ++visits;
      };
      Visits engine(test_backend(), spec, tiny_config(), 256, options);
      engine.serve(requests);
      CHECK(visits > 2);
    }
  }
}
