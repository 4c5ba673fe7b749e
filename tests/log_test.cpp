// Messages: levels, sinks, the environment variable, and what a cache says of itself.
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/base/log.h>
#include <quire/runtime/owners.h>

namespace {

using namespace quire;

struct Collected {
  std::vector<std::string> texts;
  LogSink sink() {
    return [this](LogLevel, std::string_view text) { texts.emplace_back(text); };
  }
};

TEST_CASE("a sink gets the messages at or above its level, braces and all") {
  Collected collected;
  Logger logger(collected.sink());
  logger.log(LogLevel::kInfo, "below the default level");
  logger.log(LogLevel::kWarn, "a {} stays as it is");
  logger.set_level(LogLevel::kOff);
  logger.log(LogLevel::kError, "nobody listens");
  REQUIRE(collected.texts.size() == 1);
  CHECK(collected.texts[0] == "a {} stays as it is");
}

TEST_CASE("QUIRE_LOG sets the level, and an unknown one is said") {
  Collected collected;
  setenv("QUIRE_LOG", "debug", 1);
  Logger debugging(collected.sink());
  debugging.log(LogLevel::kDebug, "seen");
  setenv("QUIRE_LOG", "loud", 1);
  Logger loud(collected.sink());
  unsetenv("QUIRE_LOG");
  REQUIRE(collected.texts.size() == 2);
  CHECK(collected.texts[0] == "seen");
  CHECK(collected.texts[1].find("loud") != std::string::npos);
}

TEST_CASE("a cache says how it was opened and that it was cleared") {
  Collected collected;
  Logger logger(collected.sink());
  logger.set_level(LogLevel::kInfo);
  const auto backend = make_host_backend();
  ModelSpec spec;
  spec.layers = {LayerKind::kCsa};
  Limits limits;
  limits.seats_max = 2;
  limits.pages = 4;
  limits.rows_max = 2;
  limits.tokens_max = 64;
  limits.context_max = 512;
  DeviceCacheOptions options;
  options.log = &logger;
  CacheManager cache(*backend, spec, limits, options);
  Stream stream(*backend);
  cache.reset(stream);
  stream.wait();
  REQUIRE(collected.texts.size() == 2);
  CHECK(collected.texts[0].find("4 pages, 2 seats") != std::string::npos);
  CHECK(collected.texts[1].find("cleared") != std::string::npos);
}

}  // namespace
