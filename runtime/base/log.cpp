// spdlog behind a small face: one logger per Logger object, never in spdlog's global registry.
#include <quire/runtime/base/log.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>

namespace quire {
namespace {

using LevelName = std::pair<std::string_view, LogLevel>;
constexpr std::array<LevelName, 6> kLevelNames{{{"trace", LogLevel::kTrace},
                                                {"debug", LogLevel::kDebug},
                                                {"info", LogLevel::kInfo},
                                                {"warn", LogLevel::kWarn},
                                                {"error", LogLevel::kError},
                                                {"off", LogLevel::kOff}}};

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      break;
  }
  return spdlog::level::off;
}

LogLevel from_spdlog(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
      return LogLevel::kTrace;
    case spdlog::level::debug:
      return LogLevel::kDebug;
    case spdlog::level::info:
      return LogLevel::kInfo;
    case spdlog::level::warn:
      return LogLevel::kWarn;
    default:
      return LogLevel::kError;
  }
}

class ForwardingSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit ForwardingSink(LogSink to) : to_(std::move(to)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    to_(from_spdlog(message.level),
        std::string_view(message.payload.data(), message.payload.size()));
  }
  void flush_() override {}

  LogSink to_;
};

std::shared_ptr<spdlog::sinks::sink> make_sink(LogSink sink) {
  if (sink) return std::make_shared<ForwardingSink>(std::move(sink));
  return std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
}

}  // namespace

struct Logger::Impl {
  spdlog::logger logger;
  explicit Impl(LogSink sink) : logger("quire", make_sink(std::move(sink))) {}
};

Logger::Logger(LogSink sink) : impl_(std::make_unique<Impl>(std::move(sink))) {
  impl_->logger.flush_on(spdlog::level::warn);
  set_level(LogLevel::kWarn);
  const char* wanted = std::getenv("QUIRE_LOG");
  if (wanted == nullptr || *wanted == '\0') return;
  for (const auto& [name, level] : kLevelNames) {
    if (name != wanted) continue;
    set_level(level);
    return;
  }
  log(LogLevel::kWarn, "QUIRE_LOG=" + std::string(wanted) +
                           " is no level; known are trace, debug, info, warn, error, off");
}

Logger::~Logger() = default;

void Logger::set_level(LogLevel level) { impl_->logger.set_level(to_spdlog(level)); }

void Logger::log(LogLevel level, std::string_view message) const {
  if (level == LogLevel::kOff) return;
  impl_->logger.log(to_spdlog(level), "{}", message);
}

}  // namespace quire
