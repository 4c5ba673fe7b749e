// What the single operations refuse, before anything is enqueued and in the same words on both
// backends; and that no work at all is legal without any memory behind it.
#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <quire/planner/plan_rule.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using quire::test::DeviceArray;
using quire::test::test_backend;

constexpr std::uint8_t kUntouched = 0xA5;
constexpr std::int64_t kTooMany = std::int64_t{1} << 31;

void call(const RecordPlanParams& params, StreamView stream) {
  test_backend().plan_records(params, stream);
}
void call(const CompressC4DecodeParams& params, StreamView stream) {
  test_backend().compress_c4_decode(params, Pdl::kOff, stream);
}
void call(const CompressC4PrefillParams& params, StreamView stream) {
  test_backend().compress_c4_prefill(params, Pdl::kOff, stream);
}

// Memory that every operation of this file would change if it ran, and parameters that are right.
struct Fixture {
  Stream stream{test_backend()};
  DeviceArray<std::byte> memory{test_backend(), stream, 1 << 18, kUntouched};
  DeviceArray<std::int32_t> indices{test_backend(), stream, 64, 0};

  std::byte* at(std::int64_t offset) { return memory.data() + offset; }

  RecordPlanParams records() {
    RecordPlanParams params;
    params.rule = kCsaRule;
    params.rows = 2;
    params.prefix = params.extend = indices.data();
    params.compress = reinterpret_cast<PlanRecord*>(at(0));
    params.write = reinterpret_cast<PlanRecord*>(at(1024));
    params.compress_capacity = params.write_capacity = 4;
    params.cu_extend = params.cu_compress = params.cu_write =
        reinterpret_cast<std::int32_t*>(at(2048));
    return params;
  }
  CompressC4DecodeParams decode() {
    CompressC4DecodeParams params;
    params.mode = C4StateMode::kPageAligned;
    params.batch = 1;
    params.state = params.output = at(0);
    params.input = params.bias = at(131072);
    params.seq_lens = params.indices = params.previous_pages = indices.data();
    return params;
  }
  CompressC4PrefillParams prefill() {
    CompressC4PrefillParams params;
    params.mode = C4StateMode::kPageAligned;
    params.state = params.output = at(0);
    params.input = params.bias = at(131072);
    params.compress = params.write = reinterpret_cast<const PlanRecord*>(indices.data());
    params.compress_capacity = params.write_capacity = 1;
    params.indices = indices.data();
    params.bundles = reinterpret_cast<const C4PageBundle*>(indices.data());
    return params;
  }
  StoreParams store() {
    StoreParams params;
    params.input = at(131072);
    params.rows = 1;
    params.locations = indices.data();
    params.pool = make_entry_pool(at(0), main_page_bytes(64), 64);
    return params;
  }

  bool untouched() const {
    stream.wait();
    return memory.download() == std::vector<std::byte>(memory.size(), std::byte{kUntouched});
  }
};

std::string refusal(const std::function<void()>& run) {
  try {
    run();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// `change` makes right parameters wrong; the refusal must hold all the words.
template <class Params, class Change>
void check_refused(Fixture& fixture, Params params, Change change,
                   const std::vector<std::string>& words) {
  change(params);
  const std::string text = refusal([&] { call(params, fixture.stream); });
  CAPTURE(text);
  for (const std::string& word : words) CHECK(has(text, word));
}

template <class Change>
void check_stores_refused(Fixture& fixture, Change change, const std::vector<std::string>& words) {
  StoreParams params = fixture.store();
  change(params);
  const auto check = [&](const std::string& text) {
    CAPTURE(text);
    for (const std::string& word : words) CHECK(has(text, word));
  };
  const std::string main = refusal(
      [&] { test_backend().store_flashmla(params, Pdl::kOff, fixture.stream); });
  CHECK(has(main, "store_flashmla"));
  check(main);
  const std::string indexer = refusal(
      [&] { test_backend().store_indexer(params, Pdl::kOff, fixture.stream); });
  CHECK(has(indexer, "store_indexer"));
  check(indexer);
}

template <class T>
T* moved(T* pointer, std::intptr_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<std::intptr_t>(pointer) + bytes);
}

TEST_CASE("plan_records refuses counts, rules and pointers that cannot be, and names them") {
  Fixture fixture;
  using P = RecordPlanParams;
  const auto refused = [&](auto change, std::vector<std::string> words) {
    words.push_back("plan_records");
    check_refused(fixture, fixture.records(), change, words);
  };
  refused([](P& p) { p.rows = -1; }, {"rows is -1", "0 to 2147483647"});
  refused([](P& p) { p.compress_capacity = -3; }, {"compress_capacity is -3"});
  refused([](P& p) { p.write_capacity = kTooMany; }, {"write_capacity is 2147483648"});
  refused([](P& p) { p.rule.ratio = 0; }, {"rule.ratio is 0", "1 to"});
  refused([](P& p) { p.prefix = nullptr; }, {"prefix is null"});
  refused([](P& p) { p.extend = nullptr; }, {"extend is null"});
  refused([](P& p) { p.cu_extend = nullptr; }, {"cu_extend is null"});
  refused([](P& p) { p.cu_compress = nullptr; }, {"cu_compress is null"});
  refused([](P& p) { p.cu_write = nullptr; }, {"cu_write is null"});
  refused([](P& p) { p.prefix = moved(p.prefix, 1); }, {"prefix at", "multiples of 4"});
  refused([](P& p) { p.compress = moved(p.compress, 1); }, {"compress at", "multiples of 4"});
  refused([](P& p) { p.write = moved(p.write, 2); }, {"write at", "multiples of 4"});
  refused([](P& p) { p.cu_write = moved(p.cu_write, 3); }, {"cu_write at", "multiples of 4"});
  CHECK(fixture.untouched());
}

TEST_CASE("compress_c4_decode refuses dims, types and pointers that cannot be, and names them") {
  Fixture fixture;
  using P = CompressC4DecodeParams;
  const auto refused = [&](auto change, std::vector<std::string> words) {
    words.push_back("compress_c4_decode");
    check_refused(fixture, fixture.decode(), change, words);
  };
  for (const std::int32_t d : {0, 64, 256, 1024, -128}) {
    refused([&](P& p) { p.head_dim = d; }, {concat("head_dim is ", d), "supported: 128, 512"});
  }
  refused([](P& p) { p.type = ElementType{2}; }, {": type is 2", "fp32"});
  refused([](P& p) { p.output_type = ElementType{-1}; }, {"output_type is -1", "bf16"});
  refused([](P& p) { p.mode = C4StateMode{7}; }, {"mode is 7", "page-aligned"});
  refused([](P& p) { p.batch = -1; }, {"batch is -1"});
  refused([](P& p) { p.state = nullptr; }, {"state is null"});
  refused([](P& p) { p.input = nullptr; }, {"input is null"});
  refused([](P& p) { p.bias = nullptr; }, {"bias is null"});
  refused([](P& p) { p.output = nullptr; }, {"output is null"});
  refused([](P& p) { p.seq_lens = nullptr; }, {"seq_lens is null"});
  refused([](P& p) { p.indices = nullptr; }, {"indices is null"});
  refused([](P& p) { p.previous_pages = nullptr; }, {"previous_pages is null"});
  refused([](P& p) { p.state = moved(p.state, 4); }, {"state at", "multiples of 16"});
  refused([](P& p) { p.input = moved(p.input, 8); }, {"input at", "multiples of 16"});
  refused([](P& p) { p.bias = moved(p.bias, 2); }, {"bias at", "multiples of 16"});
  refused([](P& p) { p.output = moved(p.output, 12); }, {"output at", "multiples of 16"});
  refused([](P& p) { p.seq_lens = moved(p.seq_lens, 2); }, {"seq_lens at", "multiples of 4"});
  CHECK(fixture.untouched());
}

TEST_CASE("compress_c4_prefill refuses dims, types and pointers that cannot be, and names them") {
  Fixture fixture;
  using P = CompressC4PrefillParams;
  const auto refused = [&](auto change, std::vector<std::string> words) {
    words.push_back("compress_c4_prefill");
    check_refused(fixture, fixture.prefill(), change, words);
  };
  refused([](P& p) { p.head_dim = 96; }, {"head_dim is 96", "supported: 128, 512"});
  refused([](P& p) { p.type = ElementType{2}; }, {": type is 2"});
  refused([](P& p) { p.output_type = ElementType{3}; }, {"output_type is 3"});
  refused([](P& p) { p.mode = C4StateMode{-1}; }, {"mode is -1"});
  refused([](P& p) { p.compress_capacity = -1; }, {"compress_capacity is -1"});
  refused([](P& p) { p.write_capacity = kTooMany; }, {"write_capacity is 2147483648"});
  refused([](P& p) { p.state = nullptr; }, {"state is null"});
  refused([](P& p) { p.input = nullptr; }, {"input is null"});
  refused([](P& p) { p.bias = nullptr; }, {"bias is null"});
  refused([](P& p) { p.output = nullptr; }, {"output is null"});
  refused([](P& p) { p.compress = nullptr; }, {"compress is null"});
  refused([](P& p) { p.write = nullptr; }, {"write is null"});
  refused([](P& p) { p.indices = nullptr; }, {"indices is null"});
  refused([](P& p) { p.bundles = nullptr; }, {"bundles is null"});
  refused([](P& p) { p.state = moved(p.state, 8); }, {"state at", "multiples of 16"});
  refused([](P& p) { p.input = moved(p.input, 4); }, {"input at", "multiples of 16"});
  refused([](P& p) { p.bias = moved(p.bias, 4); }, {"bias at", "multiples of 16"});
  refused([](P& p) { p.output = moved(p.output, 2); }, {"output at", "multiples of 16"});
  refused([](P& p) { p.write = moved(p.write, 1); }, {"write at", "multiples of 4"});
  CHECK(fixture.untouched());
}

TEST_CASE("the stores refuse pools, pointers and floors that cannot be, and name them") {
  Fixture fixture;
  using P = StoreParams;
  const auto refused = [&](auto change, const std::vector<std::string>& words) {
    check_stores_refused(fixture, change, words);
  };
  refused([](P& p) { p.rows = -1; }, {"rows is -1"});
  refused([](P& p) { p.rows = kTooMany; }, {"rows is 2147483648"});
  refused([](P& p) { p.input = nullptr; }, {"input is null"});
  refused([](P& p) { p.locations = nullptr; }, {"locations is null"});
  refused([](P& p) { p.input = moved(p.input, 2); }, {"input at", "multiples of 16"});
  refused([](P& p) { p.locations = moved(p.locations, 2); }, {"locations at", "multiples of 4"});
  refused([](P& p) {
    p.wide_locations = true;
    p.locations = moved(p.locations, 4);
  }, {"locations at", "multiples of 8"});
  refused([](P& p) { p.pool.base = nullptr; }, {"pool.base is null"});
  refused([](P& p) { p.pool.base += 8; }, {"pool.base at", "multiples of 16"});
  for (const std::int32_t entries : {0, -64, 63, 96}) {
    refused([&](P& p) { p.pool.entries_per_page = entries; },
            {concat("entries_per_page is ", entries), "powers of two"});
  }
  refused([](P& p) { p.pool.entries_per_page_log2 = 5; }, {"entries_per_page_log2 is 5"});
  refused([](P& p) { p.pool.entries_per_page_log2 = 64; }, {"entries_per_page_log2 is 64"});
  refused([](P& p) { p.pool.page_stride_bytes += 8; }, {"page_stride_bytes is 37448"});
  refused([](P& p) { p.pool.page_stride_bytes = -37440; }, {"page_stride_bytes is -37440"});
  refused([](P& p) { p.pool.page_stride_bytes = 0; }, {"page_stride_bytes is 0"});
  CHECK(fixture.untouched());
}

TEST_CASE("a page stride below a page, and floors without an inverse, are refused by the stores") {
  Fixture fixture;
  StoreParams params = fixture.store();
  params.pool.page_stride_bytes = 37440 - 16;
  CHECK(has(refusal([&] { test_backend().store_flashmla(params, Pdl::kOff, fixture.stream); }),
            "multiples of 16 from 37440"));
  params.pool.page_stride_bytes = 8448 - 16;
  CHECK(has(refusal([&] { test_backend().store_indexer(params, Pdl::kOff, fixture.stream); }),
            "multiples of 16 from 8448"));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float floor : {0.0f, -1e-4f, 1e-37f, infinity, nan}) {
    CAPTURE(floor);
    params = fixture.store();
    params.scale_floor = floor;
    for (const bool indexer : {false, true}) {
      const std::string text = refusal([&] {
        indexer ? test_backend().store_indexer(params, Pdl::kOff, fixture.stream)
                : test_backend().store_flashmla(params, Pdl::kOff, fixture.stream);
      });
      CAPTURE(text);
      CHECK(has(text, "scale_floor is"));
      CHECK(has(text, "supported: finite"));
    }
  }
  CHECK(fixture.untouched());
}

TEST_CASE("no rows, no batch and no records need no memory and write nothing") {
  Fixture fixture;
  CompressC4DecodeParams decode;
  CHECK(refusal([&] { call(decode, fixture.stream); }) == "accepted");
  CompressC4PrefillParams prefill;
  CHECK(refusal([&] { call(prefill, fixture.stream); }) == "accepted");
  StoreParams store;
  store.pool = make_entry_pool(nullptr, main_page_bytes(64), 64);
  CHECK(refusal([&] { test_backend().store_flashmla(store, Pdl::kOff, fixture.stream); }) ==
        "accepted");
  CHECK(refusal([&] { test_backend().store_indexer(store, Pdl::kOff, fixture.stream); }) ==
        "accepted");
  fixture.stream.wait();
  CHECK(fixture.untouched());
  // What is wrong is wrong without work, too.
  decode.head_dim = 96;
  CHECK(has(refusal([&] { call(decode, fixture.stream); }), "head_dim is 96"));
}

TEST_CASE("a prefill that only writes state needs neither bias nor output, a ring no bundles") {
  Fixture fixture;
  const DeviceArray<PlanRecord> records(test_backend(), fixture.stream,
                                        std::vector<PlanRecord>{{0, 0, 1, 6}});
  CompressC4PrefillParams params = fixture.prefill();
  params.mode = C4StateMode::kRing;
  params.bundles = nullptr;
  params.bias = params.output = nullptr;
  params.compress = nullptr;
  params.compress_capacity = 0;
  params.write = records.data();
  CHECK(refusal([&] { call(params, fixture.stream); }) == "accepted");
  fixture.stream.wait();
  // The row was 0xA5 like the state: it was copied over its equal, and nothing else changed.
  CHECK(fixture.untouched());

  CompressC4DecodeParams decode = fixture.decode();
  decode.mode = C4StateMode::kRing;
  decode.previous_pages = nullptr;  // seq_lens are 0: nothing happens
  CHECK(refusal([&] { call(decode, fixture.stream); }) == "accepted");
  CHECK(fixture.untouched());
}

}  // namespace
