// Where Quire's messages go. spdlog stands behind it; none of it shows in a public header.
// The environment variable QUIRE_LOG (trace, debug, info, warn, error, off) sets the level that is
// in force until `set_log_level` is called; default warn.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

namespace quire {

enum class LogLevel { kTrace, kDebug, kInfo, kWarn, kError, kOff };

using LogSink = std::function<void(LogLevel, std::string_view)>;

// A logger belongs to whoever made it; the library has no global one. Thread-safe.
class Logger {
 public:
  // With a sink, every message at or above the level is handed to it, on the calling thread;
  // without, messages go to stderr.
  explicit Logger(LogSink sink = {});
  ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  void set_level(LogLevel level);
  void log(LogLevel level, std::string_view message) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace quire
